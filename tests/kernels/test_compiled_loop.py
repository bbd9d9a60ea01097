"""Compiled loops and their caches on disk."""

import contextlib
import errno
import importlib.util
import io
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from asr.kernels.jit import CACHED_FUNCTIONS, _lock_cache, jit, kernel
from asr.kernels.lookup import AnyType, compiled_lookup, look_up, of_any_type

pytest.importorskip("numba")

_CALLER = "from callee import weight\n\n\ndef scaled(value):\n    return weight() * value\n"
_RUN = "from asr.kernels.jit import jit; import caller; print(jit(caller.scaled)(2))"


def _write(path: Path, text: str, second: int) -> None:
    path.write_text(text, encoding="utf-8")
    os.utime(path, (second, second))


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["numba", "asr.kernels.lookup"])  # most of the time of a new process


def _value(folder: Path, code: str = _RUN, **more: str) -> int:
    """What code prints in a process of its own that has compiled nothing yet."""
    results, sender = _SERVER.Pipe(duplex=False)
    environment = {"NUMBA_CACHE_DIR": str(folder / "cache"), **more}
    process = _SERVER.Process(target=_run, args=(sender, folder, code, environment))
    process.start()
    sender.close()
    printed = results.recv()  # EOFError: the process has failed, and has said why
    process.join()
    return int(printed)


def _run(sender: Connection, folder: Path, code: str, environment: dict[str, str]) -> None:
    import numba.core.config

    assert not CACHED_FUNCTIONS
    os.environ.update(environment)
    numba.core.config.reload_config()
    sys.path.insert(0, str(folder))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    sender.send(printed.getvalue())


@pytest.mark.slow
def test_a_changed_callee_in_another_file_is_compiled_anew(tmp_path: Path) -> None:
    """As after an update of the checkout: the caller's own file is the same."""
    _write(tmp_path / "caller.py", _CALLER, 1_000)
    _write(tmp_path / "callee.py", "def weight():\n    return 3\n", 1_000)
    assert _value(tmp_path) == 6
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("caller*.nbc")}
    assert kept
    assert _value(tmp_path) == 6  # read from the cache
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    _write(tmp_path / "callee.py", "def weight():\n    return 5\n", 2_000)
    assert _value(tmp_path) == 10


@pytest.mark.slow
def test_a_callee_may_be_called_from_python_as_well(tmp_path: Path) -> None:
    _write(tmp_path / "caller.py", _CALLER, 1_000)
    _write(tmp_path / "callee.py", "def weight():\n    return 3\n", 1_000)
    assert _value(tmp_path) == 6  # now the cache has a callee without a wrapper for Python
    for _ in range(2):
        assert _value(tmp_path, "from asr.kernels.jit import jit; import callee; print(jit(callee.weight)())") == 3


@pytest.mark.slow
def test_where_nothing_can_be_written_loops_are_compiled_in_memory(tmp_path: Path) -> None:
    """As installed for all users, and run by one without a home."""
    _write(tmp_path / "caller.py", _CALLER, 1_000)
    _write(tmp_path / "callee.py", "def weight():\n    return 3\n", 1_000)
    (tmp_path / "__pycache__").write_text("no folder")
    nowhere = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": os.devnull, "HOME": os.devnull}
    assert _value(tmp_path, **nowhere) == 6
    told = "import asr.kernels.jit as j, caller; j.jit(caller.scaled)(2); print(len(j.UNWRITABLE_FOLDERS))"
    assert _value(tmp_path, told, **nowhere) == 1


_NUM_COMPILED_IF_READ_ONLY = """
import tempfile
usual = tempfile.TemporaryFile

def refuse(*args, **options):  # root may write everywhere
    if "__pycache__" in str(options.get("dir")):
        raise PermissionError(13, "Permission denied")
    return usual(*args, **options)

tempfile.TemporaryFile = refuse
import caller
from asr.kernels.jit import cached_code, jit, watch_compiler
compiled = []
with watch_compiler(compiled.append):
    assert jit(caller.scaled)(2) == 6
assert all("__pycache__" in path for path in cached_code()["files"])
print(len(compiled))
"""


