"""Whether Triton's kernels run for tensors on a device."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch


def kernels_run(device: torch.device) -> bool:
    """Whether they do: on a GPU, or anywhere in Triton's interpreter, a slow one for tests (TRITON_INTERPRET=1)."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True


def gpu_module(name: str, device: torch.device) -> ModuleType | None:
    """A module of kernels for tensors on a GPU, or None where the device is none or triton is missing."""
    return importlib.import_module(name) if device.type == "cuda" and kernels_run(device) else None
