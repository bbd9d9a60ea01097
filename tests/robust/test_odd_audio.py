"""Odd but intact audio is read, damaged audio gives one sentence, and no file takes the others of a run with it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.io import AudioFile, file_pieces, find_audio_names, open_audio, read_audio
from asr.audio.resample import resample
from asr.cli.transcribe import transcribe
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError

TONE = (0.3 * np.sin(np.arange(16000) / 10)).astype(np.float32)


def written(path: Path, samples: np.ndarray = TONE, rate: int = 16000, **settings: str) -> Path:
    soundfile.write(str(path), samples, rate, **settings)
    return path


def flac_without_length(path: Path) -> Path:
    """FLAC as a pipe writes it: its total of samples is 0."""
    content = bytearray(written(path).read_bytes())
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    path.write_bytes(content)
    return path


def mp3_with_length(path: Path, num_frames: int) -> Path:
    """MP3 whose Xing header claims this number of frames."""
    content = bytearray(written(path).read_bytes())
    begin = max(content.find(b"Xing"), content.find(b"Info"))
    content[begin + 8 : begin + 12] = struct.pack(">I", num_frames)
    path.write_bytes(content)
    return path


def wav_of_length(path: Path, length: int, riff: int = 0xFFFFFFFF) -> Path:
    content = bytearray(written(path, subtype="PCM_16").read_bytes())
    begin = content.find(b"data")
    content[begin + 4 : begin + 8] = struct.pack("<I", length)
    content[4:8] = struct.pack("<I", riff)
    path.write_bytes(content)
    return path


def pieces(path: Path) -> torch.Tensor:
    return torch.cat(list(file_pieces(path, 0.3)[1]))


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0xFFFFFFFF - 36])
@pytest.mark.parametrize("read", [read_audio, pieces])
def test_wav_of_unknown_length_is_read_to_its_end(tmp_path: Path, length: int, read) -> None:
    assert (read(wav_of_length(tmp_path / "a.wav", length)) - torch.from_numpy(TONE)).abs().max() < 1e-4


def test_wav_that_is_cut_short_is_refused_still(tmp_path: Path) -> None:
    with pytest.raises(AsrError, match="cut short"):
        read_audio(wav_of_length(tmp_path / "a.wav", 40000))
    with pytest.raises(AsrError, match="no samples"):
        read_audio(written(tmp_path / "b.wav", TONE[:0]))


@pytest.mark.parametrize("read", [read_audio, pieces])
def test_gsm_and_flac_without_length_are_read(tmp_path: Path, read) -> None:
    gsm = written(tmp_path / "a.wav", subtype="GSM610")
    for path, error in ((gsm, 0.1), (flac_without_length(tmp_path / "a.flac"), 1e-4)):
        samples = read(path)
        assert len(samples) == 16000
        assert (samples - torch.from_numpy(TONE))[400:-400].abs().max() < error


def test_an_mp3_that_announces_more_frames_than_memory_holds_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = read_audio(mp3_with_length(tmp_path / "a.mp3", 100))
    assert len(whole) >= len(TONE)
    assert torch.equal(read_audio(mp3_with_length(tmp_path / "b.mp3", 0x7FFFFFFF)), whole)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 1000, 4096])
def test_mp3_in_pieces_is_the_whole_and_quiet(tmp_path: Path, capfd, size: int) -> None:
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, 48000).astype(np.float32)
    path = written(tmp_path / "a.mp3", noise)
    whole = read_audio(path)
    rate, parts = file_pieces(path, size / 16000)
    assert rate == 16000 and torch.equal(torch.cat(list(parts)), whole)
    assert capfd.readouterr().err == ""


def test_channels_that_cancel_each_other_are_heard(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", np.stack([TONE, -TONE], 1))
    assert (read_audio(path) - torch.from_numpy(TONE)).abs().max() < 1e-4
    half = written(tmp_path / "b.wav", np.stack([TONE, 0 * TONE], 1))
    assert (read_audio(half) - torch.from_numpy(TONE) / 2).abs().max() < 1e-4


@pytest.mark.slow
def test_channels_that_cancel_each_other_for_a_while_are_heard(tmp_path: Path) -> None:
    part = np.tile(TONE, 40)
    channels = np.stack([np.tile(part, 2), np.concatenate([part, -part])], 1)
    read = read_audio(written(tmp_path / "a.wav", channels)).split(16000)
    assert all(float(part.square().mean().sqrt()) > 0.2 for part in read[:40] + read[50:])


@pytest.mark.slow
@pytest.mark.parametrize("rate", [16000, 44100])
def test_long_files_come_in_pieces(tmp_path: Path, rate: int) -> None:
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, 2 * 1_100_000).astype(np.float32)
    path = written(tmp_path / "a.wav", noise, rate, subtype="FLOAT")
    whole = resample(torch.from_numpy(noise), rate, 16000)
    assert torch.allclose(read_audio(path), whole, atol=1e-6) and len(read_audio(path)) == len(whole)
    file = open_audio(path, 16000, whole_seconds=20.0)
    assert isinstance(file, AudioFile)
    first, again = list(file), list(file)
    assert len(first) > 1 and torch.equal(torch.cat(first), torch.cat(again))
    assert torch.equal(torch.cat(first), read_audio(path))
    short = open_audio(path, 16000, whole_seconds=1000.0)
    assert isinstance(short, torch.Tensor) and torch.equal(short, read_audio(path))


def test_what_is_wrong_with_the_end_of_a_long_file_is_told(tmp_path: Path) -> None:
    samples = np.tile(TONE, 150)
    samples[-5] = np.nan
    path = written(tmp_path / "a.wav", samples, subtype="FLOAT")
    file = open_audio(path, 16000, whole_seconds=10.0)
    with pytest.raises(AsrError, match=r"a\.wav: 1 of 2400000 samples are NaN, infinite or"):
        list(file)


def test_too_much_for_memory_is_refused_before_it_is_held(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("asr.audio.io._MAX_DECODED_BYTES", 40000)
    with pytest.raises(AsrError, match="more than 10000 samples"):
        read_audio(written(tmp_path / "a.flac"))


class Recognizer:
    """Knows sums, and fails on loud audio as a library would."""

    sampling_rate = 16000
    resources = ResourceOptions()
    device = torch.device("cpu")
    carries_history = False

    def __call__(
        self, waveforms: list[torch.Tensor], nbest: int = 1, speaker: None = None, sessions: None = None
    ) -> list[float]:
        if any(float(waveform.max()) > 1 for waveform in waveforms):
            raise RuntimeError("CUDA out of memory")
        return [float(waveform.sum()) for waveform in waveforms]


def test_whatever_is_raised_becomes_the_files_error() -> None:
    def read(name: str, rate: int) -> torch.Tensor:
        if name == "odd":
            raise ZeroDivisionError("of a library")
        return torch.full((8,), 2.0 if name == "loud" else 0.5)

    outcomes = list(transcribe(Recognizer(), ["a", "odd", "b", "loud", "c"], read))  # type: ignore[arg-type]
    assert [outcome.result for outcome in outcomes] == [4.0, None, 4.0, None, 4.0]
    assert outcomes[1].error == "odd: it cannot be read (ZeroDivisionError: of a library)."
    assert outcomes[3].error == "loud: it cannot be recognized (RuntimeError: CUDA out of memory)."


def test_a_link_to_itself_hides_no_recording(tmp_path: Path) -> None:
    for name in ("a.wav", "z.wav"):
        written(tmp_path / name)
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-folder.wav").symlink_to("folder")
    # A folder is read in no particular order: with a link first, in the middle and last, none may be left out.
    for number in range(5):
        (tmp_path / f"loop{number}.wav").symlink_to(f"loop{number}.wav")
        written(tmp_path / f"b{number}.wav")
    names = [*(f"b{number}" for number in range(5)), *(f"loop{number}" for number in range(5))]
    assert [Path(name).stem for name in find_audio_names(tmp_path)] == ["a", *names, "z"]
    with pytest.raises(AsrError, match=r"loop0.wav: .*\.$"):
        read_audio(tmp_path / "loop0.wav")
