"""SpecAugment: bands of time and frequency hidden from the model while it learns."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SpecAugment(nn.Module):
    """Replaces random bands of frames and of features by the utterance's mean of each feature (park-2019's masks).

    The mean, not zero, so that it is the same before and after mean normalisation. Does nothing in `eval()` mode.

    Args:
        num_time_masks: bands of frames an utterance.
        max_time_mask_frames: their greatest width.
        max_time_mask_fraction: their greatest width as a part of the utterance, so that short ones are spared.
        num_frequency_masks: bands of features an utterance.
        max_frequency_mask_bins: their greatest width.
    """

    def __init__(
        self,
        num_time_masks: int = 2,
        max_time_mask_frames: int = 50,
        max_time_mask_fraction: float = 0.15,
        num_frequency_masks: int = 2,
        max_frequency_mask_bins: int = 27,
    ) -> None:
        super().__init__()
        self.num_time_masks = num_time_masks
        self.max_time_mask_frames = max_time_mask_frames
        self.max_time_mask_fraction = max_time_mask_fraction
        self.num_frequency_masks = num_frequency_masks
        self.max_frequency_mask_bins = max_frequency_mask_bins

    def forward(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """(N, T, F) and (N,) to (N, T, F); what lies behind each end is left alone."""
        if not self.training or features.shape[1] == 0:
            return features
        _, max_frames, feature_dim = features.shape
        num_frames = num_frames.to(features.device)
        inside = torch.arange(max_frames, device=features.device) < num_frames[:, None]
        width = (num_frames * self.max_time_mask_fraction).long().clamp(max=self.max_time_mask_frames)
        bins = torch.full_like(num_frames, feature_dim)
        time_mask = _bands(num_frames, width, max_frames, self.num_time_masks)
        frequency_width = torch.full_like(num_frames, min(self.max_frequency_mask_bins, feature_dim))
        frequency_mask = _bands(bins, frequency_width, feature_dim, self.num_frequency_masks)
        hidden = (time_mask[:, :, None] | frequency_mask[:, None, :]) & inside[:, :, None]
        count = num_frames.clamp(min=1)[:, None, None]
        mean = features.masked_fill(~inside[:, :, None], 0.0).sum(dim=1, keepdim=True) / count
        return torch.where(hidden, mean, features)


def _bands(length: Tensor, max_width: Tensor, size: int, num_bands: int) -> Tensor:
    """The union of `num_bands` random bands in 0..length-1, each 0..max_width wide; (N,), (N,) to (N, size) bool."""
    device = length.device
    draw = torch.rand((2, len(length), num_bands), device=device)
    width = (draw[0] * (max_width + 1)[:, None]).long()
    begin = (draw[1] * (length[:, None] - width + 1)).long()
    position = torch.arange(size, device=device)
    band = (position >= begin[:, :, None]) & (position < (begin + width)[:, :, None])
    return band.any(dim=1)
