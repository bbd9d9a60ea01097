"""Ctrl-C while compiled loops run.

numba builds the named tuples that a loop returns with a few lines of Python, where Python raises `KeyboardInterrupt` if
Ctrl-C was pressed during the loop. numba does not expect an exception there, and the process would crash.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_DELAY = 0.02  # seconds; building a tuple takes microseconds


@contextmanager
def interrupts_between_loops() -> Iterator[None]:
    """Within the block, Ctrl-C takes effect once a compiled loop has returned; outside loops, at once.

    Has no effect in a thread other than the main one, or if the program handles Ctrl-C itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if _builds_a_result(frame):
            # Not from here: each further call would check for signals, and end up here again.
            again = threading.Timer(_DELAY, _thread.interrupt_main)
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _builds_a_result(frame: FrameType) -> bool:
    """Whether this is Python code that numba runs to build a named tuple: its class is unpickled, and called."""
    module = str(frame.f_globals.get("__name__"))
    return module == "numba.core.serialize" or module.startswith("namedtuple_")
