"""Acoustic conditions: versions of a corpus to train on, each with the same speech recorded in another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asr.audio.resample import change_speed, resample
from asr.datasets.augment import add_noise

_TELEPHONE_RATE = 8000
_SNR_DB = (5.0, 20.0)
# Powers of frequency in the noise's spectrum: from white to the rumble of rooms.
_SPECTRAL_SLOPE = (-1.0, 0.0)
# The noise's level rises and falls, by up to this many dB, between points half a second apart.
_LEVEL_RANGE_DB = 6.0
_LEVELS_PER_SECOND = 2.0


class Condition(NamedTuple):
    """One way to record speech.

    Attributes:
        speed: factor of tempo and pitch (Ko et al. 2015).
        weight: how often training draws this condition, relative to the others.
        change: applied to a waveform (L,) at 16 kHz after the speed; the generator draws all random numbers.
    """

    speed: float
    weight: float
    change: Callable[[Tensor, torch.Generator], Tensor] | None = None

    def apply(self, waveform: Tensor, generator: torch.Generator) -> Tensor:
        """Converts a waveform (L,) at 16 kHz to this condition, (L / speed,)."""
        if self.speed != 1.0:
            waveform = change_speed(waveform, self.speed)
        return waveform if self.change is None else self.change(waveform, generator)


def through_telephone(waveform: Tensor, generator: torch.Generator) -> Tensor:
    """Speech as over a telephone line, sampled at 8 kHz with 8 bits of mu-law."""
    narrow = resample(waveform, 16000, _TELEPHONE_RATE).clamp(-1.0, 1.0)
    code = (narrow.sign() * torch.log1p(255.0 * narrow.abs()) / math.log(256.0) * 127.0).round() / 127.0
    narrow = code.sign() * torch.expm1(code.abs() * math.log(256.0)) / 255.0
    return resample(narrow, _TELEPHONE_RATE, 16000)[: len(waveform)]


def with_noise(waveform: Tensor, generator: torch.Generator) -> Tensor:
    """Speech with noise of a random color and a varying level, at a signal-to-noise ratio of 5 to 20 dB."""
    snr_db, slope = (
        low + (high - low) * float(torch.rand((), generator=generator)) for low, high in (_SNR_DB, _SPECTRAL_SLOPE)
    )
    return add_noise(waveform, coloured_noise(len(waveform), slope, generator), snr_db)


def coloured_noise(num_samples: int, slope: float, generator: torch.Generator) -> Tensor:
    """Noise (L,) at 16 kHz with an amplitude proportional to frequency ** slope and a varying level."""
    spectrum = torch.fft.rfft(torch.randn(num_samples, generator=generator))
    hertz = torch.linspace(0.0, 8000.0, len(spectrum)).clamp(min=50.0)
    noise = torch.fft.irfft(spectrum * hertz**slope, n=num_samples)
    num_levels = 2 + int(num_samples / 16000 * _LEVELS_PER_SECOND)
    level = _LEVEL_RANGE_DB * (torch.rand(1, 1, num_levels, generator=generator) - 0.5)
    level = torch.nn.functional.interpolate(level, size=num_samples, mode="linear", align_corners=True)[0, 0]
    return noise * 10.0 ** (level / 20.0)


CONDITIONS = {
    "1": Condition(1.0, 2.0),
    "0.9": Condition(0.9, 2.0),
    "1.1": Condition(1.1, 2.0),
    "telephone": Condition(1.0, 1.0, through_telephone),
    "noise": Condition(1.0, 1.0, with_noise),
}
