"""The process's memory: what libraries keep is returned to the system, and Python's collector can be paused.

Arrays of varying sizes leave gaps in glibc's heap. In a process that recognizes speech for hours, these grow to several
times the memory in use, although everything has been freed. oneDNN, with which torch computes on CPUs, keeps the code
that it has compiled for each shape, and recordings have varying lengths.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS_BETWEEN = 300.0
_NUM_COMPILED_SHAPES = 64
_lock = threading.Lock()
_seconds_since = 0.0


def limit_compiled_shapes() -> None:
    """Lets oneDNN keep compiled code for 64 shapes instead of 1024, unless the environment says otherwise.

    Call it before the first network runs, which is when oneDNN reads the environment; torch has no other switch.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_NUM_COMPILED_SHAPES))


def release_now_and_then(audio_seconds: float) -> None:
    """Call it when this much audio has been recognized; after every five minutes of audio, free memory is returned."""
    global _seconds_since  # noqa: PLW0603
    with _lock:
        _seconds_since += audio_seconds
        if _seconds_since < _SECONDS_BETWEEN:
            return
        _seconds_since = 0.0
    release()


def release() -> None:
    """Returns free memory to the system now, which takes some milliseconds. Does nothing without glibc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses the search for cycles of objects, which takes most of the time when very many objects are made to stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
