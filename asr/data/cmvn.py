"""Mean and variance normalisation of features, over a corpus or over each utterance."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from asr.errors import AsrError

_FLOOR = 1e-5


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

    Args:
        normalize_variance: divide by the standard deviation, too.
    """

    def __init__(self, normalize_variance: bool = True) -> None:
        super().__init__()
        self.normalize_variance = normalize_variance

    def forward(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """(N, T, F) to (N, T, F), 0 behind each end."""
        inside = _inside(features, num_frames)[:, :, None]
        count = num_frames.to(features.device).clamp(min=1)[:, None, None]
        mean = features.masked_fill(~inside, 0.0).sum(dim=1, keepdim=True) / count
        centered = (features - mean).masked_fill(~inside, 0.0)
        if not self.normalize_variance:
            return centered
        variance = centered.square().sum(dim=1, keepdim=True) / count
        return centered / variance.sqrt().clamp(min=_FLOOR)


def _inside(features: Tensor, num_frames: Tensor) -> Tensor:
    """Which frames belong to an utterance; (N, T) bool."""
    return torch.arange(features.shape[1], device=features.device) < num_frames.to(features.device)[:, None]
