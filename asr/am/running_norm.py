"""Mean and variance of the features that a stream has had so far, where those of the whole recording are not known.

Shapes: T frames, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOOR = 1e-5


class RunningNorm:
    """Sums over the frames so far, of which the older fade once there are more than `max_frames`.

    A network that normalises by a window of its own would take the noise of a pause for speech. Therefore a window is
    normalised by all that has been heard, of a pause only the first chunk counts, and before the features have varied
    as those of speech do nothing is normalised at all.

    Args:
        feature_dim: F.
        max_frames: so many frames count at most.
        least_spread: the standard deviation, averaged over features, from which on there is taken to be speech.
        device: where features are.
    """

    def __init__(self, feature_dim: int, max_frames: int, least_spread: float, device: torch.device) -> None:
        self._max_frames = max_frames
        self._least_spread = least_spread
        self._count = 0.0
        self._sums = torch.zeros(2, feature_dim, dtype=torch.float64, device=device)
        self._has_begun = False
        self._in_pause = False

    def statistics(self, features: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation, (F,) float32 each, with these frames (T, F) counted in for now.

        None as long as there has been nothing but noise.
        """
        count = self._count + len(features)
        mean, square = (self._sums + _sums(features)) / max(count, 1.0)
        std = (square - mean.square()).clamp(min=0.0).sqrt()
        if not self._has_begun and float(std.mean()) < self._least_spread:
            return None
        self._has_begun = True
        return mean.float(), std.float().clamp(min=_FLOOR)

    def take(self, features: Tensor, has_speech: bool) -> None:
        """Counts frames (T, F) in for good."""
        if not has_speech and self._in_pause:
            return
        # Noise before the first word counts once, too, and not all that has been waited.
        self._in_pause = not has_speech
        count = self._count + len(features)
        if count > self._max_frames:
            self._sums *= (self._max_frames - len(features)) / self._count
            count = self._max_frames
        self._count = count
        self._sums += _sums(features)


def _sums(features: Tensor) -> Tensor:
    """(T, F) -> (2, F), of the values and of their squares."""
    values = features.double()
    return torch.stack([values.sum(0), values.square().sum(0)])
