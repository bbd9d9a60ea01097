"""Loops over float32 arrays compiled by numba, where it is installed: one pass where tensor operations take many.

Each loop has a tensor form beside it, which gives the same but for rounding, on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


@functools.cache
def compiled_loop(function: Callable[..., None]) -> Callable[..., None] | None:
    """The function compiled, or None where numba is missing."""
    try:
        import numba
    except ImportError:
        return None
    # Sums may be reordered: only so does the compiler use vector instructions for them.
    compiled: Callable[..., None] = numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})(function)
    return compiled


def loop_for(function: Callable[..., None], tensor: Tensor) -> Callable[..., None] | None:
    """The compiled function if it serves for tensors like this one: float32, on a CPU, outside gradients."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or tensor.requires_grad:
        return None
    return compiled_loop(function)
