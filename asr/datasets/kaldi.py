"""Kaldi's data folders: `wav.scp`, `segments`, `text` and `utt2spk`. No command in them is run.

The audio of a recording is a file. `wav.scp` may also contain pipes that only decode a file, such as
`flac -c -d -s a.flac |`; the file is then read directly. Other pipes are refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from asr.audio.io import PartReader, inspect_audio, read_audio
from asr.errors import AsrError
from asr.text.documents import number_or_none, read_text

if TYPE_CHECKING:
    from asr.datasets.corpora.base import Utterance as TranscribedUtterance


@dataclass(frozen=True)
class Utterance:
    """A recording or a part of one.

    Args:
        utterance_id: its name.
        audio: the file.
        begin, end: in seconds; the end is None for the end of the file.
    """

    utterance_id: str
    audio: Path
    begin: float = 0.0
    end: float | None = None


# Programs that only decode -> the options they may have, with the number of values of each. Other options, such as
# selecting a channel or changing the tempo, would have no effect.
_DECODERS: dict[str, dict[str, int]] = {
    "cat": {},
    "flac": dict.fromkeys("-c -d -s -cds -dcs -dc -cd --silent --decode --stdout".split(), 0),
    "sph2pipe": {"-f": 1, "-p": 0},
}


def read_table(path: str | Path) -> dict[str, str]:
    """The lines `key value` of a file, by key; blank lines are ignored.

    Raises:
        AsrError: the file cannot be read, or a key occurs twice.
    """
    table: dict[str, str] = {}
    for number, line in enumerate(read_text(path, "Kaldi file").split("\n"), start=1):
        key, _, value = line.strip().partition(" ")
        if "\t" in key:
            key, _, value = line.strip().partition("\t")
        if not key:
            continue
        if key in table:
            raise AsrError(f"{path}:{number}: {key!r} occurs twice; keep one of the two lines.")
        table[key] = value.strip()
    return table


def read_wav_scp(path: str | Path) -> list[Utterance]:
    """The utterances of a `wav.scp`: those of the file `segments` next to it, if there is one, else whole recordings.

    Relative names of audio files start from the current folder, as in Kaldi; they become absolute.

    Raises:
        AsrError: a file cannot be read, or has a malformed line or a pipe that does more than decode.
    """
    path = Path(path)
    audio = {}
    for recording, value in read_table(path).items():
        audio[recording] = _audio_file(value, f"{path}: {recording}")
    if not audio:
        raise AsrError(f"{path}: there are no recordings in this file.")
    segments = path.parent / "segments"
    if not segments.is_file():
        return [Utterance(recording, file) for recording, file in audio.items()]
    utterances = []
    for utterance, value in read_table(segments).items():
        fields = value.split()
        begin, end = (number_or_none(field) for field in (*fields[1:3], "", "")[:2])
        if len(fields) != 3 or begin is None or begin < 0 or end is None or (end != -1 and end <= begin):
            raise AsrError(
                f"{segments}: {utterance}: expected 'utterance recording begin end' in seconds, without a channel."
            )
        if fields[0] not in audio:
            raise AsrError(f"{segments}: {utterance}: {path.name} does not have the recording {fields[0]!r}.")
        utterances.append(Utterance(utterance, audio[fields[0]], begin, None if end == -1 else end))
    return utterances


def _audio_file(value: str, where: str) -> Path:
    if not value.endswith("|"):
        if not value or "|" in value:
            raise AsrError(f"{where}: expected the name of an audio file.")
        return Path(value).absolute()
    try:
        program, *arguments = shlex.split(value[:-1])
    except ValueError:
        program, arguments = "", []
    options = _DECODERS.get(Path(program).name, {})
    files = []
    while arguments:
        argument = arguments.pop(0)
        if argument in options:
            del arguments[: options[argument]]
        else:
            files.append(argument)
    if Path(program).name not in _DECODERS or len(files) != 1 or files[0].startswith("-") or "|" in files[0]:
        raise AsrError(
            f"{where}: this program runs no commands; the pipe {value!r} is not one of those that only decode one file "
            f"({', '.join(_DECODERS)}), which it can replace. Write the audio to files first."
        )
    return Path(files[0]).absolute()


def utterance_reader() -> Callable[[Utterance | TranscribedUtterance, int], Tensor]:
    """A function that reads an utterance (L,) at a sampling rate; several threads may call it.

    It raises `AsrError` if the audio cannot be read, or ends before the utterance begins.
    """
    parts = PartReader()

    def read(utterance: Utterance | TranscribedUtterance, sampling_rate: int) -> Tensor:
        if utterance.begin == 0.0 and utterance.end is None:
            return read_audio(utterance.audio, sampling_rate)
        samples = parts.read(utterance.audio, utterance.begin, utterance.end, sampling_rate)
        if not len(samples):
            num_samples, rate, _ = inspect_audio(utterance.audio)
            raise AsrError(
                f"{utterance.utterance_id}: it begins at {utterance.begin:g} s, but {utterance.audio} has only "
                f"{num_samples / rate:g} s."
            )
        return samples

    return read
