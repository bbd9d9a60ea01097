"""Audio in pieces, as it comes: from a file of any format, or from bytes that cannot be read twice.

Shapes: L samples.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile
import torch
from torch import Tensor

from asr.data.audio import is_cut_short
from asr.errors import AsrError

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
