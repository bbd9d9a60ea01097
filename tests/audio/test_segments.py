from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr.audio.io import read_audio
from asr.audio.segments import at_rate, batches_of_similar_length, open_recordings, segments_at_pauses, split_at_pauses
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
    waveform = torch.ones(4 * RATE)
    waveform[1600:1900] = 0.01
    assert split_at_pauses(waveform, RATE, 2.5)[0][1] in range(1690, 1811)


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
