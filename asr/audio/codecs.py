"""The libraries that decode files: libsndfile, whose quirks are dealt with here, and FFmpeg for formats that it lacks.

libmpg123, which libsndfile includes, writes complaints about a damaged MP3 to C's `stderr`, and there is no option to
turn them off. In glibc `stderr` is a variable that a program may set, so that `kept_complaints` captures them. File
descriptor 2 is left alone: messages of Python, faulthandler and glibc's own checks appear at once, even from other
threads and in a crash.

FFmpeg, through PyAV (optional), reads m4a, mp4, webm and other containers, and MP3 files in which libmpg123 would stop
too early. The container is chosen by the first bytes of the file. FFmpeg may not guess it: playlists and other formats
that refer to other files or addresses are never opened.

Shapes: L samples.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from asr.audio.mp3 import mp3_frames
from asr.audio.pcm import is_unknown_length
from asr.errors import AsrError

_LOGGER = logging.getLogger(__name__)

NO_LENGTH = 1 << 62
"""Lengths from here on mean that libsndfile does not know the length."""

# Encodings in which libsndfile finds any sample without decoding all before it. FLAC's are also called PCM. In Opus it
# finds other samples than those asked for.
_SOUGHT = ("PCM_", "FLOAT", "DOUBLE", "ULAW", "ALAW", "MPEG_LAYER_III", "VORBIS")

_SHORTER_THAN_HEADER = re.compile(r"(data|RIFF) : (\d+) \(should be \d+\)|should be \d+")
_OGG_HEADER_BYTES, _MAX_OGG_PAGE_BYTES = 27, 65307  # RFC 3533
_MAX_ADDED_SAMPLES = 2 * 4095 + 1152  # by encoders, at both ends of an MP3, and in the frame with the Xing header
_ROLL_IN = 1 << 16  # samples; 56 frames of MPEG-1, of which nine may share bits, and 113 of others, 24 of which may
_COMPLAINT = re.compile(rb"\[src/libmpg123/|Note: |Warning: |\s*$")

MEDIA_SUFFIXES = (".m4a", ".mp4", ".webm", ".mka", ".mkv", ".mov", ".aac", ".wma", ".amr", ".caf", ".3gp", ".avi")

# Position and bytes -> FFmpeg's name of the container.
_CONTAINERS = (
    (4, b"ftyp", "mov"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf"),
    (0, b"#!AMR", "amr"),
    (0, b"caff", "caf"),
    (8, b"AVI ", "avi"),
    (0, b"\xff\xf1", "aac"),
    (0, b"\xff\xf9", "aac"),
)
INSTALL = "pip install 'onepass-asr[media]'"


class SequentialFile(soundfile.SoundFile):
    """A file that is read in blocks without seeking between them.

    soundfile seeks to the current position after each block. An MP3 decoder then loses the bit reservoir: samples at
    the beginning of the next block are wrong, and libmpg123 writes warnings to stderr. Formats without seeking, such as
    GSM 6.10, could not be read at all.
    """

    def seekable(self) -> bool:
        """Always false."""
        return False

    def blocks_to_end(self, size: int) -> Iterator[np.ndarray[Any, Any]]:
        """The rest in float32 blocks (at most `size`, channels), regardless of the length that the header announces.

        Warns at the end of a damaged MP3, unless it is also cut short, which callers tell.
        """
        is_damaged = False
        while True:
            with kept_complaints() if self.format == "MP3" else contextlib.nullcontext() as complaints:
                block = self.read(size, dtype="float32", always_2d=True)
            is_damaged = is_damaged or bool(complaints)
            if not len(block):
                break
            yield block
        if is_damaged and not is_cut_short(self):
            _warn_of_damage(Path(os.fsdecode(self.name)))

    @property
    def num_samples(self) -> int:
        """The number of samples that can be read; at least `NO_LENGTH` if it is not known."""
        if self.format != "MP3":
            return int(self.frames)
        return min(self.frames, mp3_frames(Path(os.fsdecode(self.name))).num_samples)  # one may be an estimate

    def read_between(self, begin: int, end: int) -> np.ndarray[Any, Any] | None:
        """The samples (L, channels) float32 from `begin` to `end`, exclusive, as if all before them were decoded.

        Fewer if the file ends before; None if that part of an MP3 is damaged, or if its encoding cannot be sought
        exactly.
        """
        if not self.subtype.startswith(_SOUGHT):
            return None
        if self.format != "MP3":
            self.seek(begin)
            return self.read(end - begin, dtype="float32", always_2d=True)
        # A frame may need bits of earlier ones; without them, the decoder complains and makes noise.
        roll_in = min(begin, _ROLL_IN)
        try:
            with kept_complaints():
                self.seek(begin - roll_in)
                self.read(roll_in, dtype="float32")
            with kept_complaints() as complaints:
                block = self.read(end - begin, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError:
            return None
        return None if complaints else block


def is_cut_short(file: soundfile.SoundFile) -> bool:
    """Whether the header of a WAV or MP3 file, or of the last page of an Ogg file, announces more than there is.

    libsndfile silently uses what there is. A header written to a pipe announces no length, since it was not known. Of
    an MP3 the bytes count: its samples may be fewer than libsndfile announces, because it estimates their number if
    there is no Xing header, or because damaged frames are passed over.
    """
    if file.format == "OGG":
        return _ends_within_ogg_page(Path(os.fsdecode(file.name)))
    if file.format == "MP3":
        return not mp3_frames(Path(os.fsdecode(file.name))).is_whole
    if file.format not in ("WAV", "WAVEX", "NIST"):
        return False
    lengths = [match[2] for match in _SHORTER_THAN_HEADER.finditer(file.extra_info)]
    return any(length is None or not is_unknown_length(int(length)) for length in lengths)


def _ends_within_ogg_page(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _MAX_OGG_PAGE_BYTES))
        tail = stream.read()
    page = tail[max(0, tail.rfind(b"OggS")) :]
    if len(page) < _OGG_HEADER_BYTES:
        return True
    num_segments = page[_OGG_HEADER_BYTES - 1]
    lengths = page[_OGG_HEADER_BYTES : _OGG_HEADER_BYTES + num_segments]
    return len(page) < _OGG_HEADER_BYTES + num_segments + sum(lengths)


class _Kept:
    """A file in memory that takes the place of C's `stderr`; raises an error if the C library has no such variable."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        libc.setbuf.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
        self._variable = ctypes.c_void_p.in_dll(libc, "stderr")
        self._stderr = self._variable.value
        self._descriptor = os.memfd_create("stderr")
        self._file: int = libc.fdopen(self._descriptor, b"a")
        libc.setbuf(self._file, None)
        self.lock = threading.Lock()

    def begin(self) -> None:
        self._variable.value = self._file

    def end(self) -> list[bytes]:
        """The lines since `begin`."""
        self._variable.value = self._stderr
        size = os.fstat(self._descriptor).st_size
        if not size:
            return []
        written = os.pread(self._descriptor, size, 0)
        os.ftruncate(self._descriptor, 0)
        return written.splitlines(keepends=True)

    def after_fork(self) -> None:
        """Resets the state in a child, whose parent may have been decoding in a thread that the child does not have."""
        self.end()
        self.lock = threading.Lock()


