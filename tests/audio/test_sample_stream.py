"""Samples in pieces of any size give what the whole recording gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.audio.fbank import Fbank, FeatureStream
from asr.audio.resample import ResampleStream, resample

CUTS = st.lists(st.integers(0, 5000), max_size=6)


def pieces(samples: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    return list(torch.tensor_split(samples, sorted(cuts)))


@settings(max_examples=15)
@given(cuts=CUTS, length=st.integers(0, 5000), snip_edges=st.booleans())
def test_features(cuts: list[int], length: int, snip_edges: bool) -> None:
    fbank = Fbank(num_mel_bins=20, use_energy=True, snip_edges=snip_edges)
    samples = torch.randn(length, generator=torch.Generator().manual_seed(length))
    stream = FeatureStream(fbank)
    parts = [stream.push(piece) for piece in pieces(samples, cuts)]
    parts.append(stream.push(samples[:0], is_last=True))
    whole, num_frames = fbank(samples.unsqueeze(0), torch.tensor([length]))
    assert torch.allclose(torch.cat(parts), whole[0, : int(num_frames)], atol=1e-4)
    assert len(stream._held) <= 4 * fbank.frame_shift + fbank.frame_length


@settings(max_examples=15)
@given(cuts=CUTS, length=st.integers(0, 5000), rate=st.sampled_from([8000, 15999, 16000, 22050, 44100, 48000]))
def test_sampling_rates(cuts: list[int], length: int, rate: int) -> None:
    samples = torch.randn(length, generator=torch.Generator().manual_seed(length))
    stream = ResampleStream(rate, 16000)
    parts = [stream.push(piece) for piece in pieces(samples, cuts)]
    parts.append(stream.push(samples[:0], is_last=True))
    assert torch.allclose(torch.cat(parts), resample(samples, rate, 16000), atol=1e-5)


def test_bounded() -> None:
    stream = ResampleStream(44100, 16000)
    for _ in range(20):
        assert len(stream.push(torch.randn(4410))) == pytest.approx(1600, abs=400)
        assert len(stream._held) < 4410
