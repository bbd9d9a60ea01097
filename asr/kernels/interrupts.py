"""Ctrl-C while compiled loops run, and while modules are imported.

numba builds the named tuples that a loop returns with a few lines of Python, where Python raises `KeyboardInterrupt` if
Ctrl-C was pressed during the loop. numba does not expect an exception there, and the process would crash.

numpy's and torch's own imports swallow a `KeyboardInterrupt`, or turn it into another error. What follows then runs
with half a module, and fails with a message about something else.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_DELAY = 0.02  # seconds; building a tuple takes microseconds


@contextmanager
def interrupts_between_loops() -> Iterator[None]:
    """Within the block, Ctrl-C takes effect once a compiled loop has returned, or an import ended; otherwise, at once.

    Has no effect in a thread other than the main one, or if the program handles Ctrl-C itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    handler = _Handler(_num_imports(sys._getframe()))
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if handler.stop_waiting():
            raise KeyboardInterrupt


class _Handler:
    """Handles SIGINT; `num_imports` were under way when the block began, such as that of the program itself."""

    def __init__(self, num_imports: int) -> None:
        self._num_imports = num_imports
        self._again: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.stop_waiting()  # Ctrl-C may be pressed several times
        if not _builds_a_result(frame) and _num_imports(frame) <= self._num_imports:
            raise KeyboardInterrupt
        # Not from here: each further call would check for signals, and end up here again.
        self._again = threading.Timer(_DELAY, _thread.interrupt_main)
        self._again.daemon = True
        self._again.start()

    def stop_waiting(self) -> bool:
        """Ends the wait for a later time, if there is one -> whether there was."""
        was_waiting = self._again is not None and not self._again.finished.is_set()
        if self._again is not None:
            self._again.cancel()
        return was_waiting


def _builds_a_result(frame: FrameType | None) -> bool:
    """Whether Python code runs by which numba builds a named tuple: its class is unpickled, and called."""
    return any(name == "numba.core.serialize" or name.startswith("namedtuple_") for name in _modules(frame))


def _num_imports(frame: FrameType | None) -> int:
    return sum(name == "importlib._bootstrap" for name in _modules(frame))


def _modules(frame: FrameType | None) -> Iterator[str]:
    """The names of the modules whose functions run, the innermost first."""
    while frame is not None:
        yield str(frame.f_globals.get("__name__"))
        frame = frame.f_back
