"""Files that only FFmpeg reads: m4a, mp4, webm, Matroska and AVI."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asr.audio.codecs import container_of
from asr.audio.io import file_pieces, find_audio_files, inspect_audio, read_audio
from asr.errors import AsrError

RATE = 16000
AAC_HEAD = b"\0\0\0\x20ftypM4A \0\0\0\0"


def tone(seconds: float = 0.5) -> torch.Tensor:
    return 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(int(seconds * RATE)) / RATE)


@pytest.fixture
def encode(tmp_path: Path):
    av = pytest.importorskip("av")

    def write(name: str, codec: str, channels: int = 1) -> Path:
        layout = "mono" if channels == 1 else "stereo"
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream(codec, rate=RATE if codec != "libopus" else 48000, layout=layout)
            samples = (32767 * tone()).to(torch.int16).repeat_interleave(channels)[None].numpy()
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=layout)
            frame.sample_rate = RATE
            resampler = av.AudioResampler(
                format=stream.format, layout=layout, rate=stream.rate, frame_size=stream.codec_context.frame_size
            )
            for part in (frame, None):
                for converted in resampler.resample(part):
                    container.mux(stream.encode(converted))
            container.mux(stream.encode(None))
        return tmp_path / name

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "codec", "channels"),
    [
        ("a.m4a", "aac", 1),
        ("b.mp4", "aac", 2),
        ("c.webm", "libopus", 1),
        ("d.mkv", "aac", 2),
        ("e.avi", "pcm_s16le", 1),
        ("f.mov", "alac", 1),
    ],
)
def test_containers_are_decoded(encode, name: str, codec: str, channels: int) -> None:
    path = encode(name, codec, channels)
    samples = read_audio(path, RATE)
    assert abs(len(samples) / RATE - 0.5) < 0.1
    begin = RATE // 8
    spectrum = torch.fft.rfft(samples[begin : begin + RATE // 4]).abs()
    assert int(spectrum.argmax()) == 110  # of 4 Hz each
    assert 0.3 < float(samples[begin : begin + RATE // 4].abs().max()) < 0.6
    assert inspect_audio(path)[2] == channels
    rate, pieces = file_pieces(path, 0.1)
    assert abs(sum(map(len, pieces)) / rate - 0.5) < 0.1
    assert path in find_audio_files(path.parent)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (AAC_HEAD, "mov"),
        (b"\x1a\x45\xdf\xa3", "matroska"),
        (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf"),
        (b"#!AMR\n", "amr"),
        (b"caff\0\1", "caf"),
        (b"RIFF\0\0\0\0AVI LIST", "avi"),
        (b"\xff\xf1", "aac"),
        (b"\xff\xf9", "aac"),
        (b"RIFF\0\0\0\0WAVE", None),
        (b"ftyp", None),
        (b"", None),
    ],
)
def test_containers_are_known_by_their_first_bytes(tmp_path: Path, head: bytes, name: str | None) -> None:
    (tmp_path / "file").write_bytes(head)
    assert container_of(tmp_path / "file") == name


def test_pieces_are_as_long_as_wanted_and_end_at_damage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FFmpeg's blocks have some hundreds of samples; a stream that took each on its own would cost twice as much."""
    samples = tone()[: 47 * 160]

    def blocks() -> Iterator[np.ndarray[Any, Any]]:
        yield from samples.reshape(47, 160, 1).numpy()
        raise AsrError("it is damaged")

    (tmp_path / "a.m4a").write_bytes(AAC_HEAD)
    monkeypatch.setattr("asr.audio.io.open_media", lambda path, container_name: (RATE, blocks()))
    rate, pieces = file_pieces(tmp_path / "a.m4a", 0.1)
    found = []
    with pytest.raises(AsrError, match="it is damaged"):
        found.extend(pieces)
    assert rate == RATE and torch.equal(torch.cat(found), samples)
    assert [len(piece) for piece in found[:4]] == [1600] * 4


def test_lossless_sound_is_exact(encode) -> None:
    samples = read_audio(encode("a.mkv", "pcm_s16le"), RATE)
    expected = (32767 * tone()).to(torch.int16).float() / 32768
    assert torch.equal(samples, expected)


def test_a_damaged_file_is_one_sentence(encode, tmp_path: Path) -> None:
    whole = encode("a.m4a", "aac").read_bytes()
    (tmp_path / "b.m4a").write_bytes(whole[: len(whole) // 3])
    (tmp_path / "c.m4a").write_bytes(AAC_HEAD + bytes(2000))
    for name in ("b.m4a", "c.m4a"):
        with pytest.raises(AsrError, match=rf"{name}: .*(cannot be decoded|no sound|no samples)"):
            read_audio(tmp_path / name)


def test_playlists_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.m4a").write_text("#EXTM3U\n#EXTINF:1,\n/etc/passwd\n#EXT-X-ENDLIST\n")
    with pytest.raises(AsrError, match="it is damaged or not audio"):
        read_audio(tmp_path / "a.m4a")


def test_without_the_decoder_the_line_that_installs_it_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.m4a").write_bytes(AAC_HEAD + bytes(100))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest))
    with pytest.raises(AsrError, match=r"a\.m4a: .*; pip install 'onepass-asr\[media\]'"):
        read_audio(tmp_path / "a.m4a")
