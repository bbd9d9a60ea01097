"""Memory of a process that recognizes speech for hours, and copies between host and device.

Arrays of varying sizes leave gaps in glibc's heap. These grow to several times the memory in use, although everything
has been freed. oneDNN, with which torch computes on CPUs, keeps the code that it has compiled for each shape, and
recordings have varying lengths. Tensors that are kept between calls must be ordinary ones (`no_autograd`). Copies to
and from a GPU go through pinned memory.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_SECONDS_BETWEEN = 300.0
_NUM_COMPILED_SHAPES = 64
_lock = threading.Lock()
_seconds_since = 0.0


@contextmanager
def no_autograd() -> Iterator[None]:
    """Records no gradients and makes ordinary tensors, also inside `torch.inference_mode()`; as `on_cpu_by_default`.

    A tensor that is made in inference mode cannot be changed outside of it. Caches and streams would break if their
    user called them in inference mode once and not the next time. Works as a decorator, too: `@no_autograd()`.
    """
    with torch.inference_mode(False), torch.no_grad(), on_cpu_by_default():
        yield


@contextmanager
def on_cpu_by_default() -> Iterator[None]:
    """Makes tensors on the CPU if no device is given, also after `torch.set_default_device("cuda")`.

    Recognizers move by `.to("cuda")` alone. Works as a decorator, too: `@on_cpu_by_default()`.
    """
    # torch 1.13 has no default device. Where none is set, the context would only slow down every operation.
    is_cpu = not hasattr(torch, "get_default_device") or torch.get_default_device().type == "cpu"
    with nullcontext() if is_cpu else torch.device("cpu"):
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


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device. Copies to a GPU go through pinned memory, so that the host does not wait."""
    if host.device.type == "cpu" and device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Moves tensors of one device to another in one copy, through pinned memory on the host; they then share memory.

    Args:
        tensors: with one dimension, of types of 4 or 8 bytes.
        device: the same device as theirs returns them unchanged.
    """
    if not tensors or tensors[0].device == device:
        return list(tensors)
    # Wide types first, so that all are aligned.
    order = sorted(range(len(tensors)), key=lambda position: -tensors[position].element_size())
    packed = torch.cat([tensors[position].contiguous().view(torch.uint8) for position in order])
    if device.type == "cpu":
        host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(packed)
        packed = host
    else:
        packed = to_device(packed, device)
    moved, begin = list(tensors), 0
    for position in order:
        own = tensors[position]
        end = begin + own.element_size() * len(own)
        moved[position] = packed[begin:end].view(own.dtype)
        begin = end
    return moved


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
