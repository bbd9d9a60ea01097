"""Raw samples (PCM) and WAV from streams of bytes, such as standard input, as soon as they arrive.

Shapes: L samples.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from asr.audio.samples import to_mono
from asr.errors import AsrError

_LOGGER = logging.getLogger(__name__)

RAW_FORMATS = {"s16le": "<i2", "s32le": "<i4", "f32le": "<f4", "u8": "u1"}
"""Name of a format of raw samples -> its encoding, as NumPy names it."""

_STANDARD_INPUT = "standard input"
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE

# Lengths in WAV headers that were written before the length was known: these or a few bytes less, and SoX's.
_UNKNOWN_LENGTHS = (0xFFFFFFFF, 0x80000000, 0x7FFFFFFF)
_SOX_UNKNOWN_LENGTH = 0x7FFFF000
_MAX_CHUNK_BYTES = 1 << 24


def is_unknown_length(length: int) -> bool:
    """Whether the length (bytes) in a WAV header says that it was not known when the header was written."""
    is_close = any(0 <= unknown - length < 128 for unknown in _UNKNOWN_LENGTHS)
    return length == 0 or length == _SOX_UNKNOWN_LENGTH or is_close


@dataclass(frozen=True)
class PcmFormat:
    """The format of raw samples.

    Args:
        sampling_rate: in Hz.
        encoding: a value of `RAW_FORMATS`, or `s24` for samples of three bytes.
        num_channels: number of interleaved channels, which are averaged as by `read_audio`.
    """

    sampling_rate: int
    encoding: str = "<i2"
    num_channels: int = 1

    @property
    def bytes_per_frame(self) -> int:
        """Number of bytes of one sample of all channels."""
        return (3 if self.encoding == "s24" else np.dtype(self.encoding).itemsize) * self.num_channels

    def decode(self, block: bytes) -> Tensor:
        """Decodes whole frames to samples (L,) float32 in [-1, 1]."""
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
        return torch.from_numpy(to_mono(values.reshape(-1, self.num_channels), self.sampling_rate))


def byte_pieces(stream: BinaryIO, seconds: float, raw: PcmFormat | None = None) -> tuple[int, Iterator[Tensor]]:
    """Reads a stream of bytes piece by piece, as soon as there are samples; waits for the first ones.

    Args:
        stream: WAV or raw samples.
        seconds: maximum length of a piece.
        raw: the format of raw samples; None for WAV.

    Returns:
        the sampling rate, and pieces (L,) float32, with channels averaged as by `read_audio`.

    Raises:
        AsrError: the WAV header is missing, its format is neither PCM nor floating point, or there is no sample.
    """
    length = None
    if raw is None:
        raw, length = read_wav_header(stream)
    pieces = samples_of(stream, raw, length, max(1, int(seconds * raw.sampling_rate)))
    first = next(pieces, None)
    if first is None:
        raise _without_samples(_STANDARD_INPUT)
    return raw.sampling_rate, chain([first], pieces)


def samples_of(stream: BinaryIO, pcm: PcmFormat, length: int | None, size: int) -> Iterator[Tensor]:
    """The samples of a stream of bytes after its header.

    Args:
        stream: the bytes.
        pcm: their format.
        length: the number of bytes, if it is known.
        size: maximum number of samples in a piece.

    Yields:
        Pieces (L,) float32, with channels averaged.
    """
    # `read1` returns what is available instead of waiting for the full size.
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
        _LOGGER.warning("The audio ends within a sample, which is left out.")


def read_wav_header(stream: BinaryIO, source: str = _STANDARD_INPUT) -> tuple[PcmFormat, int | None]:
    """Reads the header up to the samples: their format, and their number of bytes if it is known.

    Args:
        stream: the bytes.
        source: where they come from, for error messages.

    Raises:
        AsrError: as for `byte_pieces`.
    """
    head = _read_exactly(stream, 12, source)
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        raise AsrError(f"{source} does not begin like a WAV file; for samples without a header give --raw-rate.")
    pcm: PcmFormat | None = None
    while True:
        name, size = struct.unpack("<4sI", _read_exactly(stream, 8, source))
        if name == b"data":
            if pcm is None:
                raise AsrError(f"{source}: the WAV header has no format before its samples; it is damaged.")
            return pcm, None if is_unknown_length(size) else size
        if size > _MAX_CHUNK_BYTES:
            raise AsrError(f"{source}: the WAV header has a part of {size} bytes; it is damaged.")
        content = _read_exactly(stream, size + size % 2, source)
        if name == b"fmt ":
            pcm = _wav_format(content, source)


def _wav_format(content: bytes, source: str) -> PcmFormat:
    if len(content) < 16:
        raise AsrError(f"{source}: the WAV header's format is too short; it is damaged.")
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
            f"{source}: WAV with {num_channels} channels at {rate} Hz, kind {kind} with {bits} bits per sample; "
            "give plain PCM or floating-point samples."
        )
    return PcmFormat(rate, encodings[kind, bits], num_channels)


def _read_exactly(stream: BinaryIO, size: int, source: str) -> bytes:
    content = b""
    while len(content) < size:
        block = stream.read(size - len(content))
        if not block:
            raise _without_samples(source)
        content += block
    return content


def _without_samples(source: str) -> AsrError:
    return AsrError(f"{source} ends before any sample; give it a WAV file, or --raw-rate for raw samples.")
