"""Which compiled forms run here: whether a package imports, whether Triton's kernels run for a device's tensors.

Loops over arrays compiled by numba, where it is installed: one pass where tensor operations take many.

Each loop has a tensor form beside it, which gives the same on any device, but for rounding where sums are reordered.


How a compiled loop asks a language model of a kind that it does not know: the type of the model's tables tells.

Shapes: Q queries.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor


def triton_available(device: torch.device) -> bool:
    """Whether they do: on a GPU, or anywhere in Triton's interpreter, a slow one for tests (TRITON_INTERPRET=1)."""
    return (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and has_package("triton")


def has_package(name: str) -> bool:
    """Whether a package is installed and works: an older numba, as it is imported, refuses a newer numpy."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def gpu_module(name: str, device: torch.device) -> ModuleType | None:
    """A module of kernels for tensors on a GPU, or None where the device is none or triton is missing."""
    return importlib.import_module(name) if device.type == "cuda" and triton_available(device) else None


@dataclass(frozen=True)
class Intrinsic:
    """What compiled loops call and Python cannot, being written in the compiler's terms: its module needs numba."""

    module: str
    name: str

    def load(self) -> Any:
        """The intrinsic itself."""
        return getattr(importlib.import_module(self.module), self.name)


@functools.cache
def jit(function: Callable[..., Any], reorders_sums: bool = True) -> Callable[..., Any] | None:
    """The function compiled, with the functions and intrinsics of its module that it calls; None without numba.

    Sums may be reordered where that is allowed: only so does the compiler use vector instructions for them.
    """
    if not has_package("numba"):
        return None
    import numba

    assert isinstance(function, FunctionType)
    sources = _source_files(function)
    called = {
        name: callee.load() if isinstance(callee, Intrinsic) else jit(callee, reorders_sums)
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


def jit_required(function: Callable[..., Any], reorders_sums: bool = True) -> Callable[..., Any]:
    """As `jit`, where it is known that there is numba."""
    loop = jit(function, reorders_sums)
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


def jit_for(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any] | None:
    """The compiled function if it serves for tensors like this one: float32, on a CPU, outside gradients."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or tensor.requires_grad:
        return None
    return jit(function)


_LOOPS: dict[type, tuple[Callable[..., bool], bool]] = {}


def answers_from(tables: type, loop: Callable[..., bool], reorders_sums: bool) -> None:
    """Says which loop, with what else `jit` takes, answers from tables of a type: `tuple` or a named one."""
    _LOOPS[tables] = loop, reorders_sums


class _Answer(Intrinsic):
    """answer(context_idx, word_id, tables, log_prob, next_idx) fills the last two (Q,) -> whether it could."""

    def __call__(self, context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
        return _LOOPS[type(tables)][0](context_idx, word_id, tables, log_prob, next_idx)

    def load(self) -> Any:
        return _compiled_answer()


answer = _Answer(__name__, "answer")


@functools.cache
def _compiled_answer() -> Any:
    from numba.extending import overload

    def any_answer(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> bool:
        raise NotImplementedError

    @overload(any_answer, strict=False)  # numba would have the annotations equal, too
    def chosen(context_idx: Any, word_id: Any, tables: Any, log_prob: Any, next_idx: Any) -> Any:
        loop: Any = jit(*_LOOPS[getattr(tables, "instance_class", tuple)])

        def called(context_idx, word_id, tables, log_prob, next_idx):  # type: ignore[no-untyped-def]
            return loop(context_idx, word_id, tables, log_prob, next_idx)

        return called

    return any_answer
