"""LJ Speech: one woman reading books aloud (Ito and Johnson, 2017), in whole or in part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asr.datasets.corpora.base import CorpusPart, SkippedItem, audio_by_stem, join, read_transcript, require_folder
from asr.errors import AsrError
from asr.text.normalize import normalize_librispeech

PARTS = ("train",)


class LJSpeech:
    """LJ Speech: a file `text` with lines `id WORDS`, numbers spelled out, and audio anywhere below the folder."""

    name = "ljspeech"

    def parts_in(self, corpus_dir: Path) -> list[str]:
        require_folder(corpus_dir, "LJ Speech")
        if not (corpus_dir / "text").is_file():
            raise AsrError(f"{corpus_dir}: this is not LJ Speech; expected a file `text` with lines `id WORDS`.")
        return list(PARTS)

    def list_part(self, corpus_dir: Path, part: str) -> CorpusPart:
        if part not in PARTS:
            raise AsrError(f"{part!r} is not a part of LJ Speech; the parts are {', '.join(PARTS)}.")
        self.parts_in(corpus_dir)
        texts: dict[str, tuple[str, str]] = {}
        skipped: list[SkippedItem] = []
        for line in read_transcript(corpus_dir / "text"):
            utterance_id, _, text = line.strip().replace("\t", " ").partition(" ")
            if utterance_id in texts:
                skipped.append(SkippedItem(utterance_id, f"{corpus_dir}: a second transcript; the first one is kept"))
                continue
            texts[utterance_id] = ("ljspeech", normalize_librispeech(text))
        return join(texts, audio_by_stem(corpus_dir), skipped, corpus_dir)

    def lexicon(self, corpus_dir: Path) -> Path | None:
        return None

    def download(self, corpus_dir: Path, parts: Sequence[str]) -> None:
        if not corpus_dir.is_dir():
            raise AsrError(f"{corpus_dir}: LJ Speech cannot be downloaded by this program; download its archive first.")
