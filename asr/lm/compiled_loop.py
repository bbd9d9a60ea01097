"""Loops over arrays compiled by numba, where it is installed: one pass where tensor operations take many.

Each loop has a tensor form beside it, which gives the same on any device, but for rounding where sums are reordered.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from asr.compiled_forms import imports


@dataclass(frozen=True)
class Intrinsic:
    """What compiled loops call and Python cannot, being written in the compiler's terms: its module needs numba."""

    module: str
    name: str

    def load(self) -> Any:
        """The intrinsic itself."""
        return getattr(importlib.import_module(self.module), self.name)


@functools.cache
def compiled_loop(function: Callable[..., Any], reorders_sums: bool = True) -> Callable[..., Any] | None:
    """The function compiled, with the functions and intrinsics of its module that it calls; None without numba.

    Sums may be reordered where that is allowed: only so does the compiler use vector instructions for them.
    """
    if not imports("numba"):
        return None
    import numba

    assert isinstance(function, FunctionType)
    sources = _source_files(function)
    called = {
        name: callee.load() if isinstance(callee, Intrinsic) else compiled_loop(callee, reorders_sums)
        for name, callee in _callees(function).items()
    }
    if called:
        linked = FunctionType(function.__code__, {**function.__globals__, **called}, function.__name__)
        function = functools.update_wrapper(linked, function)
        del function.__wrapped__
    fastmath = {"reassoc", "contract"} if reorders_sums else False
    compiled: Any = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy")(function)
    try:
        compiled.enable_caching()
    except RuntimeError:  # no folder for it can be written: each process compiles for itself
        return cast(Callable[..., Any], compiled)
    # numba looks at the file of the function alone, and would take what it compiled from older callees or otherwise.
    stamp = [reorders_sums, *((path, Path(path).stat().st_mtime_ns) for path in sources)]
    compiled._cache._cache_file._source_stamp = stamp
    return cast(Callable[..., Any], compiled)


def existing_loop(function: Callable[..., Any], reorders_sums: bool = True) -> Callable[..., Any]:
    """As `compiled_loop`, where it is known that there is numba."""
    loop = compiled_loop(function, reorders_sums)
    assert loop is not None
    return loop


def arrays_of(*tensors: Tensor) -> list[Any]:
    """What a loop reads or fills in the place of tensors on a CPU: the same memory where they are contiguous."""
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def _callees(function: FunctionType) -> dict[str, FunctionType | Intrinsic]:
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {name: callee for name, callee in named.items() if isinstance(callee, (FunctionType, Intrinsic))}


def _source_files(function: FunctionType | Intrinsic) -> list[str]:
    """The files that hold the function and all that it calls."""
    if isinstance(function, Intrinsic):
        return [str(importlib.import_module(function.module).__file__)]
    files = {function.__code__.co_filename}
    for callee in _callees(function).values():
        files.update(_source_files(callee))
    return sorted(files)


def loop_for(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any] | None:
    """The compiled function if it serves for tensors like this one: float32, on a CPU, outside gradients."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or tensor.requires_grad:
        return None
    return compiled_loop(function)
