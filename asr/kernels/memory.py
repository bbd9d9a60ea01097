"""Memory of a process that recognizes speech for hours.

Arrays of varying sizes leave gaps in glibc's heap. These grow to several times the memory in use, although everything
has been freed. oneDNN, with which torch computes on CPUs, keeps the code that it has compiled for each shape, and
recordings have varying lengths. Tensors that are kept between calls must be ordinary ones (`no_autograd`).
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

import torch

_SECONDS_BETWEEN = 300.0
_NUM_COMPILED_SHAPES = 64
_lock = threading.Lock()
_seconds_since = 0.0


@contextmanager
def no_autograd() -> Iterator[None]:
    """Records no gradients and makes ordinary tensors, also inside `torch.inference_mode()`.

    A tensor that is made in inference mode cannot be changed outside of it. Caches and streams would break if their
    user called them in inference mode once and not the next time. Works as a decorator, too: `@no_autograd()`.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


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
