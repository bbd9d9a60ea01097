"""Recordings as batches of segments: they are cut at pauses, and segments of similar length are batched together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from asr.audio.waveform import (
    as_recording,
    as_recordings,
    at_rate,
    batches_of_similar_length,
    segments_at_pauses,
    split_at_pauses,
)

if TYPE_CHECKING:
    from asr.audio.io import AudioFile

# So many batches are read from files before they are recognized: enough to find segments of similar length.
_BATCHES_AHEAD = 6


class Segment(NamedTuple):
    """Samples (L,) of a recording from sample `begin` on; `is_read` if from a file, not from the caller's memory."""

    recording_idx: int
    begin: int
    samples: Tensor
    is_read: bool


def open_recordings(
    audio: Any, given_rate: int, sampling_rate: int, num_samples: Tensor | Sequence[int] | None = None
) -> list[Tensor | AudioFile]:
    """Recordings at `sampling_rate`, (L,) each; files are not read yet.

    Args:
        audio: a path, arrays, or a list of both; see `asr.recognizer.Recognizer.forward`.
        given_rate: sampling rate of the arrays, in Hz.
        sampling_rate: rate to which recordings are resampled, in Hz.
        num_samples: (N,) length of each recording of a padded batch.

    Raises:
        AsrError: an array has another shape or type, or samples that are not finite.
    """
    if isinstance(audio, (str, PathLike)):
        audio = [audio]
    entries = audio if isinstance(audio, (list, tuple)) else []
    is_file = [isinstance(entry, (str, PathLike)) for entry in entries]
    if not any(is_file):
        return [at_rate(row, given_rate, sampling_rate) for row in as_recordings(audio, num_samples)]
    from asr.audio.io import AudioFile, read_audio  # needs soundfile, which arrays do not

    if num_samples is not None:
        read = [
            read_audio(Path(entry), sampling_rate) if named else entry
            for entry, named in zip(entries, is_file, strict=True)
        ]
        rows = zip(as_recordings(read, num_samples), is_file, strict=True)
        return [row if named else at_rate(row, given_rate, sampling_rate) for row, named in rows]
    recordings: list[Tensor | AudioFile] = []
    for index, entry in enumerate(entries):
        if is_file[index]:
            recordings.append(entry if isinstance(entry, AudioFile) else AudioFile(Path(entry), sampling_rate))
        else:
            recordings.append(at_rate(as_recording(entry, f"recording {index}"), given_rate, sampling_rate))
    return recordings


def segment_batches(
    recordings: Sequence[Tensor | AudioFile], sampling_rate: int, max_segment_seconds: float, batch_seconds: float
) -> Iterator[list[Segment]]:
    """Batches of segments to recognize together; files are read only as far as needed.

    This call raises errors at the beginning of a file; later errors are raised while batches are taken.

    Args:
        recordings: as returned by `open_recordings`.
        sampling_rate: of the recordings, in Hz.
        max_segment_seconds: longer recordings are cut at pauses.
        batch_seconds: the maximum amount of audio in a batch, padding included.

    Raises:
        AsrError: a file cannot be read, or a recording is empty.
    """
    max_padded = int(batch_seconds * sampling_rate)
    windows = _windows(_segments(recordings, sampling_rate, max_segment_seconds), _BATCHES_AHEAD * max_padded)
    first = next(windows, [])

    def batches() -> Iterator[list[Segment]]:
        for window in itertools.chain([first], windows):
            lengths = [len(segment.samples) for segment in window]
            ready = [[window[i] for i in batch] for batch in batches_of_similar_length(lengths, max_padded)]
            window.clear()  # so that the memory of each batch is freed when it is done
            while ready:
                yield ready.pop(0)

    return batches()


def _segments(
    recordings: Sequence[Tensor | AudioFile], sampling_rate: int, max_segment_seconds: float
) -> Iterator[Segment]:
    for index, recording in enumerate(recordings):
        if isinstance(recording, Tensor):
            for begin, end in split_at_pauses(recording, sampling_rate, max_segment_seconds):
                yield Segment(index, begin, recording[begin:end], is_read=False)
        else:
            for begin, samples in segments_at_pauses(recording, sampling_rate, max_segment_seconds):
                yield Segment(index, begin, samples, is_read=True)


def _windows(segments: Iterator[Segment], max_read: int) -> Iterator[list[Segment]]:
    """Groups of segments in which similar lengths are batched: all segments of arrays, `max_read` samples of files."""
    window: list[Segment] = []
    num_read = 0
    for segment in segments:
        window.append(segment)
        num_read += len(segment.samples) if segment.is_read else 0
        if num_read >= max_read:
            yield window
            window, num_read = [], 0
    if window:
        yield window
