"""Audio files to mono waveforms at one sampling rate, with a clear word on each file that cannot be used.

Audio in pieces, as it comes: from a file of any format, or from bytes that cannot be read twice.

Shapes: L samples.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile
import torch
from torch import Tensor

from asr.audio.resample import checked_rate, resample
from asr.errors import AsrError

AUDIO_SUFFIXES = (".flac", ".wav", ".mp3", ".sph", ".ogg", ".opus", ".aiff", ".aif", ".au")
"""In order of preference where one utterance has several files."""


_SHORTER_THAN_HEADER = re.compile(r"should be (\d+)")


def read_audio(path: str | Path, sampling_rate: int = 16000) -> Tensor:
    """A file's samples (L,) float32 in [-1, 1]: channels averaged, brought to `sampling_rate`.

    Raises:
        AsrError: the file is missing, cannot be decoded, is cut short, has no samples, or some that are not numbers.
    """
    samples, file_rate = _decode(Path(path))
    waveform = torch.from_numpy(samples.mean(axis=1) if samples.shape[1] > 1 else samples[:, 0])
    return resample(waveform, file_rate, sampling_rate)


def inspect_audio(path: str | Path) -> tuple[int, int, int]:
    """Decodes a whole file and gives (samples, sampling rate, channels); raises what `read_audio` raises."""
    samples, rate = _decode(Path(path))
    return samples.shape[0], rate, samples.shape[1]


def find_audio_files(folder: Path) -> list[Path]:
    """All audio files below a folder, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in AUDIO_SUFFIXES and not path.name.startswith(".") and not path.is_dir()
    )


def is_cut_short(file: soundfile.SoundFile) -> bool:
    """Whether a WAV header announces more samples than there are: libsndfile silently believes the file's size."""
    return file.format in ("WAV", "WAVEX", "NIST") and _SHORTER_THAN_HEADER.search(file.extra_info) is not None


def to_int16(waveform: Tensor) -> Tensor:
    """[-1, 1] float to int16, what lies outside is clipped: half the memory, nothing lost of 16-bit audio."""
    return (waveform * 32768.0).round_().clamp_(-32768, 32767).to(torch.int16)


def from_int16(samples: Tensor) -> Tensor:
    """int16 to float32 in [-1, 1]."""
    return samples.float() / 32768.0


def _decode(path: Path) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float32]], int]:
    if not path.is_file():
        raise AsrError(f"{path}: there is no such audio file.")
    if path.stat().st_size == 0:
        raise AsrError(f"{path}: the audio file is empty (0 bytes); fetch it again.")
    try:
        with soundfile.SoundFile(os.fsencode(path)) as file:
            announced = file.frames
            cut_short = is_cut_short(file)
            samples = file.read(dtype="float32", always_2d=True)
            rate = int(file.samplerate)
        checked_rate(rate)
    except AsrError as error:
        raise AsrError(f"{path}: the header is damaged: {error}") from error
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise AsrError(f"{path}: the audio cannot be decoded{_reason(error)}; it is damaged or not audio.") from error
    if len(samples) == 0:
        raise AsrError(f"{path}: the audio has no samples (zero length).")
    if cut_short or (0 < announced < 2**62 and len(samples) < announced):
        raise AsrError(
            f"{path}: the audio is cut short: its header announces more than the {len(samples)} samples there are."
        )
    if not np.isfinite(samples).all():
        num = int((~np.isfinite(samples)).any(axis=1).sum())
        raise AsrError(
            f"{path}: {num} of {len(samples)} samples are not numbers (NaN or infinite); make the file anew."
        )
    return samples, rate


def _reason(error: Exception) -> str:
    """libsndfile's own words in brackets, where they say something that is true and not said already."""
    words = str(error).rsplit(": ", 1)[-1].strip().rstrip(".")
    return "" if not words or "does not exist" in words or "internal error" in words else f" ({words})"


_LOGGER = logging.getLogger(__name__)


RAW_FORMATS = {"s16le": "<i2", "s32le": "<i4", "f32le": "<f4", "u8": "u1"}


_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


# What a WAV header tells that was written before the length was known.
_UNKNOWN_LENGTHS = (0, 0xFFFFFFFF, 0x7FFFFFFF)


@dataclass(frozen=True)
class PcmFormat:
    """How samples stand in bytes.

    Args:
        sampling_rate: in Hz.
        encoding: a value of `RAW_FORMATS`, or `s24` for three bytes a sample.
        num_channels: interleaved; they are averaged.
    """

    sampling_rate: int
    encoding: str = "<i2"
    num_channels: int = 1

    @property
    def bytes_per_frame(self) -> int:
        """Bytes of one sample of each channel."""
        return (3 if self.encoding == "s24" else np.dtype(self.encoding).itemsize) * self.num_channels

    def decode(self, block: bytes) -> Tensor:
        """Whole frames of bytes -> (L,) float32 in [-1, 1]."""
        if self.encoding == "s24":
            triples = np.frombuffer(block, dtype=np.uint8).reshape(-1, 3)
            padded = np.concatenate([np.zeros((len(triples), 1), dtype=np.uint8), triples], axis=1)
            values = padded.reshape(-1).view("<i4").astype(np.float32) / 2.0**31
        else:
            values = np.frombuffer(block, dtype=self.encoding).astype(np.float32)
            if self.encoding == "u1":
                values = (values - 128.0) / 128.0
            elif self.encoding[1] == "i":
                values /= 2.0 ** (8 * int(self.encoding[2]) - 1)
        return torch.from_numpy(values.reshape(-1, self.num_channels).mean(axis=1))


