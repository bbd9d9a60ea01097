"""Gives memory back to the system that libraries keep for later.

Arrays of ever different sizes leave gaps in glibc's heap. In a process that recognizes for hours these grow to several
times what is in use, though everything has been freed. oneDNN, by which torch computes on CPUs, keeps what it has
compiled for each shape, and recordings have ever different lengths.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any

_SECONDS_BETWEEN = 300.0
_NUM_COMPILED_SHAPES = 64
_lock = threading.Lock()
_seconds_since = 0.0


def limit_compiled_shapes() -> None:
    """Lets oneDNN keep what it has compiled for 64 shapes instead of 1024, unless the environment says otherwise.

    To be called before the first network computes: then oneDNN looks at the environment, and torch has no other switch.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_NUM_COMPILED_SHAPES))


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