@functools.cache
def _kept() -> _Kept | None:
    try:
        kept = _Kept()
    except (OSError, AttributeError, ValueError):
        return None  # another C library, with which complaints appear directly
    os.register_at_fork(after_in_child=kept.after_fork)
    return kept


@contextlib.contextmanager
def kept_complaints() -> Iterator[list[str]]:
    """Captures libmpg123's complaints: the list has them after the block, which only one thread at a time runs.

    Whatever else was written to C's `stderr` in the block is written out after it.
    """
    complaints = list[str]()
    kept = _kept()
    if kept is None:
        yield complaints
        return
    with kept.lock:
        kept.begin()
        try:
            yield complaints
        finally:
            for line in kept.end():
                if _COMPLAINT.match(line):
                    complaints.append(line.decode(errors="replace").strip())
                else:
                    os.write(2, line)


def may_be_mp3(path: Path) -> bool:
    """Whether a file begins like an MP3: with a tag or with a frame."""
    with path.open("rb") as file:
        return file.read(3).startswith((b"ID3", b"\xff"))


def has_more_than_announced(file: soundfile.SoundFile) -> bool:
    """Whether an MP3 goes on where libsndfile would stop; see `asr.audio.mp3`."""
    return file.format == "MP3" and (
        mp3_frames(Path(os.fsdecode(file.name))).num_samples > file.frames + _MAX_ADDED_SAMPLES
    )


def container_of(path: Path) -> str | None:
    """FFmpeg's name of the container, by the file's first bytes; None if this module does not read it."""
    with path.open("rb") as file:
        head = file.read(16)
    return next((name for place, magic, name in _CONTAINERS if head[place:].startswith(magic)), None)


def open_media(path: Path, container_name: str) -> tuple[int, Iterator[np.ndarray[Any, Any]]]:
    """Opens the first audio track of a file.

    Args:
        path: the file.
        container_name: FFmpeg's name of the container: that of `container_of`, or `mp3`.

    Returns:
        the sampling rate, and blocks (L, channels) float32 in [-1, 1], decoded as they are taken.

    Raises:
        AsrError: PyAV is not installed, or the file has no audio or cannot be decoded; also while blocks are taken.
    """
    if importlib.util.find_spec("av") is None:
        kind = "an MP3 with more audio than its beginning announces" if container_name == "mp3" else "this kind of file"
        raise AsrError(f"{path}: reading {kind} needs FFmpeg's libraries; {INSTALL}.")
    import av

    try:
        container: Any = av.open(str(path), format=container_name, options={"protocol_whitelist": "file"})
    except (av.FFmpegError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if not container.streams.audio:
        container.close()
        raise AsrError(f"{path}: there is no sound in this file.")
    rate = int(container.streams.audio[0].rate or 0)
    return rate, _blocks(path, container, rate)


def _blocks(path: Path, container: Any, rate: int) -> Iterator[np.ndarray[Any, Any]]:
    import av

    with container:
        try:
            # To float samples, one row for each channel, without a change of the rate.
            resampler = av.AudioResampler(format="fltp", rate=rate)
            for frame in _frames(path, container):
                for converted in resampler.resample(frame):
                    yield converted.to_ndarray().T
            for converted in resampler.resample(None):
                yield converted.to_ndarray().T
        except (av.FFmpegError, OSError, ValueError) as error:
            raise _damaged(path, error) from error


def _frames(path: Path, container: Any) -> Iterator[Any]:
    """Decodes a container; passes over damaged frames of an MP3, with a warning, as libmpg123 does."""
    import av

    is_damaged = False
    for packet in container.demux(container.streams.audio[0]):
        try:
            yield from packet.decode()
        except av.error.InvalidDataError:
            if container.format.name != "mp3":
                raise
            is_damaged = True
    if is_damaged:
        _warn_of_damage(path)


def _warn_of_damage(path: Path) -> None:
    _LOGGER.warning("%s: the MP3 is damaged in places; words there may be wrong or missing.", path)


def _damaged(path: Path, error: Exception) -> AsrError:
    reason = str(getattr(error, "strerror", None) or error).partition("\n")[0].rstrip(".")
    return AsrError(f"{path}: the audio cannot be decoded ({reason}); it is damaged or not audio.")
