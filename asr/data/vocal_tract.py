"""Vocal tract length perturbation (Jaitly and Hinton, 2013): other speakers made by warping the frequency axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.data.fbank import Fbank, mel, mel_edges

_KEPT_BAND = 0.8  # part of the band that is scaled as a whole; what lies above is stretched or squeezed into the rest


class VocalTractPerturbation(nn.Module):
    """Warps each utterance's frequencies by a factor drawn from 1 - `max_warp` to 1 + `max_warp`.

    The filterbanks are read off at the warped centre frequencies, interpolated between neighbouring filters. Tempo stays
    as it is, which is what it adds to speed perturbation. Does nothing in `eval()` mode.

    Args:
        max_warp: such as 0.1.
        fbank: the filterbank, whose filters are the last columns of the features; a column of energy before them stays.
    """

    frequency: Tensor  # (B,) centre frequencies in Hz

    def __init__(self, max_warp: float, fbank: Fbank) -> None:
        super().__init__()
        self.max_warp = max_warp
        self.high_freq = fbank.high_freq
        edges = mel_edges(fbank.num_mel_bins, fbank.low_freq, fbank.high_freq)
        self.first_mel = float(edges[1])
        self.mel_step = float(edges[1] - edges[0])
        self.register_buffer("frequency", _hertz(edges[1:-1]).float(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """(N, T, F) to (N, T, F)."""
        if not self.training or self.max_warp == 0.0:
            return features
        factor = 1.0 + self.max_warp * (2.0 * torch.rand(len(features), device=features.device) - 1.0)
        return self.warp(features, factor)

    def warp(self, features: Tensor, factor: Tensor) -> Tensor:
        """(N, T, F) to (N, T, F) with the factor (N,) given: above 1 everything moves up, as in a shorter vocal tract."""
        num_bins = len(self.frequency)
        position = ((mel(self._source(factor[:, None])) - self.first_mel) / self.mel_step).clamp(0, num_bins - 1)
        below = position.floor().long().clamp(max=num_bins - 2)
        share = (position - below)[:, None, :]
        shape = (*features.shape[:2], num_bins)
        bands = features[..., -num_bins:]
        low, high = (bands.gather(2, index[:, None, :].expand(shape)) for index in (below, below + 1))
        return torch.cat((features[..., :-num_bins], torch.lerp(low, high, share.expand(shape))), dim=2)

    def _source(self, factor: Tensor) -> Tensor:
        """Where each filter reads, in Hz: (N, 1) to (N, B). Piecewise linear, the upper edge stays where it is."""
        bend = _KEPT_BAND * self.high_freq * factor.clamp(max=1.0)
        scaled = self.frequency / factor
        rest = (self.high_freq - bend / factor) / (self.high_freq - bend)
        return torch.where(self.frequency <= bend, scaled, self.high_freq - (self.high_freq - self.frequency) * rest)


def _hertz(mel: Tensor) -> Tensor:
    return 700.0 * torch.expm1(mel / 1127.0)
