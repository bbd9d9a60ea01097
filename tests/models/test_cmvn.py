"""Normalization of features by mean and variance, against explicit loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asr.models.interface import UtteranceCmvn

LENGTHS = torch.tensor([7, 3, 1, 0])


@pytest.mark.parametrize("variance", [False, True])
def test_utterance_cmvn_equals_a_loop(variance: bool) -> None:
    # (4, 7, 5), rubbish behind each end
    features = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0)) * 3 + 2
    normal = UtteranceCmvn(variance)(features, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        frames = features[row, :length]
        if length > 1:
            expected = frames - frames.mean(dim=0)
            expected = expected / frames.std(dim=0, unbiased=False) if variance else expected
            torch.testing.assert_close(normal[row, :length], expected, atol=1e-5, rtol=1e-5)
        assert not normal[row, length:].any()
    assert torch.isfinite(normal).all()


def speech_and_pauses(seed: int, pauses: list[int], speech_frames: int = 70) -> tuple[Tensor, Tensor]:
    """Loud pieces with soft ones before, between and behind them, (T, 5), and which frames are loud."""
    generator = torch.Generator().manual_seed(seed)
    pieces, loud = [], []
    for number, pause in enumerate(pauses):
        if number:
            pieces.append(8.0 + 0.5 * torch.randn(speech_frames, 5, generator=generator))
            loud += [True] * speech_frames
        pieces.append(torch.randn(pause, 5, generator=generator))
        loud += [False] * pause
    return torch.cat(pieces), torch.tensor(loud)


@given(st.integers(0, 99), st.lists(st.integers(0, 300), min_size=2, max_size=4))
def test_of_long_pauses_only_the_edges_count(seed: int, pauses: list[int]) -> None:
    features, loud = speech_and_pauses(seed, pauses)
    margin = 20
    near = torch.tensor([bool(loud[max(0, i - margin) : i + margin + 1].any()) for i in range(len(loud))])
    counted = features[near]
    expected = (features - counted.mean(dim=0)) / counted.std(dim=0, unbiased=False)
    padded = torch.stack([torch.cat([features, torch.full((9, 5), 99.0)]), torch.randn(len(features) + 9, 5)])
    normal = UtteranceCmvn(pause_margin=margin)(padded, torch.tensor([len(features), len(features) + 9]))
    torch.testing.assert_close(normal[0, : len(features)], expected, atol=1e-4, rtol=1e-4)
    assert not normal[0, len(features) :].any()


def test_an_utterance_without_pause_counts_whole() -> None:
    features = torch.randn(2, 300, 5) * 3 + 2
    num_frames = torch.tensor([300, 180])
    normal = UtteranceCmvn(pause_margin=50)(features, num_frames)
    torch.testing.assert_close(normal, UtteranceCmvn(pause_margin=300)(features, num_frames))
    silence = torch.zeros(1, 300, 5)
    assert not UtteranceCmvn()(silence, torch.tensor([300])).any()
