"""Compiles loops over arrays with numba, runs them in threads, and says whether numba and Triton run here.

A compiled loop makes one pass where tensor operations make several. For each loop there is a version in tensor
operations with the same results, up to rounding where sums are reordered (`fastmath`). numba is optional.

numba keeps machine code on disk. `watch_compiler` notices what it still compiles, and `cached_code` finds the files.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import itertools
import logging
import operator
import os
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from asr.kernels.interrupts import interrupts_between_loops
from asr.locks import lock

_LOGGER = logging.getLogger(__name__)
_LONGEST_REASON = 200  # characters


def triton_available(device: torch.device) -> bool:
    """Whether Triton's kernels run for tensors on a device: on a GPU, or anywhere in its interpreter.

    The interpreter, slow and meant for tests, is chosen by the environment variable TRITON_INTERPRET=1. Warns if Triton
    is installed, but does not run on a GPU.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    # The device comes first: for a CPU, Triton is not even imported, which takes a tenth of a second and 70 MB.
    if not (device.type == "cuda" or is_interpreted) or not triton_is_new_enough():
        return False
    if is_interpreted:
        return True
    problem = triton_problem(device)
    if problem is not None:
        warnings.warn(
            f"Triton's kernels do not run on {device} ({problem}); operations of torch replace them, which take "
            "several times as long; 'asr doctor' says what is missing.",
            stacklevel=1,
        )
    return problem is None


@functools.cache
def triton_problem(device: torch.device) -> str | None:
    """Why Triton's kernels do not run on a GPU, in one line, or None if they do; compiles and runs one of them.

    Raises:
        torch.cuda.OutOfMemoryError: the GPU is full, which says nothing about Triton.
    """
    kernels = importlib.import_module("asr.kernels.hash_table_triton")
    try:
        table, key = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((2, 8), 1))
        kernels.find_places(table, key, 62).cpu()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # of Triton, of the C compiler that it runs, or of the driver
        return textwrap.shorten(str(error) or type(error).__name__, _LONGEST_REASON, placeholder=" ...").rstrip(".")
    return None


# Triton 3.9 warns that later versions will not join products and sums unless they are told to. No search depends on it.
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION is unset")


OLDEST_TRITON = (3, 0)
"""Comes with torch 2.4. Older versions have no histograms, and reject arguments named `stream`."""


def triton_is_new_enough() -> bool:
    """Whether Triton is installed, in version `OLDEST_TRITON` or newer."""
    if not has_package("triton"):
        return False
    version = str(importlib.import_module("triton").__version__)
    return tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_TRITON


def has_package(name: str) -> bool:
    """Whether a package is installed and can be imported: an older numba, for example, rejects a newer numpy."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def gpu_module(name: str, device: torch.device) -> ModuleType | None:
    """The named module of Triton kernels; None if the device is not a GPU or Triton is missing."""
    return importlib.import_module(name) if device.type == "cuda" and triton_available(device) else None


@dataclass(frozen=True)
class Intrinsic:
    """A function for compiled loops that cannot be written in Python; its module needs numba."""

    module: str
    name: str

    def load(self) -> Any:
        """The function for numba."""
        return getattr(importlib.import_module(self.module), self.name)

    def stamps(self, argument_types: Any) -> list[tuple[str, int]]:
        """More files, with their times, on which code compiled for arguments of these types depends."""
        return []


_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])
_ItemT = TypeVar("_ItemT")
_ResultT = TypeVar("_ResultT")


class Setting(NamedTuple):
    """How a function is compiled, see `kernel`."""

    fastmath: bool = True
    allocates: bool = True


def kernel(*, fastmath: bool, allocates: bool = True) -> Callable[[_FunctionT], _FunctionT]:
    """Sets how `jit` compiles a function, and the functions it calls that have no setting of their own.

    With `fastmath`, the default of `jit`, sums may be reordered: only then does the compiler use vector instructions
    for them. Without it, results equal those of tensor operations bit for bit.

    Without `allocates`, the function must not make arrays, and references to arrays are not counted. In short loops
    over named tuples of many arrays, counting takes most of the time.
    """

    def mark(function: _FunctionT) -> _FunctionT:
        function.__dict__["setting"] = Setting(fastmath, allocates)
        return function

    return mark


def uncompiled(function: _FunctionT) -> _FunctionT:
    """Decorator of a function that users call and that runs numba's loops.

    It runs as it is inside of `torch.compile`, too, and signals wait for its loops (`interrupts_between_loops`).
    """
    function = interrupts_between_loops()(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Importing torch's compiler takes seconds, so only those who use it do so.
        if "torch._dynamo" in sys.modules:
            disable: Any = torch.compiler.disable
            return disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(_FunctionT, call)


def has_loops(device: torch.device) -> bool:
    """Whether compiled loops run on a device."""
    return device.type == "cpu" and has_package("numba")


@functools.cache
def jit(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function compiled, with the functions and intrinsics of its module that it calls; None without numba."""
    return _jit(function, Setting()) if has_package("numba") else None


