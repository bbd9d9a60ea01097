"""The frames of an MP3 file, found by their headers, without decoding.

libmpg123, and so libsndfile, takes the length of a file from its Xing or VBRI header. Without one it estimates the
length from the bit rate of the first frame, which is often wrong. It stops there, even if more follows: frames of a
lower bit rate, or other files that were joined to the first, as by `cat` or by servers that insert advertisements.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

_KBITS = {
    True: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),  # MPEG-1
    False: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),  # MPEG-2 and 2.5
}
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_LAYER_3 = 1
_HEADER_BYTES = 3  # those that define the length
_STREAM = 0xFFFE0C  # bits of them that all frames of a stream have in common: version, layer and sampling rate

# What begins like the header of a frame of layer III: MPEG-1, 2 or 2.5, with or without a checksum.
_SYNC = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xeb]")
_SEARCHED_BYTES = 1 << 16
_MAX_FALSE_HEADERS = 5000  # random bytes have one in 18 kB; a file may be made of them

_XING, _VBRI = re.compile(rb"(?:Xing|Info)...(.)", re.DOTALL), b"VBRI"
_HAS_FRAMES, _HAS_BYTES = 1, 2
_ID3_HEADER_BYTES = 10


class Mp3Frames(NamedTuple):
    """What an MP3 file has, and what it announces.

    Attributes:
        num_samples: samples of each channel in all frames, including the silence that encoders add.
        is_whole: False if the file has fewer bytes than its first frame announces.
    """

    num_samples: int
    is_whole: bool


class _Frame(NamedTuple):
    num_bytes: int
    num_samples: int


def mp3_frames(path: Path) -> Mp3Frames:
    """Finds the frames of a file; those of layers I and II are left out. The files asked for last are remembered."""
    status = path.stat()
    return _found_frames(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(64)
def _found_frames(path: Path, *_state: int) -> Mp3Frames:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        num_samples, is_whole = 0, True
        while len(head := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
            begin = file.tell() - _HEADER_BYTES
            frame = _frame(int.from_bytes(head, "big"))
            if frame is None:
                file.seek(_behind_other_data(file, begin, head))
                continue
            if num_samples == 0:
                is_whole = size >= begin + _announced_bytes(head + file.read(frame.num_bytes - _HEADER_BYTES))
            num_samples += frame.num_samples
            file.seek(begin + frame.num_bytes)
    return Mp3Frames(num_samples, is_whole)


@functools.lru_cache(4096)
def _frame(header: int) -> _Frame | None:
    """The frame that begins with these 24 bits, or None if none does."""
    version, layer = header >> 11 & 3, header >> 9 & 3
    kbits_idx, rate_idx, padding = header >> 4 & 15, header >> 2 & 3, header >> 1 & 1
    if header >> 13 != 0x7FF or version not in _RATES or layer != _LAYER_3 or rate_idx == 3 or not 1 <= kbits_idx <= 14:
        return None
    is_mpeg1 = version == 3
    num_samples = 1152 if is_mpeg1 else 576
    bits = 1000 * _KBITS[is_mpeg1][kbits_idx - 1] * num_samples
    return _Frame(bits // (8 * _RATES[version][rate_idx]) + padding, num_samples)


def _behind_other_data(file: BinaryIO, begin: int, head: bytes) -> int:
    """Where the next frame begins, behind a tag or damage at `begin`; the end of the file if none does."""
    if head == b"ID3":
        # The size has seven bits in each byte, so that it never looks like the header of a frame.
        seven_bits = file.read(_ID3_HEADER_BYTES - _HEADER_BYTES)[-4:]
        return begin + _ID3_HEADER_BYTES + functools.reduce(lambda size, byte: size << 7 | byte & 127, seven_bits, 0)
    position, num_false = begin + 1, 0
    while num_false < _MAX_FALSE_HEADERS:
        file.seek(position)
        block = file.read(_SEARCHED_BYTES)
        for match in _SYNC.finditer(block):
            header = int.from_bytes(match[0], "big")
            frame = _frame(header)
            if frame is None:
                continue
            # Damage and pictures in tags may look like a header, but hardly like two of one stream.
            file.seek(position + match.start() + frame.num_bytes)
            following = file.read(_HEADER_BYTES)
            if len(following) < _HEADER_BYTES or not (int.from_bytes(following, "big") ^ header) & _STREAM:
                return position + match.start()
            num_false += 1
        if len(block) < _SEARCHED_BYTES:
            break
        position += _SEARCHED_BYTES - _HEADER_BYTES + 1  # a header may lie across two blocks
    return file.seek(0, os.SEEK_END)


def _announced_bytes(first: bytes) -> int:
    """The size of the audio from its first frame on, if that is a Xing or VBRI header with the size, else 0."""
    xing = _XING.search(first)
    if xing is not None and xing[1][0] & _HAS_BYTES:
        place = xing.end() + (4 if xing[1][0] & _HAS_FRAMES else 0)
    elif xing is None and _VBRI in first:
        place = first.index(_VBRI) + 10
    else:
        return 0
    return int.from_bytes(first[place : place + 4], "big")
