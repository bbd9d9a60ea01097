"""Watches what numba compiles in this process, and finds the machine code that it keeps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from asr.kernels.jit import CACHED_FUNCTIONS, has_package


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
    files = sorted({str(compiled._cache._cache_file._index_path) for compiled in used})
    stamps = [stamp for compiled in used for stamp in compiled._cache._cache_file._source_stamp[1:]]
    return {"files": files, "sources": {str(path): time_ns for path, time_ns in stamps}}


def built_for() -> list[str]:
    """What machine code depends on besides sources: versions of numba and Python, and the CPU; numba is needed."""
    import numba
    from llvmlite import binding

    return [numba.__version__, binding.get_host_cpu_name(), sys.version.split()[0]]