@functools.cache
def jit_required(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `jit`, where numba is known to be installed.

    What is pickled should not keep the result, but call this: a copy in another process would compile it again.
    """
    return _jit(function, Setting())


def jit_callee(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `jit_required`, for a function that only compiled code calls."""
    return _jit(function, Setting(), is_callee=True)


@functools.cache
def _jit(function: Callable[..., Any], default: Setting, is_callee: bool = False) -> Callable[..., Any]:
    import numba

    assert isinstance(function, FunctionType)
    source = Path(function.__code__.co_filename)
    setting: Setting = getattr(function, "setting", default)
    sources, intrinsics = _dependencies(function)
    callees = _callees(function)
    called = {
        name: callee.load() if isinstance(callee, Intrinsic) else _jit(callee, setting, is_callee=True)
        for name, callee in callees.items()
    }
    if called:
        linked = FunctionType(function.__code__, {**function.__globals__, **called}, function.__name__)
        function = functools.update_wrapper(linked, function)
        del function.__wrapped__
    flags = {"reassoc", "contract"} if setting.fastmath else False
    # `_nrt` is numba's runtime of counted memory. A function without the option would take on its caller's.
    options: dict[str, Any] = {"_nrt": setting.allocates}
    # Code that converts the arguments of a call from C or from Python, which takes long to compile for named tuples.
    options |= {"no_cfunc_wrapper": True, "no_cpython_wrapper": is_callee}
    compiled: Any = numba.njit(nogil=True, fastmath=flags, error_model="numpy", **options)(function)
    try:
        compiled._cache = _cache_class()(compiled.py_func)
    except RuntimeError:  # a function that is in no file
        return cast(Callable[..., Any], compiled)
    _forgive_stale_cache(compiled._cache)
    CACHED_FUNCTIONS.append(compiled)
    # numba compares only the time of the function's own file, and would use code compiled from older callees.
    compiled._cache._cache_file._source_stamp = [tuple(setting), *_stamps(sources)]
    _lock_cache(compiled._cache._cache_file)
    _read_also_beside_source(compiled._cache, source)
    index_key = compiled._cache._index_key

    def whole_index_key(sig: Any, codegen: Any) -> Any:
        return index_key(sig, codegen), is_callee, tuple(stamp for each in intrinsics for stamp in each.stamps(sig))

    compiled._cache._index_key = whole_index_key
    return cast(Callable[..., Any], compiled)


@functools.cache
def _cache_class() -> Any:
    """numba's cache of a function, which uses a folder beside the source also if no folder can be written.

    What was compiled when the package was installed is then loaded, and `_saved_if_possible` reports what is not kept.
    """
    caching: Any = importlib.import_module("numba.core.caching")
    locators = caching.CompileResultCacheImpl._locator_classes
    in_tree: Any = next(locator for locator in locators if "InTree" in locator.__name__)

    class ReadOnly(in_tree):  # type: ignore[misc]
        def ensure_cache_path(self) -> None:
            """numba's own method raises an error if the folder cannot be written."""

    class Files(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = (*locators, ReadOnly)

    class Cache(caching.FunctionCache):  # type: ignore[misc]
        _impl_class = Files

    return Cache


def _read_also_beside_source(cache: Any, source: Path) -> None:
    """Loads what is compiled beside the source where new code goes to the user's cache, as the package is read-only."""
    own, folder = cache._cache_file, source.parent / "__pycache__"
    if os.environ.get("NUMBA_CACHE_DIR") or Path(cache.cache_path) == folder:
        return
    installed = type(own)(str(folder), cache._impl.filename_base, own._source_stamp)
    load_own = own.load

    def load(key: Any) -> Any:
        found = load_own(key)
        if found is None and (found := installed.load(key)) is not None:
            own.found_path = installed._index_path
        return found

    own.load = load


def _forgive_stale_cache(cache: Any) -> None:
    """Compiles again if the cache cannot be read.

    The cache pickles types by class: after an upgrade that removes one, numba would raise AttributeError.
    """
    load_overload = cache.load_overload

    def load_or_forget(sig: Any, target_context: Any) -> Any:
        try:
            return load_overload(sig, target_context)
        except Exception:
            with contextlib.suppress(OSError):  # in a read-only package
                cache.flush()
            return None

    cache.load_overload = load_or_forget


def _lock_cache(cache_file: Any) -> None:
    """Makes numba's cache files of a function safe for several processes.

    An entry is a line of the index and a numbered file. Two processes that compile for different arguments at the same
    time may take the same number, and later ones would then run code that was compiled for other types.
    """
    path = Path(f"{cache_file._index_path}.lock")
    cache_file.load = _one_process_at_a_time(cache_file.load, path)
    cache_file.save = _one_process_at_a_time(_saved_if_possible(cache_file), path)


def _saved_if_possible(cache_file: Any) -> Callable[..., None]:
    """numba's method that saves compiled code; a full disk does no more harm than that the code is not kept."""
    save, index = cache_file.save, Path(cache_file._index_path)

    def call(*args: Any) -> None:
        try:
            if not cache_file._load_index():
                # Left from earlier sources. numba writes the index first: if it stopped there, the index would name
                # their code.
                for earlier in index.parent.glob(f"{glob.escape(index.stem)}.*.nbc"):
                    earlier.unlink()
            save(*args)
        except OSError as error:
            _tell_that_code_is_not_kept(index.parent, error)

    return call


def _tell_that_code_is_not_kept(folder: Path, error: OSError) -> None:
    if UNWRITABLE_FOLDERS:  # a warning for one folder is enough
        return
    UNWRITABLE_FOLDERS.append(folder)
    _LOGGER.warning(
        "%s: compiled loops cannot be kept there (%s), so that each process compiles them again; make room, or name "
        "another folder in the environment variable NUMBA_CACHE_DIR.",
        *(folder, error.strerror or error),
    )


def _one_process_at_a_time(method: Callable[..., Any], path: Path) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any) -> Any:
        try:
            file = path.open("ab")
        except OSError:  # the cache's folder may be read-only
            return method(*args)
        with file:
            lock(file)
            return method(*args)

    return call


CACHED_FUNCTIONS: list[Any] = []
"""All functions of this process that numba caches on disk."""
UNWRITABLE_FOLDERS: list[Path] = []
"""The first folder in which this process could not keep compiled code."""


def source_stamps(function: Callable[..., Any]) -> list[tuple[str, int]]:
    """The files of a function and of all that it calls, and when they were last written."""
    assert isinstance(function, FunctionType)
    return _stamps(_dependencies(function)[0])


def arrays_of(*tensors: Tensor) -> list[Any]:
    """CPU tensors as arrays for a loop to read or fill; contiguous ones share their memory."""
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def intrinsics_of(function: Callable[..., Any]) -> list[Intrinsic]:
    """The intrinsics that a function and all that it calls use."""
    assert isinstance(function, FunctionType)
    return _dependencies(function)[1]


def _callees(function: FunctionType) -> dict[str, FunctionType | Intrinsic]:
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {name: callee for name, callee in named.items() if isinstance(callee, (FunctionType, Intrinsic))}


def _dependencies(function: FunctionType) -> tuple[set[str], list[Intrinsic]]:
    """The files of a function and of all that it calls, and the intrinsics among these."""
    files, intrinsics = {function.__code__.co_filename}, []
    for callee in _callees(function).values():
        if isinstance(callee, Intrinsic):
            files.add(str(importlib.import_module(callee.module).__file__))
            intrinsics.append(callee)
        else:
            more_files, more_intrinsics = _dependencies(callee)
            files |= more_files
            intrinsics += more_intrinsics
    return files, list(dict.fromkeys(intrinsics))


def _stamps(files: set[str]) -> list[tuple[str, int]]:
    return [(path, Path(path).stat().st_mtime_ns) for path in sorted(files)]


def jit_for(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any] | None:
    """The compiled function if it can take tensors like this one: float32, on a CPU, without gradients."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or tensor.requires_grad:
        return None
    return jit(function)


@contextlib.contextmanager
def watch_compiler(on_compile: Callable[[int], None]) -> Iterator[None]:
    """Within the block, calls `on_compile` with the number of functions so far whenever numba begins to compile one.

    Functions loaded from numba's cache do not count. Without numba nothing is compiled.
    """
    if not has_package("numba"):
        yield
        return
    from numba.core import event

    class Counter(event.Listener):  # type: ignore[misc]
        num_compiled = 0

        def on_start(self, _: object) -> None:
            self.num_compiled += 1
            on_compile(self.num_compiled)

        def on_end(self, _: object) -> None:
            pass

    counter = Counter()
    event.register("numba:compile", counter)
    try:
        yield
    finally:
        event.unregister("numba:compile", counter)


def cached_code() -> dict[str, Any]:
    """Where numba keeps the machine code of what this process has compiled or loaded.

    Returns:
        `files`, the paths of numba's index files, and `sources`, each source file with its modification time in ns.
    """
    used = [compiled for compiled in CACHED_FUNCTIONS if compiled.signatures]
    caches = [compiled._cache._cache_file for compiled in used]
    files = sorted({str(getattr(cache, "found_path", cache._index_path)) for cache in caches})
    stamps = [stamp for compiled in used for stamp in compiled._cache._cache_file._source_stamp[1:]]
    return {"files": files, "sources": {str(path): time_ns for path, time_ns in stamps}}


def built_for() -> list[str]:
    """What machine code depends on besides sources: versions of numba and Python, and the CPU; numba is needed."""
    import numba
    from llvmlite import binding

    return [numba.__version__, binding.get_host_cpu_name(), sys.version.split()[0]]


_num_of_loops: ContextVar[int | None] = ContextVar("_num_of_loops", default=None)
_on_one_thread = threading.Lock()
_num_on_one_thread = _num_usual = 0


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Within the block, torch's own operations use one thread, and `in_threads` uses as many as torch had before.

    Between operations torch's threads busy-wait, and take processor time from the threads that loops run on. Where
    other programs keep a core busy, they wait for each other for most of the time.
    """
    global _num_on_one_thread, _num_usual  # noqa: PLW0603
    with _on_one_thread:
        # A thread that starts while another one is in such a block has one thread only, but not after its own block.
        if not _num_on_one_thread:
            _num_usual = torch.get_num_threads()
        _num_on_one_thread += 1
        before = _num_usual if _num_of_loops.get() is None else torch.get_num_threads()
        torch.set_num_threads(1)
    token = _num_of_loops.set(_num_of_loops.get() or before)
    try:
        yield
    finally:
        _num_of_loops.reset(token)
        with _on_one_thread:
            _num_on_one_thread -= 1
            torch.set_num_threads(before)


def in_threads(work: Callable[[int, int], None], num_rows: int, rows_at_least: int) -> None:
    """Runs work(begin, end) on parts of num_rows rows in threads; `work` must not call this function itself."""
    num_parts = max(1, min(num_threads(), num_rows // rows_at_least))
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    _together([functools.partial(work, *part) for part in itertools.pairwise(bounds)])


def each_in_threads(work: Callable[[_ItemT], _ResultT], items: Iterable[_ItemT]) -> list[_ResultT]:
    """The results of work(item) for all items, in their order, computed in threads without gradients.

    A thread takes the next item when it is free; items are made only then. Within `work`, `in_threads` uses one thread.

    Raises:
        Exception: what `work` or making an item raised; work on other items ends.
    """
    left, lock, is_over = enumerate(items), threading.Lock(), threading.Event()
    found: dict[int, _ResultT] = {}

    def take() -> None:
        token = _num_of_loops.set(1)
        try:
            with torch.no_grad():
                while not is_over.is_set():
                    with lock:
                        taken = next(left, None)
                    if taken is None:
                        return
                    found[taken[0]] = work(taken[1])
        except BaseException:
            is_over.set()
            raise
        finally:
            _num_of_loops.reset(token)

    try:
        _together([take] * max(1, min(num_threads(), operator.length_hint(items, num_threads()))))
    finally:
        is_over.set()  # an interrupt may have ended the wait for other threads
    return [found[place] for place in range(len(found))]


def num_threads() -> int:
    """Number of threads for work that is not torch's: as many as torch uses, or did before `torch_on_one_thread`."""
    return _num_of_loops.get() or torch.get_num_threads()


def _together(parts: Sequence[Callable[[], None]]) -> None:
    """Calls functions in threads, the first one in this thread."""
    others = [_pool(len(parts) - 1).submit(part) for part in parts[1:]]
    parts[0]()
    for other in others:
        other.result()


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads)


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the pool's threads
