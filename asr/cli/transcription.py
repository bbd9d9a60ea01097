"""Many recordings through a recognizer: what cannot be read is reported, the others are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from asr.data.audio import AUDIO_SUFFIXES, find_audio_files
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.result import RecognitionResult

_Name = TypeVar("_Name", Path, str)


@dataclass(frozen=True)
class Outcome(Generic[_Name]):
    """One of `result` and `error` is there.

    Args:
        name: the recording: its file, or its id.
        result: its words.
        error: why there are none.
    """

    name: _Name
    result: RecognitionResult | None = None
    error: str = ""


def audio_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files, and all audio files below the folders, each once; a path that does not exist stays, to be reported.

    Raises:
        AsrError: a folder holds no audio.
    """
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            found = find_audio_files(path)
            if not found:
                raise AsrError(f"{path}: the folder holds no audio files ({', '.join(AUDIO_SUFFIXES)}).")
            files.update(dict.fromkeys(found))
        else:
            files[path] = None
    return list(files)


def transcribe(
    recognizer: Recognizer,
    names: Sequence[_Name],
    read: Callable[[_Name, int], Tensor],
    batch_seconds: float = 60.0,
) -> Iterator[Outcome[_Name]]:
    """Recognizes recordings in order, several at a time; yields each as soon as it is done.

    Args:
        recognizer: the recognizer.
        names: of the recordings.
        read: a recording's samples (L,) by its name and a sampling rate; an `AsrError` of it is the recording's.
        batch_seconds: how much audio is read for each worker before it is recognized together.
    """
    # Several batches for each worker, or there is nothing to overlap.
    batch_seconds *= 1 + 4 * recognizer.num_workers
    waiting: list[tuple[_Name, Tensor | str]] = []
    num_samples = 0
    for name in names:
        try:
            waveform = read(name, recognizer.sampling_rate)
        except AsrError as error:
            waiting.append((name, str(error)))
            continue
        waiting.append((name, waveform))
        num_samples += len(waveform)
        if num_samples >= batch_seconds * recognizer.sampling_rate:
            yield from _recognized(recognizer, waiting)
            waiting, num_samples = [], 0
    yield from _recognized(recognizer, waiting)


def _recognized(recognizer: Recognizer, waiting: Sequence[tuple[_Name, Tensor | str]]) -> Iterator[Outcome[_Name]]:
    waveforms = [content for _, content in waiting if not isinstance(content, str)]
    results = iter(_all_or_each(recognizer, waveforms))
    for name, content in waiting:
        if isinstance(content, str):
            yield Outcome(name, error=content)
            continue
        result = next(results)
        if isinstance(result, AsrError):
            yield Outcome(name, error=f"{name}: {result}")
        else:
            yield Outcome(name, result)


def _all_or_each(recognizer: Recognizer, waveforms: list[Tensor]) -> list[RecognitionResult | AsrError]:
    """All together; should one of them be refused, each by itself, so that the others are done."""
    if not waveforms:
        return []
    try:
        return list(recognizer(waveforms))
    except AsrError as error:
        if len(waveforms) == 1:
            return [error]
    return [result for waveform in waveforms for result in _all_or_each(recognizer, [waveform])]
