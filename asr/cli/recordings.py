"""The recordings that a command line names: audio files, folders of them, Kaldi's wav.scp, and lhotse cuts."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from asr.audio.io import AUDIO_SUFFIXES, AudioFile, PartReader, find_audio_names, open_audio
from asr.errors import AsrError


def audio_files(paths: Sequence[str | Path]) -> list[Path]:
    """The given files, and all audio files below the given folders, without duplicates.

    A path that does not exist stays in the list, so that it is reported with the other failures.

    Raises:
        AsrError: a folder has no audio files in it.
    """
    found = Recordings()
    for path in paths:
        _add_audio(found, str(path))
    return list(dict.fromkeys(map(Path, found.names)))


@dataclass
class Recordings:
    """Names of recordings in order, and how to read them.

    Args:
        names: paths of audio files, ids of utterances and cuts; each once.
        stems: a short name for each, which need not be unique.
        inputs: the files that these come from, which no output may overwrite.
    """

    names: list[str] = field(default_factory=list)
    stems: list[str] = field(default_factory=list)
    inputs: list[str | Path] = field(default_factory=list)
    _readers: dict[str, Callable[[int], Tensor]] = field(default_factory=dict)

    def read(self, name: str, sampling_rate: int) -> Tensor | AudioFile:
        """The samples (L,) of a recording, or a long file of it; raises `AsrError` if it cannot be read."""
        reader = self._readers.get(name)
        return open_audio(name, sampling_rate) if reader is None else reader(sampling_rate)

    def stem_of(self) -> dict[str, str]:
        """Recording -> its short name."""
        return dict(zip(self.names, self.stems, strict=True))

    def is_listed(self, name: str) -> bool:
        """Whether the name is an id from a list, not the path of a file."""
        return name in self._readers

    def add(self, name: str, stem: str, reader: Callable[[int], Tensor] | None = None) -> None:
        """Adds a recording; an audio file needs no reader."""
        self.names.append(name)
        self.stems.append(stem)
        if reader is not None:
            self._readers[name] = reader


_KALDI_SUFFIX, _CUT_SUFFIXES = ".scp", (".jsonl", ".jsonl.gz")
LIST_SUFFIXES = (_KALDI_SUFFIX, *_CUT_SUFFIXES)
"""Of files that list recordings."""


def recordings(arguments: Sequence[str]) -> Recordings:
    """The recordings that the arguments of a command name.

    Args:
        arguments: audio files, folders, `*.scp` files of Kaldi, and `*.jsonl` or `*.jsonl.gz` manifests of lhotse cuts.

    Raises:
        AsrError: a folder has no audio in it, or a list cannot be read, names no recording or one twice.
    """
    found = Recordings()
    for argument in arguments:
        if argument.endswith(_KALDI_SUFFIX):
            _add_kaldi(found, argument)
        elif argument.endswith(_CUT_SUFFIXES):
            _add_cuts(found, argument)
        else:
            _add_audio(found, argument)
    if not found.names:
        raise AsrError(f"{' '.join(arguments)}: there are no recordings in this list.")
    repeated = [name for name, num in Counter(found.names).items() if num > 1]
    if listed := list(filter(found.is_listed, repeated)):
        raise AsrError(f"{' '.join(arguments)}: the recording {listed[0]!r} is listed twice; give each list once.")
    if repeated:  # the same file under the same path counts once
        stems = found.stem_of()
        found.names, found.stems = list(stems), list(stems.values())
    return found


def _add_audio(found: Recordings, argument: str) -> None:
    path = Path(argument)
    if not path.is_dir():
        found.inputs.append(path)
        found.add(str(path), path.stem)
        return
    names = find_audio_names(path)
    if not names:
        raise AsrError(f"{path}: there are no audio files in this folder ({', '.join(AUDIO_SUFFIXES)}).")
    found.inputs += names
    found.names += names
    found.stems += [name.rpartition("/")[2].rpartition(".")[0] for name in names]


def _add_kaldi(found: Recordings, path: str) -> None:
    from asr.datasets.kaldi import Utterance, read_wav_scp, utterance_reader

    read_utterance = utterance_reader()

    def read(utterance: Utterance, sampling_rate: int) -> Tensor:
        try:
            return read_utterance(utterance, sampling_rate)
        except AsrError as error:
            raise AsrError(f"{path}: {error}") from error

    utterances = read_wav_scp(path)
    found.inputs += [Path(path), *dict.fromkeys(utterance.audio for utterance in utterances)]
    for utterance in utterances:
        found.add(utterance.utterance_id, utterance.utterance_id, partial(read, utterance))


def _add_cuts(found: Recordings, path: str) -> None:
    if importlib.util.find_spec("lhotse") is None:
        raise AsrError(f"{path}: a manifest of cuts needs lhotse; pip install 'onepass-asr[train]'.")
    from asr.datasets.cuts import cut_waveform, read_cuts

    parts = PartReader()
    found.inputs.append(Path(path))
    for cut in read_cuts([path]):
        found.add(cut.id, cut.id, partial(cut_waveform, cut, parts=parts))


@dataclass(frozen=True)
class Shard:
    """One of several jobs that share the recordings: job `index`, from 0, of `number`."""

    index: int = 0
    number: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads `I/N`, from 1/N to N/N.

        Raises:
            AsrError: the text has another form.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise AsrError(f"--shard {text}: give the number of this job and the number of jobs, such as 1/8 or 8/8.")
        return cls(int(match[1]) - 1, int(match[2]))

    def of(self, names: Sequence[str]) -> list[str]:
        """The names that belong to this job."""
        return list(names[self.index :: self.number])
