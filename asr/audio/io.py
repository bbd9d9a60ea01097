"""Reads audio files: whole ones as mono waveforms at one sampling rate, or piece by piece.

The libraries that decode them are in `asr.audio.codecs`; `asr.audio.pcm` reads streams of bytes.

Shapes: L samples.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr import old_paths
from asr.audio.codecs import (
    MEDIA_SUFFIXES,
    NO_LENGTH,
    SequentialFile,
    container_of,
    has_more_than_announced,
    is_cut_short,
    kept_complaints,
    may_be_mp3,
    open_media,
)
from asr.audio.pcm import read_wav_header, samples_of
from asr.audio.resample import ResampleStream, block_sizes, checked_rate, resample
from asr.audio.samples import LOUDEST, to_mono
from asr.errors import AsrError

_LOGGER = logging.getLogger(__name__)

AUDIO_SUFFIXES = (".flac", ".wav", ".mp3", ".sph", ".ogg", ".opus", ".aiff", ".aif", ".au", *MEDIA_SUFFIXES)
"""In order of preference, for utterances with several files."""

_MAX_DECODED_BYTES = 1 << 32
_BLOCK_VALUES = 1 << 20
_ADDRESS = re.compile("(https?|ftp|s3|gs):/", re.IGNORECASE)  # one slash, as Path writes it


def read_audio(path: str | Path, sampling_rate: int = 16000) -> Tensor:
    """Reads a file: samples (L,) float32 in [-1, 1], with channels averaged and resampled to `sampling_rate`.

    Where the channels cancel each other, for example if left = -right, only the first one is used.

    Raises:
        AsrError: the file is missing, cannot be decoded, is cut short, has no samples, has samples that are not finite,
            or is larger than 4 GiB when decoded.
    """
    return _joined([*AudioFile(path, sampling_rate)])


def read_part(path: str | Path, begin: int, end: int, sampling_rate: int = 16000) -> Tensor:
    """The samples from `begin` to `end`, exclusive, of those that `read_audio` returns; fewer if the file ends before.

    Uncompressed audio, FLAC, MP3 and Vorbis are decoded only there. So damage elsewhere is not noticed, and whether
    channels cancel each other is judged by that part. Files of other formats are decoded as a whole.

    Args:
        path: the file.
        begin, end: positions at `sampling_rate`.
        sampling_rate: of the result, in Hz.

    Raises:
        AsrError: as for `read_audio`.
    """
    part = _part(Path(path), begin, end, sampling_rate)
    return read_audio(path, sampling_rate)[begin:end] if part is None else part


class PartReader:
    """Reads parts of files, in seconds. A file that has to be decoded as a whole is kept for its next part.

    Several threads may use one reader.
    """

    def __init__(self) -> None:
        self._last: tuple[Path, int, Tensor] | None = None

    def read(self, path: str | Path, begin: float, end: float | None, sampling_rate: int) -> Tensor:
        """The samples (L,) from `begin` to `end`, or to the end of the file; fewer, or none, if the file ends before.

        Which samples are decoded, and the errors, are as in `read_part`.
        """
        path, first = Path(path), round(begin * sampling_rate)
        last = sys.maxsize if end is None else round(end * sampling_rate)
        part = _part(path, first, last, sampling_rate)
        if part is not None:
            return part
        kept = self._last  # another thread may replace it at any time
        if kept is None or kept[:2] != (path, sampling_rate):
            kept = self._last = (path, sampling_rate, read_audio(path, sampling_rate))
        return kept[2][first:last].clone()


def _part(path: Path, begin: int, end: int, sampling_rate: int) -> Tensor | None:
    """`read_part`, or None if the whole file must be decoded: because of its format, or to say what is wrong."""
    with _as_asr_error(path):
        if _media_container(path) is not None:
            return None
        with _open(path) as file:
            rate, num_samples = checked_rate(int(file.samplerate)), file.num_samples
            if not 0 < num_samples < NO_LENGTH or is_cut_short(file):
                return None
            old, new, margin = block_sizes(rate, sampling_rate)
            num_around = -(-margin // old)  # blocks of resampling on each side
            first, last = max(0, begin // new - num_around), -(-end // new) + num_around
            start, stop = min(first * old, num_samples), min(last * old, num_samples)
            block = file.read_between(start, stop)
        if block is None or len(block) < stop - start or not (np.abs(block) <= LOUDEST).all():
            return None
        samples = resample(torch.from_numpy(to_mono(block, rate)), rate, sampling_rate)
        return samples[begin - first * new : end - first * new]


def open_audio(path: str | Path, sampling_rate: int, whole_seconds: float = 300.0) -> Tensor | AudioFile:
    """The samples of a file, see `read_audio`; or, if it is longer than `whole_seconds`, the file, to read in pieces.

    Raises:
        AsrError: as for `read_audio`; for longer files only errors at their beginning.
    """
    file = AudioFile(path, sampling_rate)
    pieces, head, num_samples = iter(file), list[Tensor](), 0
    for piece in pieces:
        head.append(piece)
        num_samples += len(piece)
        if num_samples > whole_seconds * sampling_rate:
            file.begun = itertools.chain(head, pieces)
            return file
    return _joined(head)


class AudioFile(os.PathLike[str]):
    """A file whose samples are decoded piece by piece, so that hours of audio take no more memory than minutes.

    Iteration yields pieces (L,) that together are the result of `read_audio`, and raises the same errors; an error at
    the end of a file is raised after its last piece.

    Args:
        path: the file.
        sampling_rate: of the pieces, in Hz.

    Attributes:
        begun: the pieces of the next iteration, if they have been opened already.
    """

    def __init__(self, path: str | Path, sampling_rate: int) -> None:
        self.path, self.sampling_rate = Path(path), sampling_rate
        self.begun: Iterator[Tensor] | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __iter__(self) -> Iterator[Tensor]:
        begun, self.begun = self.begun, None
        return self._pieces() if begun is None else begun

    def _pieces(self) -> Iterator[Tensor]:
        rate, blocks = _decode(self.path)
        stream = ResampleStream(rate, self.sampling_rate)
        for block in blocks:
            yield stream.push(torch.from_numpy(to_mono(block, rate)))
        if len(rest := stream.push(torch.zeros(0, dtype=torch.float32), is_last=True)):
            yield rest


def _joined(pieces: list[Tensor]) -> Tensor:
    """Joins pieces to one tensor (L,); frees each piece when it has been copied, which empties the list."""
    if len(pieces) == 1:
        return pieces.pop()
    whole = torch.empty(sum(map(len, pieces)), dtype=torch.float32)
    position = 0
    pieces.reverse()
    while pieces:
        piece = pieces.pop()
        whole[position : position + len(piece)] = piece
        position += len(piece)
    return whole


def inspect_audio(path: str | Path) -> tuple[int, int, int]:
    """Decodes a whole file: number of samples, sampling rate and number of channels; same errors as `read_audio`."""
    rate, blocks = _decode(Path(path))
    num_samples = num_channels = 0
    for block in blocks:
        num_samples, num_channels = num_samples + len(block), block.shape[1]
    return num_samples, rate, num_channels


def find_audio_files(folder: Path) -> list[Path]:
    """All audio files below a folder, sorted."""
    return [Path(name) for name in find_audio_names(folder)]


@contextlib.contextmanager
def _told_if_unreadable(path: str, is_top: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{path}: this folder cannot be read ({error.strerror})"
        if is_top:
            raise AsrError(f"{reason}.") from error
        _LOGGER.warning("%s; the recordings in it are left out.", reason)


def find_audio_names(folder: Path) -> list[str]:
    """The paths of all audio files below a folder, sorted by their parts.

    Links to folders are not followed. Unreadable folders are skipped with a warning.

    Raises:
        AsrError: the folder itself cannot be read.
    """
    # Many times faster than `rglob`, or than sorting Path objects.
    top = "" if folder == Path() else str(folder)
    found: list[str] = []
    pending = [(top, True)]
    while pending:
        path, is_folder = pending.pop()
        if not is_folder:
            found.append(path)
            continue
        entries = []
        with _told_if_unreadable(path, is_top=path == top), os.scandir(path or ".") as scan:
            for entry in scan:
                name = entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder or (
                    name.lower().endswith(AUDIO_SUFFIXES) and name[0] != "." and not _leads_to_folder(entry)
                ):
                    entries.append((name, is_folder))
        entries.sort(reverse=True)
        before = f"{path}/" if path and not path.endswith("/") else path
        pending += [(before + name, is_folder) for name, is_folder in entries]
    return found


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that leads to itself; reading it will raise an error


def to_int16(waveform: Tensor) -> Tensor:
    """Floating-point samples in [-1, 1] to int16 with clipping; lossless for 16-bit audio, in half the memory."""
    return (waveform * 32768.0).round_().clamp_(-32768, 32767).to(torch.int16)


def from_int16(samples: Tensor) -> Tensor:
    """Samples of type int16 to float32 in [-1, 1]."""
    return samples.float() / 32768.0


def _open(path: Path) -> SequentialFile:
    if path.is_dir():
        raise AsrError(f"{path}: this is a folder; name the audio files in it.")
    if not path.is_file():
        if path.exists():
            raise AsrError(
                f"{path}: this is a pipe or a device, not a file; write the audio to a file, or send it "
                "to 'asr transcribe --stream -'."
            )
        if _ADDRESS.match(str(path)):
            raise AsrError(f"{path}: audio is not fetched from addresses; download it, and name the file.")
        raise AsrError(f"{path}: there is no such audio file.")
    if path.stat().st_size == 0:
        raise AsrError(f"{path}: the audio file is empty (0 bytes); fetch it again.")
    try:
        with kept_complaints():
            return SequentialFile(os.fsencode(path))
    except Exception as error:  # soundfile and numpy raise more than they document
        raise AsrError(f"{path}: the audio cannot be decoded{_reason(error)}; it is damaged or not audio.") from error


def _media_container(path: Path) -> str | None:
    """FFmpeg's name of the container if libsndfile cannot open the file, or does not read it to its end."""
    if not path.is_file():
        return None
    container = container_of(path)
    if container is None and not may_be_mp3(path):
        return None  # without opening the file twice
    try:
        with _open(path) as file:
            return "mp3" if has_more_than_announced(file) else None
    except AsrError:
        if container is None:
            raise
        return container


