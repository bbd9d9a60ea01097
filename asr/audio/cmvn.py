"""Mean and variance normalisation of features, over a corpus or over each utterance."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.errors import AsrError

_FLOOR = 1e-5


# In every second of speech there is a frame whose log energy (natural) is within this of the loudest ones, or above the
# lower part of what lies between the softest and the loudest.
_SPEECH_RANGE = 4.0


_NOISE_SHARE = 0.3


_FEW = 10


class GlobalCmvn(nn.Module):
    """Normalises by fixed statistics, which travel in the state dict.

    Args:
        mean: (F,), or None to be filled by `load_state_dict` later.
        std: (F,) standard deviations.
        feature_dim: F, where the statistics are not given.
    """

    mean: Tensor
    inverse_std: Tensor

    def __init__(self, mean: Tensor | None = None, std: Tensor | None = None, feature_dim: int = 80) -> None:
        super().__init__()
        mean = torch.zeros(feature_dim) if mean is None else mean.float()
        std = torch.ones_like(mean) if std is None else std.float()
        self.register_buffer("mean", mean)
        self.register_buffer("inverse_std", 1.0 / std.clamp(min=_FLOOR))

    @classmethod
    def from_batches(cls, batches: Iterable[tuple[Tensor, Tensor]]) -> GlobalCmvn:
        """Statistics of (features (N, T, F), num_frames (N,)) pairs.

        Raises:
            AsrError: there is not one frame.
        """
        count = 0
        total: Tensor | None = None
        square: Tensor | None = None
        for features, num_frames in batches:
            inside = _inside(features, num_frames)
            frames = features[inside].double()  # (sum T, F)
            if total is None or square is None:
                total, square = torch.zeros_like(features[0, 0].double()), torch.zeros_like(features[0, 0].double())
            count += len(frames)
            total += frames.sum(dim=0)
            square += frames.square().sum(dim=0)
        if total is None or square is None or count == 0:
            raise AsrError("GlobalCmvn: there is no frame to take statistics from; check the corpus.")
        mean = total / count
        return cls(mean, (square / count - mean.square()).clamp(min=0.0).sqrt())

    def forward(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """(N, T, F) to (N, T, F), 0 behind each end."""
        normal = (features - self.mean) * self.inverse_std
        return normal.masked_fill(~_inside(features, num_frames)[:, :, None], 0.0)


class UtteranceCmvn(nn.Module):
    """Normalises each utterance by its own mean and, if asked, its own standard deviation.

    Of a long pause only the edges count: were mean and variance mostly those of noise, noise would look like speech.

    Args:
        normalize_variance: divide by the standard deviation, too.
        pause_margin: frames of log energies that are further than this from anything loud do not count.
    """

    def __init__(self, normalize_variance: bool = True, pause_margin: int = 50) -> None:
        super().__init__()
        self.normalize_variance = normalize_variance
        self.pause_margin = pause_margin

    def forward(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """(N, T, F) to (N, T, F), 0 behind each end."""
        inside = _inside(features, num_frames)
        counted = self._counted(features, inside)[:, :, None]
        count = counted.sum(dim=1, keepdim=True).clamp(min=1)
        mean = features.masked_fill(~counted, 0.0).sum(dim=1, keepdim=True) / count
        centered = (features - mean).masked_fill(~inside[:, :, None], 0.0)
        if not self.normalize_variance:
            return centered
        variance = centered.square().masked_fill(~counted, 0.0).sum(dim=1, keepdim=True) / count
        return centered / variance.sqrt().clamp(min=_FLOOR)

    def _counted(self, features: Tensor, inside: Tensor) -> Tensor:
        """Which frames are near speech; all of an utterance where none stands out. (N, T, F), (N, T) to (N, T) bool."""
        margin = self.pause_margin
        if features.shape[1] <= 2 * margin:
            return inside
        energy = features.mean(dim=2)
        # A few frames more than a click has.
        loudest = energy.masked_fill(~inside, -torch.inf).topk(_FEW, dim=1).values[:, -1:]
        softest = energy.masked_fill(~inside, torch.inf).topk(_FEW, dim=1, largest=False).values[:, -1:]
        threshold = torch.maximum(loudest - _SPEECH_RANGE, softest + _NOISE_SHARE * (loudest - softest))
        is_loud = inside & (energy > threshold)
        near = F.max_pool1d(is_loud.to(features.dtype), 2 * margin + 1, stride=1, padding=margin) > 0
        counted = inside & near
        return torch.where(counted.any(dim=1, keepdim=True), counted, inside)


def _inside(features: Tensor, num_frames: Tensor) -> Tensor:
    """Which frames belong to an utterance; (N, T) bool."""
    return torch.arange(features.shape[1], device=features.device) < num_frames.to(features.device)[:, None]
