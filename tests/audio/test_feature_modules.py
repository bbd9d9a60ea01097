"""Splicing and SpecAugment against explicit loops, and their invariants."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asr.audio.fbank import Splice
from asr.datasets.augment import SpecAugment


def batch(seed: int = 0) -> Tensor:
    """(4, 7, 5), rubbish behind each end."""
    return torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(seed)) * 3 + 2


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
