"""CMVN, splicing and SpecAugment against explicit loops, and their invariants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asr.audio.cmvn import UtteranceCmvn
from asr.audio.fbank import Splice
from asr.datasets.augment import SpecAugment

LENGTHS = torch.tensor([7, 3, 1, 0])


def batch(seed: int = 0) -> Tensor:
    """(4, 7, 5), rubbish behind each end."""
    return torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(seed)) * 3 + 2


@pytest.mark.parametrize("variance", [False, True])
def test_utterance_cmvn_equals_a_loop(variance: bool) -> None:
    features = batch()
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


@given(st.integers(0, 4), st.integers(0, 4), st.lists(st.integers(0, 7), min_size=4, max_size=4))
def test_splicing_equals_a_loop(left: int, right: int, lengths: list[int]) -> None:
    features = batch()
    spliced = Splice(left, right)(features, torch.tensor(lengths))
    assert spliced.shape == (4, 7, 5 * (left + 1 + right))
    for row, length in enumerate(lengths):
        for frame in range(7):
            if frame >= length:
                assert not spliced[row, frame].any()
                continue
            sources = [min(max(frame + offset, 0), length - 1) for offset in range(-left, right + 1)]
            assert torch.equal(spliced[row, frame], torch.cat([features[row, source] for source in sources]))


def test_splicing_nothing() -> None:
    assert Splice(2, 2)(torch.zeros(3, 0, 5), torch.zeros(3, dtype=torch.int64)).shape == (3, 0, 25)


def test_masks_are_bands_of_the_mean_within_bounds() -> None:
    torch.manual_seed(0)
    augment = SpecAugment(2, 10, 0.2, 2, 4)
    lengths = torch.tensor([100, 40])
    features = torch.randn(2, 100, 16)
    seen = 0
    for _ in range(50):
        masked = augment(features, lengths)
        for row, length in enumerate(lengths.tolist()):
            inside = features[row, :length]
            mean = inside.mean(dim=0)
            hidden = masked[row, :length] != inside
            torch.testing.assert_close(masked[row, :length][hidden], mean.expand(length, -1)[hidden])
            assert torch.equal(masked[row, length:], features[row, length:])
            assert int(hidden.all(dim=1).sum()) <= 2 * min(10, int(0.2 * length))
            assert int(hidden.all(dim=0).sum()) <= 2 * 4
            seen += int(hidden.any())
    assert seen > 90


def test_no_masks_outside_training_or_of_no_width() -> None:
    features, lengths = torch.randn(2, 20, 8), torch.tensor([20, 5])
    assert torch.equal(SpecAugment().eval()(features, lengths), features)
    assert torch.equal(SpecAugment(2, 0, 0.0, 2, 0)(features, lengths), features)
    assert SpecAugment()(torch.zeros(2, 0, 8), torch.zeros(2, dtype=torch.int64)).shape == (2, 0, 8)
