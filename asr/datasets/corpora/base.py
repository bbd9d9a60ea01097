"""What every corpus reader gives: utterances found, and what had to be left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asr.audio.io import AUDIO_SUFFIXES, find_audio_files
from asr.errors import AsrError
from asr.text.normalize import read_text


@dataclass(frozen=True)
class Utterance:
    """One transcribed recording."""

    utterance_id: str
    audio: Path
    text: str
    speaker: str


@dataclass(frozen=True)
class SkippedItem:
    """Something that was left out, and one sentence that says why."""

    item: str
    reason: str


@dataclass(frozen=True)
class CorpusPart:
    """The utterances of one part of a corpus, before any audio is opened."""

    utterances: list[Utterance]
    skipped: list[SkippedItem]


class Corpus(Protocol):
    """One corpus in any of its known folder layouts."""

    @property
    def name(self) -> str:
        """The name on the command line."""

    def parts_in(self, corpus_dir: Path) -> list[str]:
        """The parts that the folder holds.

        Raises:
            AsrError: the folder is missing, empty, or holds no part of this corpus.
        """

    def list_part(self, corpus_dir: Path, part: str) -> CorpusPart:
        """The utterances of one part, in order of their ids.

        Raises:
            AsrError: the part is not there or holds not one utterance.
        """

    def lexicon(self, corpus_dir: Path) -> Path | None:
        """The pronunciations that come with the corpus, or None."""

    def download(self, corpus_dir: Path, parts: Sequence[str]) -> None:
        """Fetches parts that the folder lacks; parts that are there are left alone.

        Raises:
            AsrError: the corpus cannot be downloaded from here.
        """


def require_folder(corpus_dir: Path, corpus_name: str) -> None:
    """Raises AsrError where the folder is missing or empty."""
    if not corpus_dir.is_dir():
        raise AsrError(f"{corpus_dir}: there is no such folder; give --corpus the folder that holds {corpus_name}.")
    if next(corpus_dir.iterdir(), None) is None:
        raise AsrError(f"{corpus_dir}: the folder is empty; it should hold {corpus_name}.")


def audio_by_stem(folder: Path) -> dict[str, Path]:
    """All audio below a folder by file stem; of several with one stem the lossless one (FLAC first) is taken."""
    rank = {suffix: position for position, suffix in enumerate(AUDIO_SUFFIXES)}
    found: dict[str, Path] = {}
    for path in find_audio_files(folder):
        other = found.get(path.stem)
        if other is None or rank[path.suffix.lower()] < rank[other.suffix.lower()]:
            found[path.stem] = path
    return found


def read_transcript(path: Path) -> list[str]:
    """The lines of a transcript file that are not blank.

    Raises:
        AsrError: it cannot be read or is not UTF-8.
    """
    return [line for line in read_text(path, "transcript").splitlines() if line.strip()]


def join(
    texts: dict[str, tuple[str, str]], audio: dict[str, Path], skipped: Sequence[SkippedItem], where: Path
) -> CorpusPart:
    """Pairs transcripts with audio by utterance id; what lacks its other half is reported.

    Args:
        texts: utterance id to (speaker, normalised text).
        audio: utterance id to file.
        skipped: what was left out before.
        where: the folder, for the error.

    Raises:
        AsrError: no pair is left.
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
        raise AsrError(f"{where}: not one transcript has its audio file there; check that the folder is complete.")
    return CorpusPart(utterances, left_out)