@pytest.mark.slow
def test_what_was_compiled_in_a_package_that_is_now_read_only_is_used(tmp_path: Path) -> None:
    """As in a container: compiled when it was made, and run by a user who cannot write there, with a home or without.

    numba itself would ignore what is beside the source, and compile again at every start.
    """
    _write(tmp_path / "caller.py", _CALLER, 1_000)
    _write(tmp_path / "callee.py", "def weight():\n    return 3\n", 1_000)
    assert _value(tmp_path, NUMBA_CACHE_DIR="") == 6
    for home in (os.devnull, str(tmp_path / "home")):
        code = _NUM_COMPILED_IF_READ_ONLY
        assert _value(tmp_path, code, NUMBA_CACHE_DIR="", XDG_CACHE_HOME=home, HOME=home) == 0


def test_processes_write_a_cache_one_after_the_other(tmp_path: Path) -> None:
    """numba's index is read, changed and written; two at a time would give two entries the same number."""
    index = tmp_path / "loop.nbi"
    index.write_text("0")

    class Cache:
        _index_path = str(index)
        _load_index = dict  # no entries

        def save(self) -> None:
            before = int(index.read_text())
            time.sleep(0.002)
            index.write_text(str(before + 1))

        load = save

    caches = [Cache(), Cache()]
    for cache in caches:
        _lock_cache(cache)
    # Threads: a lock belongs to the open file, and each call opens it anew.
    threads = [Thread(target=lambda c=cache: [c.load() or c.save() for _ in range(5)]) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.read_text() == "20"


def test_a_cache_without_locks_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))  # as on some network file systems

    cache = SimpleNamespace(_index_path=str(tmp_path / "loop.nbi"), load=lambda: "code", save=None)
    _lock_cache(cache)
    monkeypatch.setattr("fcntl.flock", flock)
    assert cache.load() == "code"


def test_nothing_else_compiles_loops() -> None:
    root = Path(importlib.util.find_spec("asr").submodule_search_locations[0])
    assert [path.name for path in root.rglob("*.py") if "njit" in path.read_text(encoding="utf-8")] == ["jit.py"]


_LOOKUP = """
from typing import Any, NamedTuple
from asr.kernels.lookup import compiled_lookup

class Tables(NamedTuple):
    score: Any
    always_answers: bool = True

@compiled_lookup(Tables)
def lookup(context_idx, word_id, tables, log_prob, next_idx):
    for i in range(len(word_id)):
        log_prob[i], next_idx[i] = {factor} * tables.score[word_id[i]], context_idx[i] + 1
    return True
"""
_LOOKUP_CALLER = """
from typing import Any, NamedTuple
from asr.kernels.lookup import look_up

class Outer(NamedTuple):
    inner: Any

def total(word_id, outer, log_prob, next_idx):
    look_up(word_id, word_id, outer.inner, log_prob, next_idx)
    return log_prob.sum()
"""
_RUN_LOOKUP = """
import numpy as np
from asr.kernels.jit import jit
from asr.kernels.lookup import of_any_type
import caller, model
score, word = np.array([1.0, 2.0], dtype=np.float32), np.array([1, 1, 0])
tables, sums = model.Tables(score), []
for inner in (tables, of_any_type(tables)):
    answers = np.empty(3, dtype=np.float32), np.empty(3, dtype=np.int64)
    sums.append(int(jit(caller.total)(word, caller.Outer(inner), *answers)))
assert sums[0] == sums[1], sums
print(sums[0])
"""


