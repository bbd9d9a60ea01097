"""Runs tests in forks: with a mutant in place of a module, or recording which functions each test calls.

The process imports libraries once and forks for each order, so that nothing of a mutant stays. A mutant is not written
to a file: the module is compiled from its changed syntax tree when a test imports it. Line numbers stay, so that loops
that numba has compiled before are found in its cache.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from scripts.benchmarks.inputs import ROOT
from scripts.benchmarks.mutants import Mutant
from scripts.benchmarks.mutants_tests import Function

_TIMEOUT = 900
"""Seconds of waiting after which a run counts as failed."""


class _Recorder:
    """A plugin of pytest that records the functions called by each test.

    What modules and fixtures shared by several tests call counts for each test of the file.
    """

    def __init__(self) -> None:
        self._shared: set[CodeType] = set()
        self._current = self._shared
        self._tests: list[tuple[str, float, set[CodeType]]] = []
        sys.setprofile(self._note)
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._current.add(frame.f_code)

    @contextlib.contextmanager
    def _into(self, target: set[CodeType]) -> Iterator[None]:
        before, self._current = self._current, target
        yield
        self._current = before

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        own: set[CodeType] = set()
        start = time.process_time()
        with self._into(own):
            yield
        self._tests.append((item.nodeid, round(time.process_time() - start, 3), own))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        with self._into(self._current if fixturedef.scope == "function" else self._shared):
            yield

    def write(self, path: str) -> None:
        sys.setprofile(None)
        number_of: dict[Function, int] = {}
        tests = []
        for name, seconds, own in self._tests:
            called = {
                (Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_firstlineno)
                for code in own | self._shared
                if code.co_filename.startswith(f"{ROOT}/asr/") and code.co_name != "<module>"
            }
            tests.append((name, seconds, [number_of.setdefault(one, len(number_of)) for one in sorted(called)]))
        Path(path).write_text(json.dumps({"functions": list(number_of), "tests": tests}), encoding="utf-8")


def _replace(module: str, tree: ast.Module) -> None:
    """Has a module compiled from a syntax tree when it is imported."""
    path = str(ROOT / module)
    get_code = SourceFileLoader.get_code

    def changed(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        if loader.path == path:
            return compile(tree, path, "exec", dont_inherit=True)
        return get_code(loader, fullname)

    SourceFileLoader.get_code = changed  # type: ignore[method-assign]


def _carry_out(order: dict[str, Any]) -> int:
    """Runs the tests of an order, in a forked process."""
    signal.alarm(_TIMEOUT)
    if "cpu_s" in order:
        resource.setrlimit(resource.RLIMIT_CPU, (order["cpu_s"], order["cpu_s"]))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    if "mutant" in order:
        mutant = Mutant(**order["mutant"])
        _replace(mutant.module, mutant.tree())
    for name in [name for name in sys.modules if name.split(".")[0] in ("asr", "scripts")]:
        del sys.modules[name]
    recorder = _Recorder() if "record" in order else None
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", order["marked"], *order["tests"]]
    status = int(pytest.main(arguments, plugins=[recorder] if recorder else []))
    if recorder:
        recorder.write(order["record"])
    return status


def _serve() -> None:
    """Forks for each order read from standard input and prints the exit status."""
    import hypothesis  # noqa: F401
    import torch  # noqa: F401

    with contextlib.suppress(ImportError):
        import numba  # noqa: F401
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                status = _carry_out(json.loads(line))
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
