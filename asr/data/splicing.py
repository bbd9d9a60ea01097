"""Neighbouring frames put side by side."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Splice(nn.Module):
    """Each frame with `left` frames before and `right` behind it; an utterance's end frames are repeated.

    Args:
        left: frames before.
        right: frames behind.
    """

    def __init__(self, left: int = 5, right: int = 5) -> None:
        super().__init__()
        self.left = left
        self.right = right

    def forward(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """(N, T, F) and (N,) to (N, T, F * (left + 1 + right)), earliest frame first, 0 behind each end."""
        num_streams, max_frames, feature_dim = features.shape
        if max_frames == 0:
            return features.new_zeros((num_streams, 0, feature_dim * (self.left + 1 + self.right)))
        frame = torch.arange(max_frames, device=features.device)
        offset = torch.arange(-self.left, self.right + 1, device=features.device)
        num_frames = num_frames.to(features.device)
        last = (num_frames - 1).clamp(min=0)[:, None, None]
        source = torch.minimum((frame[:, None] + offset).clamp(min=0)[None], last)  # (N, T, left + 1 + right)
        stream = torch.arange(num_streams, device=features.device)[:, None, None]
        spliced = features[stream, source].reshape(num_streams, max_frames, -1)
        return spliced.masked_fill((frame >= num_frames[:, None])[:, :, None], 0.0)
