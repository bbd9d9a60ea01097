"""Recording conditions change what they say and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from asr.datasets.conditions import CONDITIONS, coloured_noise, through_telephone, with_noise

SECOND = 16000


def chirp() -> torch.Tensor:
    """(L,) two seconds from 100 Hz to 7 kHz."""
    time = torch.arange(2 * SECOND) / SECOND
    return 0.3 * torch.sin(2 * math.pi * (100 * time + 0.25 * 6900 * time.square()))


def power(waveform: torch.Tensor, low: float, high: float) -> float:
    spectrum = torch.fft.rfft(waveform).abs().square()
    hertz = torch.linspace(0, SECOND / 2, len(spectrum))
    return float(spectrum[(hertz >= low) & (hertz < high)].sum()) / len(waveform)


def test_a_telephone_carries_half_of_the_band() -> None:
    waveform = chirp()
    heard = through_telephone(waveform, torch.Generator())
    assert heard.shape == waveform.shape
    assert power(heard, 4100, 8000) < 0.01 * power(waveform, 4100, 8000)
    assert power(heard, 300, 3000) == pytest.approx(power(waveform, 300, 3000), rel=0.02)
    # Eight bits of mu-law are heard: a signal-to-noise ratio of about 38 dB.
    first = slice(SECOND // 10, SECOND // 2)
    error = float((heard - waveform)[first].square().mean() / waveform[first].square().mean())
    assert 1e-5 < error < 1e-3


def test_noise_has_the_stated_ratio_and_a_wandering_level() -> None:
    waveform, generator = chirp(), torch.Generator().manual_seed(3)
    ratios = []
    for _ in range(40):
        noise = with_noise(waveform, generator) - waveform
        ratios.append(10 * math.log10(float(waveform.square().mean() / noise.square().mean())))
    assert 4.99 <= min(ratios) < 8 and 17 < max(ratios) <= 20.01
    levels = [float(part.square().mean()) for part in coloured_noise(10 * SECOND, 0.0, generator).split(SECOND // 4)]
    assert max(levels) > 1.5 * min(levels)


@pytest.mark.parametrize(("slope", "ratio"), [(0.0, 1.0), (-1.0, 0.25)])
def test_the_colour_of_noise(slope: float, ratio: float) -> None:
    noise = coloured_noise(20 * SECOND, slope, torch.Generator().manual_seed(1))
    # Bands of one width: an octave higher, power falls by 2 ** (2 * slope).
    assert power(noise, 4000, 4400) / power(noise, 2000, 2200) / 2 == pytest.approx(ratio, rel=0.1)


def test_conditions_keep_length_and_repeat_with_the_generator() -> None:
    waveform = chirp()
    for name, condition in CONDITIONS.items():
        first, again = (condition.apply(waveform, torch.Generator().manual_seed(5)) for _ in range(2))
        assert torch.equal(first, again), name
        assert len(first) == pytest.approx(len(waveform) / condition.speed, abs=2), name
    assert next(iter(CONDITIONS)) == "1" and torch.equal(CONDITIONS["1"].apply(waveform, torch.Generator()), waveform)
