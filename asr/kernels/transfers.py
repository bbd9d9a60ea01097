"""Copies between host and device: pinned memory on the host, and one copy for many tensors.

Shapes: B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
