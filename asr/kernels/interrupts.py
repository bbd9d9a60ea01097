"""Ctrl-C, and other signals whose handlers raise, while compiled loops run and while modules are imported.

numba builds the named tuples that a loop returns with a few lines of Python, where Python raises `KeyboardInterrupt` if
Ctrl-C was pressed during the loop. numba does not expect an exception there, and the process would crash. The same
holds for handlers that end a call after some time (SIGALRM, Celery's SIGUSR1) or a process (`sys.exit` on SIGTERM).

numpy's and torch's own imports swallow a `KeyboardInterrupt`, or turn it into another error. What follows then runs
with half a module, and fails with a message about something else.
"""

from __future__ import annotations

import _signal  # as signal, without its enumerations, which take most of the time
import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_DELAY = 0.02  # seconds; building a tuple takes microseconds

# Those whose handlers tend to raise; to ask about all signals takes longer than many a call.
_SIGNALS = tuple(
    int(getattr(signal, f"SIG{name}")) for name in ("INT", "TERM", "HUP", "QUIT", "ABRT", "ALRM", "USR1", "USR2")
)


@contextmanager
def interrupts_between_loops() -> Iterator[None]:
    """Within the block, Ctrl-C takes effect once a compiled loop has returned, or an import ended; otherwise, at once.

    So do other signals for which the program has a handler, which is called then. Has no effect in a thread other than
    the main one. Works as a decorator, too: `@interrupts_between_loops()`. Blocks may be nested.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_imports = _num_imports(sys._getframe())
    handlers = dict[int, _Handler]()
    for number in _SIGNALS:
        own = _signal.getsignal(number)
        if callable(own) and not isinstance(own, _Handler):
            handlers[number] = _Handler(own, num_imports)
            _signal.signal(number, handlers[number])
    try:
        yield
    finally:
        # The program may have set others meanwhile.
        for number in [number for number, handler in handlers.items() if _signal.getsignal(number) is handler]:
            _signal.signal(number, handlers[number].own)
        for number, handler in handlers.items():
            if handler.stop_waiting():
                handler.own(number, sys._getframe())


class _Handler:
    """Handles a signal as the program's `own` handler does, but not in the middle of a result or an import.

    `num_imports` were under way when the block began, such as that of the program itself.
    """

    def __init__(self, own: Callable[[int, FrameType | None], Any], num_imports: int) -> None:
        self.own = own
        self._num_imports = num_imports
        self._again: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.stop_waiting()  # Ctrl-C may be pressed several times
        if not _builds_a_result(frame) and _num_imports(frame) <= self._num_imports:
            self.own(number, frame)
            return
        # Not from here: each further call would check for signals, and end up here again.
        self._again = threading.Timer(_DELAY, _thread.interrupt_main, (number,))
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
