"""Samples from files and from bytes that come one after another."""

from __future__ import annotations

import io
import logging
import re
import struct

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.io import file_pieces, read_audio
from asr.audio.pcm import PcmFormat, byte_pieces
from asr.errors import AsrError

SAMPLES = torch.linspace(-0.9, 0.9, 1000)


class Trickle(io.BytesIO):
    """Gives seven bytes at a time, as a pipe may."""

    def read1(self, size: int = -1) -> bytes:
        return self.read(min(7, size))


def wav(subtype: str, channels: int = 1, format_name: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, SAMPLES.numpy()[:, None].repeat(channels, 1), 8000, subtype=subtype, format=format_name)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subtype", "channels", "format_name"),
    [
        ("PCM_16", 1, "WAV"),
        ("PCM_24", 2, "WAV"),
        ("PCM_U8", 1, "WAV"),
        ("FLOAT", 3, "WAV"),
        ("DOUBLE", 1, "WAV"),
        ("PCM_32", 1, "WAVEX"),
    ],
)
def test_wav_of_every_kind(subtype, channels, format_name):
    rate, pieces = byte_pieces(Trickle(wav(subtype, channels, format_name)), 0.01)
    assert rate == 8000
    assert torch.allclose(torch.cat(list(pieces)), SAMPLES, atol=0.01 if subtype == "PCM_U8" else 1e-4)


def test_channels_that_cancel_each_other_are_heard_in_streams_too(tmp_path):
    """As in whole files, the first channel is used where the mean would be silence."""
    stereo = torch.stack([SAMPLES, -SAMPLES], dim=1).numpy()
    path = tmp_path / "stereo.wav"
    soundfile.write(path, stereo, 8000, subtype="FLOAT")
    raw = PcmFormat(8000, "<f4", 2)
    for _, pieces in (
        file_pieces(path, 0.05),
        byte_pieces(io.BytesIO(path.read_bytes()), 0.05),
        byte_pieces(io.BytesIO(stereo.astype("<f4").tobytes()), 0.05, raw),
    ):
        assert torch.equal(torch.cat(list(pieces)), read_audio(path, 8000))


def test_channels_of_other_bytes_than_samples_cause_no_warnings(recwarn):
    """Such as 16-bit samples that are read as floats: the recognizer reports them."""
    content = np.array([[np.nan, 1.0], [3e38, 3e38], [np.inf, -np.inf]], dtype="<f4").tobytes()
    _, pieces = byte_pieces(io.BytesIO(content), 0.05, PcmFormat(8000, "<f4", 2))
    assert not torch.cat(list(pieces)).isfinite().any()
    assert not recwarn.list


def test_raw_samples_and_half_a_sample_at_the_end(caplog):
    content = (SAMPLES.numpy() * 32767).astype("<i2").tobytes() + b"x"
    with caplog.at_level(logging.WARNING):
        rate, pieces = byte_pieces(io.BytesIO(content), 0.01, PcmFormat(8000))
        found = list(pieces)
    assert rate == 8000 and max(map(len, found)) == 80
    assert torch.allclose(torch.cat(found), SAMPLES, atol=1e-4)
    assert "The audio ends within a sample, which is left out" in caplog.text


def test_a_header_written_before_the_length_was_known(caplog):
    content = bytearray(wav("PCM_16"))
    at = content.index(b"data") + 4
    content[at : at + 4] = b"\xff\xff\xff\xff"
    assert sum(map(len, byte_pieces(io.BytesIO(bytes(content)), 0.01)[1])) == 1000
    with caplog.at_level(logging.WARNING):
        assert sum(map(len, byte_pieces(io.BytesIO(wav("PCM_16")[:-200]), 0.01)[1])) == 900
    assert "ends 200 bytes before its WAV header says" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends before any sample"),
        (b"RIFF", "ends before any sample"),
        (np.zeros(100, dtype="<i2").tobytes(), "does not begin like a WAV file; .* --raw-rate"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "has no format before its samples"),
        (b"RIFF\0\0\0\0WAVEfmt \2\0\0\0ab", "too short"),
        (wav("ULAW"), "kind 7 with 8 bits per sample"),
    ],
)
def test_bytes_that_are_no_audio(content, message):
    with pytest.raises(AsrError, match=message):
        byte_pieces(io.BytesIO(content), 0.01)


def test_a_file_of_another_encoding_that_announces_no_samples(tmp_path):
    """Such as ADPCM that was written to a pipe; the message is about the file, not about standard input."""
    encoding = struct.pack("<HHIIHHHH", 17, 1, 8000, 4055, 256, 4, 2, 505)
    parts = b"fmt ", struct.pack("<I", len(encoding)), encoding, b"fact", struct.pack("<II", 4, 0), b"data\0\0\0\0"
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF\0\0\0\0WAVE" + b"".join(parts) + b"\1" * 512)
    message = f"^{re.escape(str(path))}: WAV with 1 channels at 8000 Hz, kind 17 with 4 bits per sample; give plain PCM"
    with pytest.raises(AsrError, match=message):
        read_audio(path, 8000)
    with pytest.raises(AsrError, match=message):
        list(file_pieces(path, 0.1)[1])


def test_files(tmp_path):
    path = tmp_path / "a.flac"
    soundfile.write(path, SAMPLES.numpy(), 16000)
    rate, pieces = file_pieces(path, 0.01)
    assert rate == 16000
    assert torch.allclose(torch.cat(list(pieces)), SAMPLES, atol=1e-4)
    with pytest.raises(AsrError, match="no such audio file"):
        file_pieces(tmp_path / "b.wav", 1.0)
    (tmp_path / "c.wav").write_text("words")
    with pytest.raises(AsrError, match=r"c\.wav: the audio cannot be decoded"):
        file_pieces(tmp_path / "c.wav", 1.0)
    for name in ("d.wav", "d.aiff"):
        soundfile.write(tmp_path / name, np.zeros(0), 16000)
        with pytest.raises(AsrError, match=rf"{name}: the audio has no samples"):
            file_pieces(tmp_path / name, 1.0)


def test_a_file_that_is_cut_short_is_taken_as_far_as_it_goes_with_a_warning(tmp_path, caplog):
    soundfile.write(tmp_path / "a.wav", np.zeros(1000, dtype=np.float32), 16000)
    whole = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").write_bytes(whole[:-600])
    with caplog.at_level(logging.WARNING):
        _, pieces = file_pieces(tmp_path / "a.wav", 0.01)
        assert sum(map(len, pieces)) == 700
    assert "a.wav: the audio is cut short" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["VORBIS", "OPUS"])
def test_an_ogg_file_that_is_cut_short(tmp_path, caplog, codec):
    """libsndfile takes it for a shorter one."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 160_000).astype(np.float32)
    soundfile.write(tmp_path / "a.ogg", noise, 16000, format="OGG", subtype=codec)
    assert abs(len(read_audio(tmp_path / "a.ogg")) - 160_000) < 1000
    whole = (tmp_path / "a.ogg").read_bytes()
    for num_bytes in (3 * len(whole) // 4, len(whole) - 1):
        (tmp_path / "a.ogg").write_bytes(whole[:num_bytes])
        with pytest.raises(AsrError, match=r"a\.ogg: the audio is cut short"):
            read_audio(tmp_path / "a.ogg")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            list(file_pieces(tmp_path / "a.ogg", 0.1)[1])
        assert "a.ogg: the audio is cut short" in caplog.text