@pytest.mark.slow
def test_a_changed_lookup_is_compiled_anew_in_the_loops_that_ask_it(tmp_path: Path) -> None:
    """Only the type of the tables tells which lookup a loop calls."""
    _write(tmp_path / "caller.py", _LOOKUP_CALLER, 1_000)
    _write(tmp_path / "model.py", _LOOKUP.format(factor=1), 1_000)
    assert _value(tmp_path, _RUN_LOOKUP) == 5
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("caller*.nbc")}
    assert kept
    assert _value(tmp_path, _RUN_LOOKUP) == 5  # read from the cache
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    _write(tmp_path / "model.py", _LOOKUP.format(factor=2), 2_000)
    assert _value(tmp_path, _RUN_LOOKUP) == 10


class Scores(NamedTuple):
    score: Any
    more: tuple[Any, int]
    always_answers: bool = False


@compiled_lookup(Scores)
@kernel(fastmath=False)
def look_up_scores(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
    score = tables.score[1:]  # a reference of its own
    for i in range(len(word_id)):
        log_prob[i], next_idx[i] = score[word_id[i]] + tables.more[0][0], context_idx[i] + tables.more[1]
    return len(word_id) > 1


@kernel(fastmath=False)
def asks(word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> Any:
    return look_up(word_id, word_id, tables, log_prob, next_idx)


def test_a_loop_is_compiled_once_for_tables_of_all_types() -> None:
    loop = jit(asks)
    for dtype in (np.float32, np.float64):
        tables = Scores(np.array([0, 1, 2], dtype=dtype), (np.full(1, 0.5, dtype=dtype), 7))
        before = sys.getrefcount(tables.score)
        for num in (1, 2):
            log_prob, next_idx = np.empty(num, dtype=np.float32), np.empty(num, dtype=np.int64)
            assert loop(np.arange(num), of_any_type(tables), log_prob, next_idx) == (num == 2)
            assert log_prob.tolist() == [1.5, 2.5][:num] and next_idx.tolist() == [7, 8][:num]
        after = sys.getrefcount(tables.score)
        assert after == before
    assert len(loop.signatures) == 1


def test_tables_are_written_again_only_if_they_are_others() -> None:
    any_type, loop = AnyType(), jit(asks)
    for first in (1.0, 3.0):
        tables = Scores(np.array([0.0, first, 2.0], dtype=np.float32), (np.zeros(1, dtype=np.float32), 7))
        log_prob, next_idx = np.empty(2, dtype=np.float32), np.empty(2, dtype=np.int64)
        assert any_type(tables) is any_type(tables)
        assert loop(np.arange(2), any_type(tables), log_prob, next_idx)
        assert log_prob.tolist() == [first, 2.0]


_MAKES_ARRAYS = """
import numpy as np
from asr.kernels.jit import kernel

@kernel(fastmath=False, allocates={allocates})
def total(num):
    return makes(num)

@kernel(fastmath=False)
def makes(num):
    return np.ones(num).sum()
"""


@pytest.mark.slow
@pytest.mark.parametrize("allocates", [True, False])
def test_a_loop_without_counted_memory_calls_one_with_it(allocates: bool, tmp_path: Path) -> None:
    """numba passes options of callers on to callees that lack them: np.ones would not compile there."""
    _write(tmp_path / "caller.py", _MAKES_ARRAYS.format(allocates=allocates), 1_000)
    run = "from asr.kernels.jit import jit; import caller; print(int(jit(caller.total)(5)))"
    assert _value(tmp_path, run) == 5


_RUN_ON_A_FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))  # enough for numba's index, but not for the code
"""


@pytest.mark.slow
def test_on_a_full_disk_loops_are_compiled_and_never_those_of_earlier_sources_run(tmp_path: Path) -> None:
    _write(tmp_path / "caller.py", _CALLER, 1_000)
    for weight in (3, 5):
        _write(tmp_path / "callee.py", f"def weight():\n    return {weight}\n", weight)
        assert _value(tmp_path, _RUN_ON_A_FULL_DISK + _RUN) == 2 * weight
        assert _value(tmp_path) == 2 * weight
