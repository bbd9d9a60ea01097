"""Resampling against torchaudio, and on tones whose result is known."""

from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asr.audio.resample import change_speed, resample
from asr.errors import AsrError


def tone(frequency: float, rate: int, seconds: float = 0.25) -> Tensor:
    return torch.sin(2 * torch.pi * frequency * torch.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize(
    ("old", "new"), [(8000, 16000), (44100, 16000), (16000, 8000), (9, 10), (11, 10), (48000, 16000)]
)
def test_equals_torchaudio(old: int, new: int) -> None:
    try:
        from torchaudio.functional import resample as oracle
    except (ImportError, OSError):
        pytest.skip("no torchaudio that fits this torch")
    wave = torch.randn(2, 1234, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(resample(wave, old, new), oracle(wave, old, new), atol=5e-5, rtol=0)


@pytest.mark.parametrize("old", [8000, 11025, 22050, 44100, 48000])
def test_a_tone_stays_itself(old: int) -> None:
    converted, expected = resample(tone(440.0, old), old, 16000), tone(440.0, 16000)
    assert len(converted) == -(-len(tone(440.0, old)) * 16000 // old)
    middle = slice(200, 3600)
    torch.testing.assert_close(converted[middle], expected[middle], atol=5e-3, rtol=0)


def test_what_the_new_rate_cannot_hold_goes() -> None:
    assert resample(tone(11000.0, 48000), 48000, 16000)[200:-200].abs().max() < 0.02


@given(st.integers(0, 500), st.sampled_from([8000, 16000, 22050, 44100]), st.sampled_from([8000, 16000]))
def test_length_and_linearity(length: int, old: int, new: int) -> None:
    wave = torch.randn(length, generator=torch.Generator().manual_seed(length))
    result = resample(wave, old, new)
    assert len(result) == (length if old == new else -(-length * new // old))
    torch.testing.assert_close(resample(2 * wave, old, new), 2 * result)


@pytest.mark.parametrize(("old", "new"), [(44100, 16000), (8000, 16000), (11025, 16000), (7, 5), (48000, 16000)])
def test_each_output_by_itself_equals_blocks(old: int, new: int) -> None:
    wave = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    by_block = resample(wave, old, new)
    by_output = resample(wave, old, new, largest_kernel=0, outputs_at_once=1000)
    assert not torch.equal(by_output, by_block)  # sums in another order
    torch.testing.assert_close(by_output, by_block, atol=2e-6, rtol=0)


@pytest.mark.parametrize("old", [44099, 15999, 48001])
def test_rates_without_a_common_divisor_take_little_memory(old: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    converted, expected = resample(tone(440.0, old), old, 16000), tone(440.0, 16000)
    torch.testing.assert_close(converted[200:3600], expected[200:3600], atol=5e-3, rtol=0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_speed_changes_length_and_pitch() -> None:
    fast = change_speed(tone(400.0, 16000), 1.1)
    assert abs(len(fast) - 4000 / 1.1) <= 1
    torch.testing.assert_close(fast[200:3400], tone(440.0, 16000)[200:3400], atol=5e-3, rtol=0)
    assert torch.equal(change_speed(tone(400.0, 16000), 1.0), tone(400.0, 16000))


def test_impossible_requests() -> None:
    with pytest.raises(AsrError, match="must be greater than 0"):
        resample(torch.zeros(4), 0, 16000)
    with pytest.raises(AsrError, match="out of range"):
        change_speed(torch.zeros(4), 0.0)
