"""Mean and variance normalization of each utterance's features.

Shapes: N utterances, T frames, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STD_FLOOR = 1e-5
"""The smallest standard deviation that features are divided by."""


# In every second of speech there is a frame whose natural log energy is within `_SPEECH_RANGE` of the loudest frames,
# or above the softest ones by more than `_NOISE_SHARE` of the range between both.
_SPEECH_RANGE = 4.0
_NOISE_SHARE = 0.3

# Rank of the frames that count as loudest and softest, so that a click, which is shorter, does not.
_RANK = 10


class UtteranceCmvn(nn.Module):
    """Normalizes each utterance by its own mean and, optionally, its own standard deviation.

    Only the edges of a long pause count. Otherwise mean and variance would be those of noise, and normalized noise
    would look like speech.

    Args:
        normalize_variance: whether to divide by the standard deviation.
        pause_margin: frames that are further than this from anything loud do not count.
    """

    def __init__(self, normalize_variance: bool = True, pause_margin: int = 50) -> None:
        super().__init__()
        self.normalize_variance = normalize_variance
        self.pause_margin = pause_margin

    def forward(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """Normalizes features (N, T, F) of num_frames (N,) frames -> (N, T, F); padding is 0."""
        inside = _inside(features, num_frames)
        counted = self._counted(features, inside)[:, :, None]
        count = counted.sum(dim=1, keepdim=True).clamp(min=1)
        mean = features.masked_fill(~counted, 0.0).sum(dim=1, keepdim=True) / count
        centered = (features - mean).masked_fill(~inside[:, :, None], 0.0)
        if not self.normalize_variance:
            return centered
        variance = centered.square().masked_fill(~counted, 0.0).sum(dim=1, keepdim=True) / count
        return centered / variance.sqrt().clamp(min=STD_FLOOR)

    def _counted(self, features: Tensor, inside: Tensor) -> Tensor:
        """Which frames are near speech, (N, T) bool; all frames of an utterance in which nothing stands out."""
        margin = self.pause_margin
        if features.shape[1] <= 2 * margin:
            return inside
        energy = features.mean(dim=2)
        loudest = energy.masked_fill(~inside, -torch.inf).topk(_RANK, dim=1).values[:, -1:]
        softest = energy.masked_fill(~inside, torch.inf).topk(_RANK, dim=1, largest=False).values[:, -1:]
        threshold = torch.maximum(loudest - _SPEECH_RANGE, softest + _NOISE_SHARE * (loudest - softest))
        is_loud = inside & (energy > threshold)
        loud = is_loud.to(features.dtype).unsqueeze(1)
        near = F.max_pool1d(loud, 2 * margin + 1, stride=1, padding=margin).squeeze(1) > 0
        counted = inside & near
        return counted | (inside & ~counted.any(dim=1, keepdim=True))


def _inside(features: Tensor, num_frames: Tensor) -> Tensor:
    """Which frames are not padding, (N, T) bool."""
    return torch.arange(features.shape[1], device=features.device) < num_frames.to(features.device)[:, None]
