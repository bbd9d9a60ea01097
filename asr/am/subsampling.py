"""Convolutional front ends that lower the frame rate."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from asr.am.frames import valid_frames
from asr.packed_linear import PackedLinear


class ConvSubsampling(nn.Module):
    """Two 3 x 3 convolutions of stride 2 over time and frequency, then a linear layer: a quarter of the frames.

    Few channels at the full rate and more at the lower one keep it cheap. Padding is set to zero before each
    convolution, so that an utterance gets the same output alone and in a batch.

    Args:
        num_features: F.
        dim: size of the output.
        first_channels: channels of the first convolution.
        second_channels: channels of the second one.
    """

    factor = 4

    def __init__(self, num_features: int, dim: int, first_channels: int = 8, second_channels: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, first_channels, kernel_size=3, stride=2, padding=1)
        self.second = nn.Conv2d(first_channels, second_channels, kernel_size=3, stride=2, padding=1)
        self.out = PackedLinear(second_channels * ((num_features + 3) // 4), dim)

    def forward(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """features (N, T, F) with zeros as padding, num_frames (N,) -> (N, T', dim) with T' = ceil(T / 4), (N,)."""
        hidden = F.relu(self.first(features.unsqueeze(1)))
        num_frames = (num_frames + 1) // 2
        hidden = hidden * valid_frames(num_frames, hidden.shape[2])[:, None, :, None].to(hidden.dtype)
        hidden = F.relu(self.second(hidden))
        num_frames = (num_frames + 1) // 2
        return self.out(hidden.transpose(1, 2).flatten(2)), num_frames