_Block = np.ndarray[Any, Any]


def _decode(path: Path) -> tuple[int, Iterator[_Block]]:
    """Opens a file: its sampling rate, and blocks (L, channels) float32, decoded and checked as they are taken."""
    with _as_asr_error(path):
        if (container := _media_container(path)) is not None:
            rate, blocks = open_media(path, container)
            return checked_rate(rate), _checked(path, _gathered(blocks, _BLOCK_VALUES // 4), -1)
        file = _open(path)
        rate = checked_rate(int(file.samplerate))
        # Of an MP3, libsndfile's length may be an estimate.
        announced = -1 if file.format == "MP3" else file.frames
        return rate, _checked(path, _file_blocks(path, file), announced, is_cut_short(file))


def _file_blocks(path: Path, file: SequentialFile) -> Iterator[_Block]:
    num_samples = 0
    with file:
        for block in file.blocks_to_end(max(1, _BLOCK_VALUES // file.channels)):
            num_samples += len(block)
            yield block
    if file.frames == num_samples == 0:
        for piece in _unannounced(path, int(file.samplerate)):
            yield piece.numpy()[:, None]


def _gathered(blocks: Iterator[_Block], num_samples: int) -> Iterator[_Block]:
    """Blocks of at least `num_samples`: FFmpeg's have a few hundred, which would make resampling many times slower."""
    held, num_held = list[_Block](), 0
    try:
        for block in blocks:
            held.append(block)
            num_held += len(block)
            if num_held >= num_samples:
                yield np.concatenate(held)
                held, num_held = [], 0
    except AsrError:
        yield from held  # what came before the damage
        raise
    yield from held


def _checked(path: Path, blocks: Iterator[_Block], announced: int, cut_short: bool = False) -> Iterator[_Block]:
    """Checks blocks; raises the errors of `read_audio`, after the last block if they are only known at the end."""
    num_samples = num_unsound = 0
    with _as_asr_error(path):
        for block in blocks:
            num_samples += len(block)
            if 4 * num_samples > _MAX_DECODED_BYTES:
                raise AsrError(
                    f"{path}: the audio has more than {_MAX_DECODED_BYTES // 4} samples; cut it into pieces, or use "
                    "--stream."
                )
            is_sound = np.abs(block) <= LOUDEST
            if not is_sound.all():
                num_unsound += int((~is_sound).any(axis=1).sum())
            if not (num_unsound or cut_short):
                yield block
    if num_samples == 0:
        raise _without_samples(path)
    if cut_short or (0 < announced < NO_LENGTH and num_samples < announced):
        raise AsrError(
            f"{path}: the audio is cut short: its header announces more than the {num_samples} samples there are."
        )
    if num_unsound:
        raise AsrError(
            f"{path}: {num_unsound} of {num_samples} samples are NaN, infinite or beyond 10^9; create the file again."
        )


def _without_samples(path: Path) -> AsrError:
    return AsrError(f"{path}: the audio has no samples (zero length).")


@contextlib.contextmanager
def _as_asr_error(path: Path) -> Iterator[None]:
    """Turns any error of decoding into an `AsrError` with one sentence."""
    try:
        yield
    except AsrError as error:
        raise (
            error if str(error).startswith(str(path)) else AsrError(f"{path}: the header is damaged: {error}")
        ) from error
    except PermissionError as error:
        raise AsrError(f"{path}: you may not read this audio file ({error.strerror}).") from error
    except MemoryError as error:
        raise AsrError(f"{path}: there is not enough memory for this audio; cut it into pieces.") from error
    except Exception as error:
        raise AsrError(f"{path}: the audio cannot be decoded{_reason(error)}; it is damaged or not audio.") from error


def _unannounced(path: Path, size: int) -> Iterator[Tensor]:
    """The samples, `size` in a piece, of a WAV file that announces no length, since it was written to a pipe."""
    with path.open("rb") as stream:
        if stream.read(4) != b"RIFF":
            return
        stream.seek(0)
        pcm, length = read_wav_header(stream, str(path))
        begin, end = stream.tell(), stream.seek(0, os.SEEK_END)
        stream.seek(begin)
        name, size = struct.unpack("<4sI", stream.read(8).ljust(8, b"\0"))
        if length is not None or (name.isalnum() and begin + 8 + size + size % 2 == end):
            return  # there are no samples; what follows is another chunk
        stream.seek(begin)
        yield from samples_of(stream, pcm, None, size)


def _reason(error: Exception) -> str:
    """libsndfile's message in parentheses, unless it is wrong or adds nothing."""
    words = str(error).rsplit(": ", 1)[-1].strip().rstrip(".")
    return "" if not words or "does not exist" in words or "internal error" in words else f" ({words})"


def file_pieces(path: str | Path, seconds: float) -> tuple[int, Iterator[Tensor]]:
    """Reads a file piece by piece.

    Returns:
        the sampling rate, and pieces (L,) float32 of about `seconds`, with channels averaged as by `read_audio`.

    Raises:
        AsrError: the file is missing, has no samples or cannot be decoded; during iteration, if it is damaged further
            on.
    """
    path = Path(path)
    rate, pieces = _pieces_of(path, seconds)
    first = next(pieces, None)
    if first is None:
        raise _without_samples(path)
    return rate, itertools.chain([first], pieces)


def _pieces_of(path: Path, seconds: float) -> tuple[int, Iterator[Tensor]]:
    """`file_pieces`, with no pieces for a file without samples."""
    if (container := _media_container(path)) is not None:
        rate, blocks = open_media(path, container)
        pieces = _gathered(blocks, int(seconds * checked_rate(rate)))
        return rate, (torch.from_numpy(to_mono(piece, rate)) for piece in pieces)
    file = _open(path)
    rate = int(file.samplerate)
    if file.format in ("WAV", "WAVEX") and file.frames == 0:
        file.close()
        return rate, _unannounced(path, max(1, int(seconds * rate)))
    return rate, _decoded(path, file, max(1, min(int(seconds * rate), _BLOCK_VALUES // file.channels)))


def _decoded(path: Path, file: SequentialFile, size: int) -> Iterator[Tensor]:
    with file:
        if is_cut_short(file):
            _LOGGER.warning("%s: the audio is cut short: its header announces more than there is.", path)
        blocks = file.blocks_to_end(size)
        while True:
            try:
                samples = next(blocks, None)
            except Exception as error:
                raise AsrError(f"{path}: the audio cannot be decoded to its end; it is damaged.") from error
            if samples is None:
                return
            yield torch.from_numpy(to_mono(samples, int(file.samplerate)))


old_paths.offer(__name__)
