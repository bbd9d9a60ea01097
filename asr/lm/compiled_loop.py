"""Loops over arrays compiled by numba, where it is installed: one pass where tensor operations take many.

Each loop has a tensor form beside it, which gives the same on any device, but for rounding where sums are reordered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def compiled_loop(function: Callable[..., Any], reorders_sums: bool = True) -> Callable[..., Any] | None:
    """The function compiled, or None where numba is missing.

    Sums may be reordered where that is allowed: only so does the compiler use vector instructions for them.
    """
    try:
        import numba
    except ImportError:
        return None
    fastmath = {"reassoc", "contract"} if reorders_sums else False
    compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, fastmath=fastmath)(function)
    return compiled


def loop_for(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any] | None:
    """The compiled function if it serves for tensors like this one: float32, on a CPU, outside gradients."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or tensor.requires_grad:
        return None
    return compiled_loop(function)
