"""Vocal tract length perturbation against an explicit loop, and its invariants."""

import math

import pytest
import torch

from asr.audio.fbank import Fbank
from asr.datasets.augment import VocalTractPerturbation

LOW, HIGH, BINS = 20.0, 7600.0, 40
FBANK = Fbank(BINS, low_freq=LOW, high_freq=HIGH)


def mel(frequency: float) -> float:
    return 1127.0 * math.log(1.0 + frequency / 700.0)


def warped(bands: list[float], factor: float) -> list[float]:
    """One frame, filter by filter: Jaitly and Hinton's piecewise linear map, read off between neighbouring filters."""
    step = (mel(HIGH) - mel(LOW)) / (BINS + 1)
    bend = 0.8 * HIGH * min(factor, 1.0)
    result = []
    for i in range(BINS):
        frequency = 700.0 * math.expm1((mel(LOW) + (i + 1) * step) / 1127.0)
        if frequency <= bend:
            source = frequency / factor
        else:
            source = HIGH - (HIGH - bend / factor) / (HIGH - bend) * (HIGH - frequency)
        position = min(max((mel(source) - mel(LOW)) / step - 1.0, 0.0), BINS - 1.0)
        below = min(int(position), BINS - 2)
        result.append(bands[below] + (position - below) * (bands[below + 1] - bands[below]))
    return result


@pytest.mark.parametrize("energy", [0, 1])
def test_equals_the_loop_and_leaves_the_energy(energy: int) -> None:
    torch.manual_seed(0)
    features = torch.randn(3, 5, BINS + energy)
    factor = torch.tensor([0.9, 1.0, 1.1])
    result = VocalTractPerturbation(0.1, FBANK).warp(features, factor)
    assert torch.equal(result[..., :energy], features[..., :energy])
    for row in range(3):
        for frame in range(5):
            expected = warped(features[row, frame, energy:].tolist(), float(factor[row]))
            torch.testing.assert_close(result[row, frame, energy:], torch.tensor(expected), atol=2e-4, rtol=1e-4)


def test_a_shorter_tract_moves_a_peak_up() -> None:
    features = torch.zeros(2, 1, BINS)
    features[:, :, 20] = 1.0
    up, down = VocalTractPerturbation(0.1, FBANK).warp(features, torch.tensor([1.1, 0.9]))[:, 0].argmax(1)
    assert down < 20 < up


def test_draws_within_bounds_and_only_in_training() -> None:
    torch.manual_seed(0)
    perturbation = VocalTractPerturbation(0.1, FBANK)
    features = perturbation.frequency.expand(200, 1, BINS)
    ratio = features[:, 0, 15] / perturbation(features)[:, 0, 15]
    assert 0.89 < float(ratio.min()) < 0.92
    assert 1.08 < float(ratio.max()) < 1.11
    assert torch.equal(perturbation.eval()(features), features)
    assert torch.equal(VocalTractPerturbation(0.0, FBANK)(features), features)
