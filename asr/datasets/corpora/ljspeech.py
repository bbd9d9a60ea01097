"""LJ Speech: one woman reading books aloud (Ito and Johnson, 2017), in whole or in part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asr.datasets.corpora.base import SkippedItem, TranscribedFolder, audio_by_stem, read_transcript
from asr.text.normalize import normalize_librispeech


class LJSpeech(TranscribedFolder):
    """LJ Speech: a file `text` with lines `id WORDS`, numbers spelled out, and audio anywhere below the folder."""

    name, title = "ljspeech", "LJ Speech"
    all_parts = ("train",)
    transcripts = ("text",)
    layout = "a file `text` with lines `id WORDS`"
    source = "its archive first"

    def _read(self, transcript: Path) -> Iterator[tuple[str, str, str] | SkippedItem]:
        for line in read_transcript(transcript):
            utterance_id, _, text = line.strip().replace("\t", " ").partition(" ")
            yield utterance_id, "ljspeech", normalize_librispeech(text)

    def _audio(self, corpus_dir: Path, part: str, transcript: Path) -> dict[str, Path]:
        return audio_by_stem(corpus_dir)
