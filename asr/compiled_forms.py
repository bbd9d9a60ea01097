"""Which compiled forms run here: whether a package imports, whether Triton's kernels run for a device's tensors."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch


def kernels_run(device: torch.device) -> bool:
    """Whether they do: on a GPU, or anywhere in Triton's interpreter, a slow one for tests (TRITON_INTERPRET=1)."""
    return (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and imports("triton")


def imports(name: str) -> bool:
    """Whether a package is installed and works: an older numba, as it is imported, refuses a newer numpy."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def gpu_module(name: str, device: torch.device) -> ModuleType | None:
    """A module of kernels for tensors on a GPU, or None where the device is none or triton is missing."""
    return importlib.import_module(name) if device.type == "cuda" and kernels_run(device) else None