def file_pieces(path: str | Path, seconds: float) -> tuple[int, Iterator[Tensor]]:
    """A file's sampling rate, and its samples in pieces (L,) float32, channels averaged.

    Raises:
        AsrError: the file is missing or cannot be decoded; while iterating: it is damaged further on.
    """
    path = Path(path)
    if not path.is_file():
        raise AsrError(f"{path}: there is no such audio file.")
    try:
        file = soundfile.SoundFile(os.fsencode(path))
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise AsrError(f"{path}: the audio cannot be decoded; it is damaged or not audio.") from error
    return int(file.samplerate), _decoded(path, file, max(1, int(seconds * file.samplerate)))


def _decoded(path: Path, file: soundfile.SoundFile, size: int) -> Iterator[Tensor]:
    with file:
        if is_cut_short(file):
            _LOGGER.warning("%s: the audio is cut short: its header announces more than there is.", path)
        while True:
            try:
                samples = file.read(size, dtype="float32", always_2d=True)
            except (soundfile.SoundFileError, RuntimeError) as error:
                raise AsrError(f"{path}: the audio cannot be decoded to its end; it is damaged.") from error
            if not len(samples):
                return
            yield torch.from_numpy(samples.mean(axis=1))


def byte_pieces(stream: BinaryIO, seconds: float, raw: PcmFormat | None = None) -> tuple[int, Iterator[Tensor]]:
    """The sampling rate of a stream of bytes, and its samples in pieces (L,) float32 of at most `seconds`.

    Args:
        stream: WAV, or raw samples; read as they come.
        seconds: a piece is given as soon as there is anything.
        raw: how raw samples stand in bytes; None for WAV.

    Raises:
        AsrError: a WAV header was wanted and is not there, or tells of samples that are not plain numbers.
    """
    length = None
    if raw is None:
        raw, length = _read_wav_header(stream)
    return raw.sampling_rate, _samples(stream, raw, length, max(1, int(seconds * raw.sampling_rate)))


def _samples(stream: BinaryIO, pcm: PcmFormat, length: int | None, size: int) -> Iterator[Tensor]:
    # `read1` gives what is there instead of waiting for all that was asked for.
    read = getattr(stream, "read1", stream.read)
    held, left = b"", length
    while left is None or left > 0:
        block = read(size * pcm.bytes_per_frame if left is None else min(left, size * pcm.bytes_per_frame))
        if not block:
            if left is not None:
                _LOGGER.warning("The audio ends %d bytes before its WAV header says.", left)
            break
        left = None if left is None else left - len(block)
        held += block
        whole = len(held) // pcm.bytes_per_frame * pcm.bytes_per_frame
        if whole:
            yield pcm.decode(held[:whole])
            held = held[whole:]
    if held:
        _LOGGER.warning("The audio ends within a sample; its last %d bytes are left out.", len(held))


def _read_wav_header(stream: BinaryIO) -> tuple[PcmFormat, int | None]:
    """Reads up to the samples: their format, and their bytes where they are known."""
    head = _read_exactly(stream, 12)
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        raise AsrError("standard input does not begin as a WAV file; for samples without a header give --raw-rate.")
    pcm: PcmFormat | None = None
    while True:
        name, size = struct.unpack("<4sI", _read_exactly(stream, 8))
        if name == b"data":
            if pcm is None:
                raise AsrError("standard input: the WAV header tells no format before its samples; it is damaged.")
            return pcm, None if size in _UNKNOWN_LENGTHS else size
        content = _read_exactly(stream, size + size % 2)
        if name == b"fmt ":
            pcm = _wav_format(content)


def _wav_format(content: bytes) -> PcmFormat:
    if len(content) < 16:
        raise AsrError("standard input: the WAV header's format is too short; it is damaged.")
    kind, num_channels, rate, _, _, bits = struct.unpack("<HHIIHH", content[:16])
    if kind == _EXTENSIBLE and len(content) >= 26:
        (kind,) = struct.unpack("<H", content[24:26])
    encodings = {
        (_PCM, 8): "u1",
        (_PCM, 16): "<i2",
        (_PCM, 24): "s24",
        (_PCM, 32): "<i4",
        (_FLOAT, 32): "<f4",
        (_FLOAT, 64): "<f8",
    }
    if (kind, bits) not in encodings or not num_channels or not rate:
        raise AsrError(
            f"standard input: WAV with {num_channels} channels at {rate} Hz of kind {kind} with {bits} bits a sample; "
            "give plain PCM or floating-point samples."
        )
    return PcmFormat(rate, encodings[kind, bits], num_channels)


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    content = b""
    while len(content) < size:
        block = stream.read(size - len(content))
        if not block:
            raise AsrError("standard input ends before any sample; give it a WAV file, or --raw-rate for raw samples.")
        content += block
    return content
