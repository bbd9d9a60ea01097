"""Which frames of a padded batch are real."""

from __future__ import annotations

import torch
from torch import Tensor


def valid_frames(num_frames: Tensor, max_frames: int) -> Tensor:
    """True where a frame is real and not padding; num_frames (N,) -> (N, T) bool."""
    return torch.arange(max_frames, device=num_frames.device)[None, :] < num_frames[:, None]
