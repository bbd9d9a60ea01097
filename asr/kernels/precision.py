"""Where matrix products run in bfloat16: only where the hardware multiplies it."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch

from asr.errors import AsrError
from asr.kernels.jit import has_package

_INSTRUCTIONS = ("avx512bf16", "amx-bf16", "bf16")
"""LLVM's names for the groups of instructions that multiply bfloat16: two of x86, one of ARM."""


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16; without llvmlite, which knows, False.

    On a processor without them torch takes 10 (1.13) to 50 times (2.13) as long as in float32.
    """
    if not has_package("llvmlite"):
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return any(features.get(name, False) for name in _INSTRUCTIONS)


def product_dtype(name: str) -> torch.dtype:
    """The type of the factors of matrix products in training.

    Args:
        name: "float32"; or "bfloat16", which allows products to be rounded.

    Returns:
        bfloat16 if it is allowed and there is a GPU or a processor that multiplies it, else float32.

    Raises:
        AsrError: another name.
    """
    if name not in ("float32", "bfloat16"):
        raise AsrError(f"compute_dtype is '{name}'; give float32 or bfloat16.")
    if name == "bfloat16" and (torch.cuda.is_available() or cpu_multiplies_bfloat16()):
        return torch.bfloat16
    return torch.float32


def rounded_products() -> AbstractContextManager[object]:
    """Within the block, modules on the CPU may round their products to bfloat16, and do where that is faster."""
    return torch.autocast("cpu", torch.bfloat16) if cpu_multiplies_bfloat16() else contextlib.nullcontext()
