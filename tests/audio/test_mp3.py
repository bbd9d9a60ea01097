"""MP3 files whose length their beginning does not tell, and damaged ones."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from asr.audio import mp3
from asr.audio.io import PartReader, file_pieces, read_audio, read_part
from asr.audio.mp3 import mp3_frames
from asr.errors import AsrError

RATE, FRAME = 16000, 576
SECONDS = 6
needs_ffmpeg = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="needs FFmpeg's libraries")


def pieces(path: Path) -> torch.Tensor:
    return torch.cat(list(file_pieces(path, 0.5)[1]))


READERS = pytest.mark.parametrize("read", [read_audio, pieces])


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise that gets softer and takes fewer and fewer bits; begins with a Xing header."""
    path = tmp_path_factory.mktemp("mp3") / "intact.mp3"
    noise = np.random.default_rng(0).standard_normal(SECONDS * RATE) * np.linspace(0.3, 0.01, SECONDS * RATE)
    soundfile.write(str(path), noise.astype(np.float32), RATE)
    return path


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        (tmp_path / "a.mp3").write_bytes(content)
        return tmp_path / "a.mp3"

    return write


def frame_begins(content: bytes) -> list[int]:
    """By the sizes alone, in an intact file."""
    begins, position = [], 0
    while position < len(content):
        begins.append(position)
        frame = mp3._frame(int.from_bytes(content[position : position + 3], "big"))
        assert frame is not None
        position += frame.num_bytes
    return begins


def silent_frames(num_frames: int) -> bytes:
    """Frames of 32 kbit/s at 16 kHz in mono, without a Xing header."""
    return (struct.pack(">I", 0xFFF348C4) + bytes(140)) * num_frames


@READERS
def test_a_damaged_frame_is_passed_over_with_a_warning(intact: Path, written, read, caplog) -> None:
    content = bytearray(intact.read_bytes())
    begin = frame_begins(bytes(content))[60]
    content[begin : begin + 4] = bytes(4)
    path = written(bytes(content))
    assert SECONDS * RATE - 3 * FRAME < len(read(path)) < SECONDS * RATE
    assert caplog.messages == [f"{path}: the MP3 is damaged in places; words there may be wrong or missing."]


def test_a_file_with_fewer_bytes_than_its_xing_header_announces_is_cut_short(intact: Path, written) -> None:
    path = written(intact.read_bytes()[:-300])
    with pytest.raises(AsrError, match="is cut short"):
        read_audio(path)
    assert not mp3_frames(path).is_whole
    assert mp3_frames(intact).is_whole


def test_a_file_with_fewer_bytes_than_its_vbri_header_announces_is_cut_short(written) -> None:
    frames = silent_frames(10)
    vbri = b"VBRI" + bytes(6) + struct.pack(">I", len(frames))
    content = frames[:36] + vbri + frames[36 + len(vbri) :]
    assert mp3_frames(written(content)).is_whole
    assert not mp3_frames(written(content[:-10])).is_whole


