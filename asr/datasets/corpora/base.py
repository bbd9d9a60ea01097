"""The interface of corpora: utterances of a part, and what was skipped and why."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from asr.audio.io import AUDIO_SUFFIXES, find_audio_files
from asr.errors import AsrError
from asr.text.documents import read_text


@dataclass(frozen=True)
class Utterance:
    """A transcribed recording, or a part of one from `begin` to `end` seconds; None is the end of the file."""

    utterance_id: str
    audio: Path
    text: str
    speaker: str
    begin: float = 0.0
    end: float | None = None
    language: str | None = "English"


@dataclass(frozen=True)
class SkippedItem:
    """A file or utterance that was skipped, and the reason in one sentence."""

    item: str
    reason: str


@dataclass(frozen=True)
class CorpusPart:
    """The utterances of a part of a corpus, before any audio is opened."""

    utterances: list[Utterance]
    skipped: list[SkippedItem]


class Corpus(Protocol):
    """A corpus, in any of its known folder layouts."""

    @property
    def name(self) -> str:
        """The name on the command line."""

    def parts_in(self, corpus_dir: Path) -> list[str]:
        """The parts that are in the folder.

        Raises:
            AsrError: the folder is missing or empty, or has no part of this corpus in it.
        """

    def list_part(self, corpus_dir: Path, part: str) -> CorpusPart:
        """The utterances of a part, sorted by id.

        Raises:
            AsrError: the part is missing or has no utterances.
        """

    def lexicon(self, corpus_dir: Path) -> Path | None:
        """The lexicon that comes with the corpus, or None."""

    def download(self, corpus_dir: Path, parts: Sequence[str]) -> None:
        """Downloads those parts that are not in the folder.

        Raises:
            AsrError: the corpus cannot be downloaded.
        """


def require_folder(corpus_dir: Path, corpus_name: str) -> None:
    """Checks that a folder exists and is not empty.

    Raises:
        AsrError: it does not exist, or is empty.
    """
    if not corpus_dir.is_dir():
        raise AsrError(f"{corpus_dir}: there is no such folder; give --corpus the folder of {corpus_name}.")
    if next(corpus_dir.iterdir(), None) is None:
        raise AsrError(f"{corpus_dir}: the folder is empty; it should be that of {corpus_name}.")


def audio_by_stem(folder: Path) -> dict[str, Path]:
    """All audio files below a folder by stem; of several with the same stem the lossless one (FLAC first) wins."""
    rank = {suffix: position for position, suffix in enumerate(AUDIO_SUFFIXES)}
    found: dict[str, Path] = {}
    for path in find_audio_files(folder):
        other = found.get(path.stem)
        if other is None or rank[path.suffix.lower()] < rank[other.suffix.lower()]:
            found[path.stem] = path
    return found


def read_transcript(path: Path) -> list[str]:
    """The lines of a transcript file without blank ones.

    Raises:
        AsrError: the file cannot be read or is not UTF-8.
    """
    return [line.rstrip("\r") for line in read_text(path, "transcript").split("\n") if line.strip()]


def join(
    texts: dict[str, tuple[str, str]], audio: dict[str, Path], skipped: Sequence[SkippedItem], where: Path
) -> CorpusPart:
    """Matches transcripts and audio files by utterance id; those without a match are skipped.

    Args:
        texts: utterance id -> (speaker, normalized text).
        audio: utterance id -> file.
        skipped: what was skipped before.
        where: the folder, for error messages.

    Raises:
        AsrError: nothing matches.
    """
    left_out = list(skipped)
    utterances = []
    known = {item.item for item in skipped}
    for utterance_id in sorted(texts):
        speaker, text = texts[utterance_id]
        if utterance_id not in audio:
            left_out.append(SkippedItem(utterance_id, "there is a transcript but no audio file"))
        elif not text:
            left_out.append(SkippedItem(utterance_id, "the transcript is empty"))
        else:
            utterances.append(Utterance(utterance_id, audio[utterance_id], text, speaker))
    for utterance_id in sorted(audio.keys() - texts.keys() - known):
        left_out.append(SkippedItem(utterance_id, f"there is an audio file ({audio[utterance_id]}) but no transcript"))
    if not utterances:
        raise AsrError(f"{where}: no transcript has an audio file; check that the folder is complete.")
    return CorpusPart(utterances, left_out)


class TranscribedFolder(ABC):
    """A corpus of a folder with one transcript for each part, without a lexicon; this program cannot download it.

    Attributes:
        name: on the command line.
        title: in messages.
        all_parts: the parts that it may have.
        transcripts: the transcript of a part in each layout, relative to the folder, with `{part}` for its name.
        layout: the same, for messages.
        source: what to download by hand.
    """

    name: str
    title: str
    all_parts: Sequence[str]
    transcripts: Sequence[str]
    layout: str
    source: str

    @abstractmethod
    def _read(self, transcript: Path) -> Iterator[tuple[str, str, str] | SkippedItem]:
        """Id, speaker and normalized text of each utterance, or why a line is skipped."""

    @abstractmethod
    def _audio(self, corpus_dir: Path, part: str, transcript: Path) -> dict[str, Path]:
        """The audio files of a part by utterance id.

        Raises:
            AsrError: there are none.
        """

    def _transcript(self, corpus_dir: Path, part: str) -> Path | None:
        paths = (corpus_dir / name.format(part=part) for name in self.transcripts)
        return next((path for path in paths if path.is_file()), None)

    def parts_in(self, corpus_dir: Path) -> list[str]:
        require_folder(corpus_dir, self.title)
        parts = [part for part in self.all_parts if self._transcript(corpus_dir, part) is not None]
        if not parts:
            raise AsrError(f"{corpus_dir}: this is not {self.title}; expected {self.layout}.")
        return parts

    def list_part(self, corpus_dir: Path, part: str) -> CorpusPart:
        require_folder(corpus_dir, self.title)
        if part not in self.all_parts:
            raise AsrError(f"{part!r} is not a part of {self.title}; the parts are {', '.join(self.all_parts)}.")
        transcript = self._transcript(corpus_dir, part)
        if transcript is None:
            raise AsrError(
                f"{corpus_dir}: there are no transcripts of {self.title}'s part {part}; expected {self.layout}."
            )
        texts: dict[str, tuple[str, str]] = {}
        skipped: list[SkippedItem] = []
        for entry in self._read(transcript):
            if isinstance(entry, SkippedItem):
                skipped.append(entry)
            elif entry[0] in texts:
                skipped.append(SkippedItem(entry[0], f"{transcript}: a second transcript; the first one is kept"))
            else:
                texts[entry[0]] = entry[1:]
        return join(texts, self._audio(corpus_dir, part, transcript), skipped, corpus_dir)

    def lexicon(self, corpus_dir: Path) -> Path | None:
        return None

    def download(self, corpus_dir: Path, parts: Sequence[str]) -> None:
        if not corpus_dir.is_dir():
            raise AsrError(f"{corpus_dir}: {self.title} cannot be downloaded by this program; download {self.source}.")


def checksum_of(utterances: Iterable[Utterance], describe: Callable[[Utterance], str] = str, head: str = "") -> str:
    """SHA-256 of a text and of utterances, with the size and time of each audio file.

    Args:
        utterances: in order.
        describe: what of an utterance counts.
        head: the text.
    """
    digest = hashlib.sha256(head.encode("utf-8", "surrogatepass"))

    @cache
    def stamp(audio: Path) -> Any:
        try:
            status = audio.stat()
        except OSError as error:
            return error.errno
        return status.st_size, status.st_mtime_ns

    for utterance in utterances:
        digest.update(f"{describe(utterance)} {stamp(utterance.audio)}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
