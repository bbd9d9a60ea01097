"""Lasting changes of level are undone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from asr.audio.fbank import LOG_FLOOR
from asr.bundle import Bundle
from asr.metrics import count_errors
from asr.models.levels import with_equal_levels
from asr.recognizer import Recognizer


def gains_one_by_one(energy: list[float]) -> list[float]:
    """What `with_equal_levels` adds to the frames of one utterance."""
    blocks = range(0, len(energy), 10)
    windows = [blocks[first : first + 30] for first in range(len(blocks) - 29)]
    around = ([each for each in energy[max(0, first - 20) : first + 30] if each > LOG_FLOOR + 1.0] for first in blocks)
    level = dict(zip(blocks, (float(np.mean(each)) if each else math.nan for each in around), strict=True))
    heard = [[level[block] for block in window if not math.isnan(level[block])] for window in windows]
    spread = max(map(max, filter(None, heard)), default=0.0) - min(map(min, filter(None, heard)), default=0.0)
    spoken = [
        (window, max(each))
        for window, each in zip(windows, heard, strict=True)
        if each
        and max(each) - min(each) >= 0.3 * spread
        and sum(level[block] > (max(each) + min(each)) / 2 for block in window) >= 15
    ]
    loudest = max((each for _, each in spoken), default=0.0)
    lowest = {block: min((each for window, each in spoken if block in window), default=loudest) for block in blocks}
    is_changed = any(loudest - each > 3.5 for each in lowest.values())
    return [loudest - lowest[t // 10 * 10] if is_changed else 0.0 for t in range(len(energy))]


def syllables(levels: list[float], seed: int = 0, seconds: int = 5) -> Tensor:
    """Frames (T,) of speech of such levels, 7 above the noise between syllables, which changes with them."""
    noise = 0.3 * torch.randn(len(levels) * seconds * 100, generator=torch.Generator().manual_seed(seed))
    time = torch.arange(len(noise))
    speech = torch.where(time % 150 < 100, 0.0, -7.0)
    return noise + speech + torch.tensor(levels).repeat_interleave(seconds * 100)


def as_features(energy: Tensor) -> Tensor:
    """Features (N, T, 4) of these mean energies (N, T)."""
    return energy[:, :, None] + torch.tensor([-1.0, 0.0, -2.0, 3.0])


@pytest.mark.parametrize("seed", range(3))
def test_gains_are_those_of_the_definition(seed: int) -> None:
    energy = syllables([9.0, 4.0, 9.5, 8.0], seed)
    energy[620:650] = energy[1100:1190] = LOG_FLOOR
    lengths = [2000, 1234, 833, 299, 0]
    batch = torch.full((len(lengths), 2000), 50.0)
    for row, length in zip(batch, lengths, strict=True):
        row[:length] = energy[:length]
    found = with_equal_levels(as_features(batch), torch.tensor(lengths)) - as_features(batch)
    for row, length in zip(found, lengths, strict=True):
        expected = torch.tensor(gains_one_by_one(energy[:length].tolist()))
        torch.testing.assert_close(row[:length], expected[:, None].expand(-1, 4), atol=1e-4, rtol=1e-4)
        assert not row[length:].any()
        assert row.any() == (length > 800)


def before_and_after(energy: Tensor) -> tuple[Tensor, Tensor]:
    """Features of these mean energies (T,), and what `with_equal_levels` makes of them."""
    features = as_features(energy[None])
    return features, with_equal_levels(features, torch.tensor([len(energy)]))


@pytest.mark.parametrize("change", [-7.0, -4.6, 4.6, 7.0])
def test_a_step_is_undone_where_it_is(change: float) -> None:
    features, found = before_and_after(syllables([10.0 + max(0.0, -change), 10.0 + max(0.0, change)]))
    before, after = slice(150, 450), slice(600, 900)
    torch.testing.assert_close(found[0, before].mean(dim=0), found[0, after].mean(dim=0), atol=0.3, rtol=0.0)
    loud = before if change < 0 else after
    torch.testing.assert_close(found[0, loud], features[0, loud], atol=0.3, rtol=0.0)


def test_ordinary_recordings_stay_as_they_are() -> None:
    slow = 0.9 * torch.sin(torch.arange(2000) / 200.0)  # 8 dB
    click, pause, noise, silence = (syllables([9.0] * 4) for _ in range(4))
    click[700:710] += 9.0
    pause[500:1500] = 2.0 + 0.3 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    noise[:] = 2.0 + 0.5 * torch.randn(2000, generator=torch.Generator().manual_seed(2))
    silence[400:1600] = LOG_FLOOR
    nothing = torch.full((2000,), LOG_FLOOR)
    for energy in (syllables([9.0] * 4) + slow, click, pause, noise, silence, nothing):
        assert torch.equal(*before_and_after(energy))
    assert torch.equal(*before_and_after(syllables([9.0, 2.0], seconds=1)))
    assert torch.equal(*before_and_after(torch.zeros(0)))


@pytest.mark.slow
def test_soft_speech_after_loud_speech_is_recognized(librispeech: Bundle) -> None:
    samples, rate = soundfile.read(Path("scripts/demo_clips/letter.flac"), dtype="float32")
    clip = torch.from_numpy(samples)
    pause = 3e-5 * torch.randn(rate // 2, generator=torch.Generator().manual_seed(0))
    waveform = torch.cat([clip, pause, 10 ** (-25 / 20) * clip])
    recognizer = Recognizer(librispeech, "ngram")
    words = recognizer(clip, rate)[0].text.split()
    assert len(words) == 13
    found = recognizer(waveform, rate)[0].text.split()
    assert count_errors(2 * words, found).num_errors <= 2
