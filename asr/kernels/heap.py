"""Gives memory back to the system that the C library keeps for later.

Arrays of ever different sizes leave gaps in glibc's heap. In a process that recognizes for hours these grow to several
times what is in use, though everything has been freed.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

_SECONDS_BETWEEN = 300.0
_lock = threading.Lock()
_seconds_since = 0.0


def release_now_and_then(audio_seconds: float) -> None:
    """To be called when so much audio has been recognized; every five minutes of it free memory is given back."""
    global _seconds_since  # noqa: PLW0603
    with _lock:
        _seconds_since += audio_seconds
        if _seconds_since < _SECONDS_BETWEEN:
            return
        _seconds_since = 0.0
    release()


def release() -> None:
    """Gives free memory back now; takes some milliseconds. With another C library than glibc nothing happens."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
