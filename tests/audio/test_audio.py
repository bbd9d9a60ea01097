"""Audio files good, odd and bad."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.io import PartReader, find_audio_files, from_int16, inspect_audio, read_audio, read_part, to_int16
from asr.errors import AsrError
from tests.datasets.toy_corpora import write_audio


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav")
    wave = read_audio(path)
    assert wave.dtype == torch.float32
    np.testing.assert_array_equal(wave.numpy(), soundfile.read(str(path), dtype="float32")[0])
    assert inspect_audio(path) == (8000, 16000, 1)
    assert torch.equal(from_int16(to_int16(wave)), wave)


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("suffix", ["flac", "wav"])
def test_any_rate_and_stereo_are_brought_to_16_khz_mono(tmp_path: Path, rate: int, channels: int, suffix: str) -> None:
    wave = read_audio(write_audio(tmp_path / f"a.{suffix}", 0.5, rate, channels))
    assert wave.shape == (8000,)
    expected = 0.3 * torch.sin(2 * torch.pi * 440 * torch.arange(8000) / 16000)
    assert (wave - expected)[200:-200].abs().max() < 0.06


@pytest.mark.parametrize(
    ("suffix", "subtype"),
    [("flac", None), ("wav", None), ("wav", "ULAW"), ("aiff", "FLOAT"), ("ogg", None), ("mp3", None)],
)
@pytest.mark.parametrize(("rate", "channels"), [(16000, 1), (8000, 2), (44100, 1), (44099, 1)])
def test_a_part_is_that_of_the_whole_file(
    tmp_path: Path, suffix: str, subtype: str | None, rate: int, channels: int
) -> None:
    if rate == 44099 and suffix in ("mp3", "ogg"):
        rate = 24000
    path = write_audio(tmp_path / f"a.{suffix}", 1.5, rate, channels, subtype)
    whole = read_audio(path)
    for begin, end in (
        (0, 5),
        (0, len(whole)),
        (7001, 12345),
        (len(whole) - 9, len(whole) + 900),
        (len(whole), 1 << 20),
    ):
        part = read_part(path, begin, end)
        assert part.dtype == torch.float32
        torch.testing.assert_close(part, whole[begin:end], rtol=0, atol=1e-6)


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.flac", 20.0)
    whole, content = read_audio(path), path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(AsrError, match="cannot be decoded"):
        read_audio(path)
    assert torch.equal(read_part(path, 16000, 32000), whole[16000:32000])
    with pytest.raises(AsrError, match=r"a\.flac: the audio cannot be decoded"):
        read_part(path, 15 * 16000, 16 * 16000)
    path.write_bytes(b"")
    with pytest.raises(AsrError, match="is empty"):
        read_part(path, 0, 1)


def test_a_file_that_is_decoded_as_a_whole_is_decoded_once(tmp_path: Path) -> None:
    reader, path = PartReader(), write_audio(tmp_path / "a.ogg", 2.0, subtype="OPUS")
    whole, first = read_audio(path), reader.read(path, 0.25, 0.5, 16000)
    path.unlink()
    path.touch()  # only its samples are left
    with pytest.raises(AsrError, match="is empty"):
        reader.read(path, 0.25, 0.5, 8000)
    path.write_bytes(write_audio(tmp_path / "b.ogg", 1.0, subtype="OPUS").read_bytes())
    assert torch.equal(first, whole[4000:8000])
    assert torch.equal(reader.read(path, 1.5, None, 16000), whole[24000:])
    assert not len(reader.read(path, 3.0, 4.0, 16000))
    assert torch.equal(reader.read(tmp_path / "b.ogg", 0.5, None, 16000), read_audio(path)[8000:])


@pytest.mark.parametrize("unsound", [float("nan"), 1e10])
def test_a_part_with_unsound_samples_is_refused(tmp_path: Path, unsound: float) -> None:
    samples = np.zeros(1000, dtype=np.float32)
    samples[700] = unsound
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    assert not read_part(tmp_path / "a.wav", 0, 700).any()
    with pytest.raises(AsrError, match=r"a\.wav: 1 of 1000 samples are NaN, infinite or beyond"):
        read_part(tmp_path / "a.wav", 600, 800)


def test_clipping_instead_of_wrapping_round() -> None:
    assert to_int16(torch.tensor([2.0, -2.0, 1.0])).tolist() == [32767, -32768, 32767]


def test_finding_files(tmp_path: Path) -> None:
    for name in ("b/x.FLAC", "a.mp3", "b/.hidden.wav", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in find_audio_files(tmp_path)] == ["a.mp3", "x.FLAC"]


def test_what_may_not_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulated, since the tests may run as root."""
    (tmp_path / "b").mkdir()
    path, closed = write_audio(tmp_path / "a.wav"), str(tmp_path / "b")
    scandir, opened = os.scandir, Path.open

    def refuse(name: str) -> None:
        if name == closed or name == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr(os, "scandir", lambda name: refuse(str(name)) or scandir(name))
    assert find_audio_files(tmp_path) == [path]
    assert f"{closed}: this folder cannot be read (Permission denied); the recordings in it are left out" in caplog.text
    with pytest.raises(AsrError, match=r"b: this folder cannot be read \(Permission denied\)\.$"):
        find_audio_files(Path(closed))
    monkeypatch.setattr(Path, "open", lambda self, *args, **kwargs: refuse(str(self)) or opened(self, *args, **kwargs))
    with pytest.raises(AsrError, match=r"a\.wav: you may not read this audio file \(Permission denied\)"):
        read_audio(path)


def bad_file(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.wav"
    if kind == "missing":
        return path
    if kind == "zero_bytes":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "no_samples":
        soundfile.write(str(path), np.zeros(0), 16000)
    elif kind == "not_audio":
        path.write_text("<html>404 Not Found</html>", encoding="utf-8")
    elif kind == "nan":
        soundfile.write(str(path), np.array([0.1, np.nan, 0.2, np.inf, -1e30]), 16000, subtype="FLOAT")
    elif kind == "cut_wav":
        write_audio(path)
        path.write_bytes(path.read_bytes()[:-3000])
    elif kind == "cut_flac":
        path = write_audio(folder / "cut.flac")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "header_only":
        write_audio(path)
        path.write_bytes(path.read_bytes()[:20])
    return path


def test_an_address_is_no_missing_file() -> None:
    with pytest.raises(AsrError, match="audio is not fetched from addresses; download it"):
        read_audio("https://example.com/talk.wav")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "there is no such audio file"),
        ("folder", "this is a folder; name the audio files in it"),
        ("pipe", "this is a pipe or a device, not a file"),
        ("zero_bytes", "is empty"),
        ("no_samples", "has no samples"),
        ("not_audio", "cannot be decoded"),
        ("nan", "3 of 5 samples are NaN, infinite or"),
        ("cut_wav", "cut short"),
        ("cut_flac", "cut short|cannot be decoded"),
        ("header_only", "cannot be decoded"),
    ],
)
def test_bad_files_are_named_in_one_sentence(tmp_path: Path, kind: str, message: str) -> None:
    path = bad_file(tmp_path, kind)
    for read in (read_audio, inspect_audio):
        with pytest.raises(AsrError, match=message) as error:
            read(path)
        assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
