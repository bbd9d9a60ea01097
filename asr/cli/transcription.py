"""Many audio files through a recognizer: what cannot be read is reported, the others are done."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from asr.data.audio import AUDIO_SUFFIXES, find_audio_files, read_audio
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.result import RecognitionResult


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One of `result` and `error` is there.

    Args:
        audio: the file, as the user named it or below the folder that the user named.
        result: its words.
        error: why there are none.
    """

    audio: Path
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


def transcribe(recognizer: Recognizer, files: Sequence[Path], batch_seconds: float = 60.0) -> Iterator[Outcome]:
    """Recognizes files in order, several at a time; yields each as soon as it is done.

    Args:
        recognizer: the recognizer.
        files: audio files.
        batch_seconds: how much audio is read for each worker before it is recognized together.
    """
    # Several batches for each worker, or there is nothing to overlap.
    batch_seconds *= 1 + 4 * recognizer.num_workers
    waiting: list[tuple[Path, Tensor | str]] = []
    num_samples = 0
    for path in files:
        try:
            waveform = read_audio(path, recognizer.sampling_rate)
        except AsrError as error:
            waiting.append((path, str(error)))
            continue
        waiting.append((path, waveform))
        num_samples += len(waveform)
        if num_samples >= batch_seconds * recognizer.sampling_rate:
            yield from _recognized(recognizer, waiting)
            waiting, num_samples = [], 0
    yield from _recognized(recognizer, waiting)


def _recognized(recognizer: Recognizer, waiting: Sequence[tuple[Path, Tensor | str]]) -> Iterator[Outcome]:
    waveforms = [content for _, content in waiting if not isinstance(content, str)]
    results = iter(_all_or_each(recognizer, waveforms))
    for path, content in waiting:
        if isinstance(content, str):
            yield Outcome(path, error=content)
            continue
        result = next(results)
        if isinstance(result, AsrError):
            yield Outcome(path, error=f"{path}: {result}")
        else:
            yield Outcome(path, result)


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
