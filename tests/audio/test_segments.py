from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr.audio.io import AudioFile, read_audio
from asr.audio.segments import (
    at_rate,
    batches_of_similar_length,
    is_steady,
    open_recordings,
    segment_batches,
    segments_at_pauses,
    split_at_pauses,
)
from asr.errors import AsrError

RATE = 1000


@given(st.integers(0, 20_000), st.floats(1.0, 5.0), st.integers(0, 10))
def test_pieces_are_the_whole_and_none_is_too_long(num_samples, max_seconds, seed):
    waveform = torch.randn(num_samples, generator=torch.Generator().manual_seed(seed))
    pieces = split_at_pauses(waveform, RATE, max_seconds)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == num_samples
    assert all(previous[1] == following[0] for previous, following in itertools.pairwise(pieces))
    assert all(end - begin <= max_seconds * RATE for begin, end in pieces)
    assert all(end - begin >= 0.3 * max_seconds * RATE for begin, end in pieces[:-1])


def test_the_cut_lies_in_the_pause():
    waveform = torch.randn(4 * RATE, generator=torch.Generator().manual_seed(0))
    waveform[1600:1900] *= 0.01
    assert split_at_pauses(waveform, RATE, 2.5)[0][1] in range(1690, 1811)


@pytest.mark.parametrize("offset", [0.0, 0.01, -0.5])
def test_an_offset_of_the_samples_moves_no_cut(offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(5 * RATE) / RATE
    speech = torch.randn(5 * RATE, generator=generator) * 0.05 - 0.02 * torch.sin(4.0 * time)
    speech[3000:3300] *= 0.02
    assert split_at_pauses(speech + offset, RATE, 4.0)[0][1] in range(3090, 3211)


CLIPS = Path(__file__).resolve().parents[2] / "scripts" / "demo_clips"


def noise_like(samples: torch.Tensor) -> torch.Tensor:
    return torch.randn(len(samples), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rate", [8000, 16000])
def test_silence_steady_noise_and_hum_are_steady(rate: int) -> None:
    for seconds in (1.0, 25.0):
        time = torch.arange(int(seconds * rate)) / rate
        white = noise_like(time)
        hum = torch.sin(2.0 * math.pi * 50.0 * time)
        rounded = (0.5 * white[::2]).round().repeat_interleave(2)  # of half the rate
        for samples in (torch.zeros_like(time), 0.3 + 1e-3 * white, 1e-4 * white, rounded, hum):
            assert is_steady(samples.float(), rate)
            knock = samples.clone()
            knock[rate // 2 : rate // 2 + rate // 100] += 10.0 * noise_like(knock[: rate // 100])
            assert not is_steady(knock.float(), rate)


def test_speech_is_not_steady() -> None:
    for path in sorted(CLIPS.glob("*.flac")):
        speech = read_audio(path, 16000)
        noise = noise_like(speech) * speech.std()
        assert not is_steady(speech, 16000)
        assert not is_steady(speech + 1.7 * noise, 16000)
        quiet = torch.cat([1e-3 * noise_like(torch.zeros(300000)), speech[16000:19200]])
        assert not is_steady(quiet, 16000)


def test_what_is_short_is_steady_only_if_it_is_constant() -> None:
    assert is_steady(torch.zeros(1), 16000)
    assert is_steady(torch.full((15999,), 0.5), 16000)
    assert not is_steady(noise_like(torch.zeros(15999)), 16000)
    assert is_steady(noise_like(torch.zeros(16000)), 16000)


def test_pieces_of_less_than_a_second_are_refused():
    with pytest.raises(AsrError, match="too short to recognize"):
        split_at_pauses(torch.ones(10), RATE, 0.5)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 30))
def test_batches_are_of_neighbours_in_length_and_as_large_as_allowed(lengths, most):
    batches = batches_of_similar_length(lengths, most)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    ordered = [lengths[index] for index in itertools.chain(*batches)]
    assert ordered == sorted(lengths, reverse=True)
    assert all(len(batch) == 1 or lengths[batch[0]] * len(batch) <= most for batch in batches)
    # One more would have been too many.
    assert all(lengths[batch[0]] * (len(batch) + 1) > most for batch in batches[:-1])


@pytest.mark.parametrize("rate", [16000, 8000])
def test_channels_that_cancel_each_other_are_heard_as_in_files(rate: int, tmp_path: Path) -> None:
    """Ten seconds in which they do, and one in which the second is silent."""
    left = torch.randn(11 * rate, generator=torch.Generator().manual_seed(0)) * 0.1
    stereo = torch.stack([left, torch.cat([-left[: 10 * rate], torch.zeros(rate)])])
    path = tmp_path / "stereo.wav"
    soundfile.write(path, stereo.T.numpy(), rate, subtype="FLOAT")
    expected = read_audio(path, rate)
    assert torch.equal(expected[: 10 * rate], left[: 10 * rate]) and torch.equal(expected[-rate:], left[-rate:] / 2)
    (found,) = open_recordings(str(path), 16000, rate)
    assert isinstance(found, AudioFile) and torch.equal(torch.cat(list(found)), expected)
    for audio in ([stereo], stereo[None].numpy(), [stereo, path]):
        found = open_recordings(audio, rate, rate)[0]
        assert isinstance(found, torch.Tensor) and torch.equal(found, expected)


@pytest.mark.parametrize("size", [50, 700, 16000, 10**6])
def test_segments_of_pieces_are_those_of_the_whole(size):
    waveform = torch.randn(70_000, generator=torch.Generator().manual_seed(1))
    waveform[20_000:21_000] = waveform[33_000:34_000] = 0.0
    segments = list(segments_at_pauses(iter(waveform.split(size)), 8000, 2.0))
    assert [(begin, begin + len(samples)) for begin, samples in segments] == split_at_pauses(waveform, 8000, 2.0)
    assert torch.equal(torch.cat([samples for _, samples in segments]), waveform)


@pytest.mark.parametrize("rate", [500, 16000.5, float("nan"), "16 kHz"])
def test_impossible_sampling_rates_are_refused(rate):
    with pytest.raises(AsrError, match="the sampling rate is"):
        at_rate(torch.zeros(100), rate, 16000)


class PlayedFile:
    """Stands for a file: pieces of 100 samples, which are counted as they are read."""

    num_read = 0

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples = samples

    def __iter__(self):
        for piece in self.samples.split(100):
            PlayedFile.num_read += len(piece)
            yield piece


def batches_while_reading(recordings, **arguments):
    """The batches of segments of 2 s at most, 8 s in a batch, and the number of samples read before each of them."""
    PlayedFile.num_read = 0
    batches, num_read = [], []
    for batch in segment_batches(recordings, RATE, 2.0, 8.0, **arguments):
        batches.append(batch)
        num_read.append(PlayedFile.num_read)
    for index, recording in enumerate(recordings):
        own = [one for batch in batches for one in batch if one.recording_idx == index]
        own.sort(key=lambda one: one.begin)
        is_file = isinstance(recording, PlayedFile)
        assert {one.is_read for one in own} == {is_file}
        samples = recording.samples if is_file else recording
        assert torch.equal(torch.cat([one.samples for one in own]), samples)
        assert [one.begin for one in own] == [0, *itertools.accumulate(len(one.samples) for one in own)][:-1]
    for batch in batches:
        assert len(batch) == 1 or max(len(one.samples) for one in batch) * len(batch) <= 8 * RATE
    return batches, num_read


def noise(*lengths: int) -> list[torch.Tensor]:
    return [torch.randn(length, generator=torch.Generator().manual_seed(length)) for length in lengths]


def test_arrays_are_batched_by_length_and_six_batches_of_files_are_read_ahead() -> None:
    lengths = [300, 30_000, 60, 70_000, 5000, 20]
    arrays = noise(*lengths)
    batches, _ = batches_while_reading(arrays)
    in_order = [len(one.samples) for batch in batches for one in batch]
    assert in_order == sorted(in_order, reverse=True)
    files = [PlayedFile(samples) for samples in noise(*lengths)]
    batches, num_read = batches_while_reading(files)
    # Six batches of 8 s are read ahead, and the rest of a segment; then the next six.
    assert num_read[-1] == sum(lengths)
    reads = sorted(set(num_read))[:-1]
    assert len(reads) == 2
    assert all(0 <= num - 6 * 8 * RATE * count < 3 * RATE * count for count, num in enumerate(reads, start=1))
    # Arrays are in memory anyway.
    batches, num_read = batches_while_reading([*arrays, *files])
    assert any({one.is_read for one in batch} == {False, True} for batch in batches)


def test_few_sessions_are_open_at_a_time() -> None:
    """With six batches of 8 s and segments of 2 s, 24 of 50; the second segments come after all first ones."""
    files = [PlayedFile(samples) for samples in noise(*range(3000, 8000, 100))]
    batches, num_read = batches_while_reading(files, sessions=range(50))
    assert all(len({one.recording_idx for one in batch}) == len(batch) for batch in batches)
    segments = [one for batch in batches for one in batch]
    assert num_read[0] < 24 * 3 * RATE
    assert [one.recording_idx // 24 for one in segments] == sorted(one.recording_idx // 24 for one in segments)
    for group in (0, 1):
        firsts = [one.begin == 0 for one in segments if one.recording_idx // 24 == group]
        assert firsts == [True] * 24 + [False] * (len(firsts) - 24)