@READERS
def test_a_length_that_is_only_estimated_is_no_announcement(written, read, caplog) -> None:
    """Frames of 128 kbit/s at 44.1 kHz have 417 or 418 bytes; libmpg123 takes all to have 417."""
    short, long = (struct.pack(">I", header) + bytes(size) for header, size in ((0xFFFB90C4, 413), (0xFFFB92C4, 414)))
    path = written(short + long * 600)
    with soundfile.SoundFile(path) as file:
        assert file.frames > 601 * 1152
    assert len(read(path)) in (601 * 1152, -(-601 * 1152 * 160 // 441))  # as it is, or resampled
    assert not caplog.messages


@needs_ffmpeg
@READERS
def test_a_variable_bit_rate_without_a_header_is_read_to_the_end(intact: Path, written, read) -> None:
    content = intact.read_bytes()
    path = written(content[frame_begins(content)[1] :])
    with soundfile.SoundFile(path) as file:
        assert file.frames < (SECONDS - 1) * RATE
    assert SECONDS * RATE <= len(read(path)) < SECONDS * RATE + 4 * FRAME


@needs_ffmpeg
@READERS
def test_joined_files_are_read_to_the_end(intact: Path, written, read, caplog) -> None:
    content = intact.read_bytes()
    tags = b"TAG" + bytes(125) + b"ID3\4\0\0\0\0\1\0" + b"\xff\xfb\x90\xc4" * 32
    path = written(content + tags + content)
    assert 2 * SECONDS * RATE <= len(read(path)) < 2 * SECONDS * RATE + 5 * FRAME
    assert torch.allclose(read(path)[: SECONDS * RATE - FRAME], read(intact)[: SECONDS * RATE - FRAME], atol=1e-4)


@needs_ffmpeg
def test_damage_in_joined_files_is_passed_over_with_a_warning(intact: Path, written, caplog) -> None:
    content = bytearray(intact.read_bytes() * 2)
    begin = frame_begins(bytes(content))[250]
    content[begin : begin + 4] = bytes(4)
    path = written(bytes(content))
    assert 2 * SECONDS * RATE - 3 * FRAME < len(read_audio(path)) < 2 * SECONDS * RATE + 5 * FRAME
    assert caplog.messages == [f"{path}: the MP3 is damaged in places; words there may be wrong or missing."]


@READERS
def test_without_ffmpeg_audio_behind_the_announced_length_is_an_error(intact: Path, written, read, monkeypatch) -> None:
    monkeypatch.setattr("asr.audio.codecs.importlib.util.find_spec", lambda name: None)
    with pytest.raises(AsrError, match=r"a\.mp3: reading an MP3 with more audio than .* pip install"):
        read(written(intact.read_bytes() * 2))


def test_bytes_that_are_no_frames_are_left_out_in_bounded_time(written, monkeypatch) -> None:
    frames = silent_frames(20)
    noise = np.random.default_rng(1).bytes(200_000)  # spans blocks of the search
    assert mp3_frames(written(frames + noise + frames)).num_samples == 40 * FRAME
    false_headers = b"\0\xff\xfb\x90" * 1000
    assert mp3_frames(written(frames + false_headers + frames)).num_samples == 40 * FRAME
    monkeypatch.setattr(mp3, "_MAX_FALSE_HEADERS", 100)
    assert mp3_frames(written(frames + false_headers * 100 + frames)).num_samples == 20 * FRAME


@pytest.mark.parametrize(
    ("header", "num_bytes", "num_samples"),
    [
        (0xFFFB90, 417, 1152),  # MPEG-1, 128 kbit/s, 44.1 kHz
        (0xFFFB92, 418, 1152),  # the same with padding
        (0xFFF388, 288, 576),  # MPEG-2, 64 kbit/s, 16 kHz
        (0xFFE318, 72, 576),  # MPEG-2.5, 8 kbit/s, 8 kHz
    ],
)
def test_frames_by_hand(header: int, num_bytes: int, num_samples: int) -> None:
    assert mp3._frame(header) == (num_bytes, num_samples)


@pytest.mark.parametrize("header", [0xFFFD90, 0xFFEB90, 0xFFFBF0, 0xFFFB00, 0xFFFB9C, 0xFEFB90])
def test_what_is_no_frame_of_layer_3(header: int) -> None:
    assert mp3._frame(header) is None


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("compression", [0.0, 0.99])
def test_a_part_is_exact_even_if_its_frames_share_bits_with_earlier_ones(
    tmp_path: Path, rate: int, compression: float
) -> None:
    """At low bit rates, a decoder that starts at the part makes noise at first."""
    path, random = tmp_path / "a.mp3", np.random.default_rng(0)
    samples = random.standard_normal(20 * rate) * (0.2 + 0.2 * np.sin(np.arange(20 * rate) / rate))
    arguments = {"bitrate_mode": "CONSTANT", "compression_level": compression}
    soundfile.write(str(path), samples.astype(np.float32), rate, **arguments)
    whole = read_audio(path, rate)
    for begin in random.integers(0, len(whole), 20).tolist():
        part = read_part(path, begin, begin + 1000, rate)
        torch.testing.assert_close(part, whole[begin : begin + 1000], rtol=0, atol=1e-6)


def test_parts_are_read_without_the_rest(intact: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    whole, reader = read_audio(intact), PartReader()
    monkeypatch.setattr("asr.audio.io.read_audio", None)
    for begin in range(SECONDS):
        part = reader.read(intact, begin, begin + 1.0, RATE)
        torch.testing.assert_close(part, whole[begin * RATE : (begin + 1) * RATE], rtol=0, atol=1e-6)
    assert len(reader.read(intact, 0.5, None, RATE)) == len(whole) - RATE // 2
    assert not capfd.readouterr().err


def test_a_part_with_damage_is_as_in_the_whole_file(intact: Path, written, caplog) -> None:
    content = bytearray(intact.read_bytes())
    begin = frame_begins(bytes(content))[60]
    content[begin + 4 : begin + 13] = b"\xff" * 9
    path, place = written(bytes(content)), 60 * FRAME
    whole = read_audio(path)
    caplog.clear()
    for begin in (place - 9000, place + 9000, place - 3000):
        assert not caplog.messages
        part = read_part(path, begin, begin + 3000)
        torch.testing.assert_close(part, whole[begin : begin + 3000], rtol=0, atol=1e-6)
    assert caplog.messages == [f"{path}: the MP3 is damaged in places; words there may be wrong or missing."]


def test_the_frames_of_a_file_are_searched_once(intact: Path, written, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = written(intact.read_bytes()), list[int]()
    frame_of = mp3._frame
    monkeypatch.setattr(mp3, "_frame", lambda header: found.append(header) or frame_of(header))
    read_audio(path)
    num_frames = len(frame_begins(path.read_bytes()))
    assert len(found) == 2 * num_frames  # half of them are those of the line before
    path.write_bytes(path.read_bytes()[: 40 * FRAME])
    with pytest.raises(AsrError, match="cut short"):
        read_audio(path)
