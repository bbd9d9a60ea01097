"""What `safetensors.torch` has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from . import DTYPES, safe_open

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def load_file(filename: str | Path) -> dict[str, Tensor]:
    """All tensors of a file, by name."""
    with safe_open(filename) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def save(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A file's content."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    parts, end = [], 0
    for name, tensor in tensors.items():
        part = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(part)],
        }
        parts.append(part)
        end += len(part)
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])
