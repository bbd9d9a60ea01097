"""From recordings to batches of segments.

Long recordings are cut at pauses, and segments of similar length are batched together. Files are read only as far as
needed.

Shapes: N recordings, L samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from asr import old_paths
from asr.audio.resample import checked_rate, resample
from asr.audio.samples import as_recording, as_recordings
from asr.errors import AsrError

if TYPE_CHECKING:
    from asr.audio.io import AudioFile

# The quietest stretch of this length is where a long recording is cut.
_PAUSE_SECONDS = 0.2
# A level is the variance of so many seconds. Levels differ by less than this factor (2.4 dB) in 25 s of white noise at
# 8 kHz (2.1 dB), and by more in speech, even below noise of three times its power (2.8 dB).
_LEVEL_SECONDS, _STEADY, _FEWEST_LEVELS = 0.1, 1.75, 10

# Batches that are read from files before they are recognized: enough to find segments of similar length.
_BATCHES_AHEAD = 6


def at_rate(waveform: Tensor, old_rate: int, new_rate: int) -> Tensor:
    """Resamples (L,) to another sampling rate.

    Raises:
        AsrError: as `checked_rate`.
    """
    return waveform if old_rate == new_rate else resample(waveform, checked_rate(old_rate), new_rate)


def split_at_pauses(waveform: Tensor, sampling_rate: int, max_seconds: float) -> list[tuple[int, int]]:
    """Cuts a long recording where it is quietest, so that no segment is longer than `max_seconds`.

    Each cut lies in the second half of the longest segment allowed, in the middle of the 0.2 s with the least variance.

    Args:
        waveform: (L,).
        sampling_rate: in Hz.
        max_seconds: at least 1.

    Returns:
        (begin, end) of each segment in samples; together they cover the recording.

    Raises:
        AsrError: `max_seconds` is below 1.
    """
    longest, window = _segment_sizes(sampling_rate, max_seconds)
    segments = []
    begin, num_samples = 0, waveform.numel()
    while num_samples - begin > longest:
        cut = begin + _quietest(waveform[begin : begin + longest], window)
        segments.append((begin, cut))
        begin = cut
    return [*segments, (begin, num_samples)]


def segments_at_pauses(
    pieces: Iterable[Tensor], sampling_rate: int, max_seconds: float
) -> Iterator[tuple[int, Tensor]]:
    """`split_at_pauses` of a recording that comes in pieces (L,): the first sample of each segment, and the segment.

    Raises:
        AsrError: as `split_at_pauses`, and what the pieces raise.
    """
    longest, window = _segment_sizes(sampling_rate, max_seconds)
    begin, held = 0, torch.zeros(0, dtype=torch.float32)
    for piece in pieces:
        held = torch.cat([held, piece])
        while len(held) > longest:
            cut = _quietest(held[:longest], window)
            yield begin, held[:cut].clone()  # a view would keep the whole piece in memory
            begin, held = begin + cut, held[cut:]
    yield begin, held


def _segment_sizes(sampling_rate: int, max_seconds: float) -> tuple[int, int]:
    """The longest segment and the window of a pause, in samples."""
    if max_seconds < 1.0:
        raise AsrError(f"segments of at most {max_seconds} s are too short to recognize; allow 1 second or more.")
    return int(max_seconds * sampling_rate), int(_PAUSE_SECONDS * sampling_rate)


def _quietest(longest: Tensor, window: int) -> int:
    """The sample at which the longest allowed segment (L,) is cut."""
    first = len(longest) // 2
    # Only this half is summed: in double precision, the sums over hours of audio would take a gigabyte.
    half = longest[first:].double()
    # Without each window's mean: in a recording with an offset, the sum of its samples would decide.
    energy = _window_sums(half.square(), window) - _window_sums(half, window).square() / window
    return first + int(energy.argmin()) + window // 2


def _window_sums(values: Tensor, window: int) -> Tensor:
    """The sums over the windows of values (L,), (L - window,)."""
    cumulative = torch.cat([values.new_zeros(1), values.cumsum(0)])
    return cumulative[window:-1] - cumulative[: -window - 1]


def is_steady(waveform: Tensor, sampling_rate: int) -> bool:
    """Whether nobody speaks in samples (L,), because their level never changes: digital silence, steady noise, or hum.

    In speech, even below noise of three times its power, some tenth of a second is far louder than another. Samples
    that are not all the same are no silence if there is less than a second of them.
    """
    window = max(2, int(_LEVEL_SECONDS * sampling_rate))
    if len(waveform) < _FEWEST_LEVELS * window:
        return bool((waveform == waveform[0]).all())
    level = waveform.unfold(0, window, window // 2).var(1, unbiased=False)
    return bool(level.max() <= _STEADY * level.min())


def batches_of_similar_length(lengths: Sequence[int], max_padded: float) -> list[list[int]]:
    """Groups indices of similar lengths so that the padded size of each group stays within `max_padded`.

    A recording longer than that gets a group of its own.
    """
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_padded:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


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
        return [at_rate(row, given_rate, sampling_rate) for row in as_recordings(audio, num_samples, given_rate)]
    from asr.audio.io import AudioFile, read_audio  # needs soundfile, which arrays do not

    if num_samples is not None:
        read = [
            read_audio(Path(entry), sampling_rate) if named else entry
            for entry, named in zip(entries, is_file, strict=True)
        ]
        rows = zip(as_recordings(read, num_samples, given_rate), is_file, strict=True)
        return [row if named else at_rate(row, given_rate, sampling_rate) for row, named in rows]
    recordings: list[Tensor | AudioFile] = []
    for index, entry in enumerate(entries):
        if is_file[index]:
            recordings.append(entry if isinstance(entry, AudioFile) else AudioFile(Path(entry), sampling_rate))
        else:
            row = as_recording(entry, f"recording {index}", given_rate)
            recordings.append(at_rate(row, given_rate, sampling_rate))
    return recordings


def segment_batches(
    recordings: Sequence[Tensor | AudioFile],
    sampling_rate: int,
    max_segment_seconds: float,
    batch_seconds: float,
    sessions: Sequence[Hashable] | None = None,
) -> Iterator[list[Segment]]:
    """Batches of segments to recognize together; files are read only as far as needed.

    This call raises errors at the beginning of a file; later errors are raised while batches are taken.

    Args:
        recordings: as returned by `open_recordings`.
        sampling_rate: of the recordings, in Hz.
        max_segment_seconds: longer recordings are cut at pauses.
        batch_seconds: the maximum amount of audio in a batch, padding included.
        sessions: the session of each recording, if the segments of a session must be recognized in order: no batch has
            two of them, so batches of few sessions are small. None lets batches have any segments.

    Raises:
        AsrError: a file cannot be read, or a recording is empty.
    """
    max_padded = int(batch_seconds * sampling_rate)
    max_read = _BATCHES_AHEAD * max_padded
    if sessions is None:
        windows = _windows(_segments(enumerate(recordings), sampling_rate, max_segment_seconds), max_read)
    else:
        parts: dict[Hashable, list[tuple[int, Tensor | AudioFile]]] = {}
        for index, (session, recording) in enumerate(zip(sessions, recordings, strict=True)):
            parts.setdefault(session, []).append((index, recording))
        in_order = [_segments(part, sampling_rate, max_segment_seconds) for part in parts.values()]
        windows = _turns(in_order, max(1, int(max_read / (max_segment_seconds * sampling_rate))))
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
    recordings: Iterable[tuple[int, Tensor | AudioFile]], sampling_rate: int, max_segment_seconds: float
) -> Iterator[Segment]:
    for index, recording in recordings:
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


def _turns(sessions: Sequence[Iterator[Segment]], most: int) -> Iterator[list[Segment]]:
    """The first segments of `most` sessions, then their second ones, and so on; then the same of the next sessions."""
    for begin in range(0, len(sessions), most):
        for turn in itertools.zip_longest(*sessions[begin : begin + most]):
            yield [segment for segment in turn if segment is not None]


old_paths.offer(__name__)
