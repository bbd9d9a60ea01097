"""CMU AN4: 948 training and 130 test utterances of census data, mostly spelled names, numbers and dates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from asr.datasets.corpora.base import CorpusPart, SkippedItem, audio_by_stem, join, read_transcript, require_folder
from asr.errors import AsrError
from asr.text.normalize import normalize_an4

PARTS = ("train", "test")
_SPHINX_LINE = re.compile(r"^(?P<text>.*)\((?P<utterance>[^()\s]+)\)\s*$")


class An4:
    """AN4 in CMU's layout or in a layout like Kaldi's.

    - CMU: `etc/an4_<part>.transcription` with lines `<s> WORDS </s> (utterance)`, and audio in
      `wav/an4*_clstk/<speaker>/` as NIST SPHERE (`.sph`). The headerless `.raw` edition is not supported.
    - Kaldi: `<part>.text` with lines `speaker/utterance WORDS`, and audio in `wav/<part>/<speaker>/`.
    """

    name = "an4"

    def parts_in(self, corpus_dir: Path) -> list[str]:
        require_folder(corpus_dir, "AN4")
        parts = [part for part in PARTS if self._transcript(corpus_dir, part) is not None]
        if not parts:
            raise AsrError(
                f"{corpus_dir}: this is not AN4; expected train.text and test.text, or etc/an4_train.transcription."
            )
        return parts

    def list_part(self, corpus_dir: Path, part: str) -> CorpusPart:
        require_folder(corpus_dir, "AN4")
        if part not in PARTS:
            raise AsrError(f"{part!r} is not a part of AN4; the parts are {', '.join(PARTS)}.")
        transcript = self._transcript(corpus_dir, part)
        if transcript is None:
            raise AsrError(f"{corpus_dir}: there are no transcripts of AN4's part {part}; expected {part}.text.")
        cmu = transcript.suffix == ".transcription"
        texts: dict[str, tuple[str, str]] = {}
        skipped: list[SkippedItem] = []
        for line_number, line in enumerate(read_transcript(transcript), start=1):
            if cmu:
                match = _SPHINX_LINE.match(line)
                if match is None:
                    skipped.append(
                        SkippedItem(f"{transcript.name}, line {line_number}", "the line does not end in (utterance)")
                    )
                    continue
                utterance_id, text = match["utterance"], match["text"]
            else:
                first, _, text = line.strip().partition(" ")
                utterance_id = first.rpartition("/")[2]
            if utterance_id in texts:
                skipped.append(SkippedItem(utterance_id, f"{transcript}: a second transcript; the first one is kept"))
                continue
            # Utterance ids are an<number>-<speaker>-b.
            texts[utterance_id] = ("-".join(utterance_id.split("-")[1:-1]) or utterance_id, normalize_an4(text))
        folder = corpus_dir / "wav" / part
        if cmu:
            folders = sorted((corpus_dir / "wav").glob("an4test*" if part == "test" else "an4_*"))
            folder = folders[0] if folders else corpus_dir / "wav"
        require_folder(folder, f"AN4's {part} audio")
        return join(texts, audio_by_stem(folder), skipped, corpus_dir)

    def lexicon(self, corpus_dir: Path) -> Path | None:
        candidates = (corpus_dir / "an4.dic", corpus_dir / "etc" / "an4.dic")
        return next((path for path in candidates if path.is_file()), None)

    def download(self, corpus_dir: Path, parts: Sequence[str]) -> None:
        if not corpus_dir.is_dir():
            raise AsrError(
                f"{corpus_dir}: AN4 cannot be downloaded by this program; download an4_sphere.tar.gz from CMU."
            )

    def _transcript(self, corpus_dir: Path, part: str) -> Path | None:
        candidates = (corpus_dir / f"{part}.text", corpus_dir / "etc" / f"an4_{part}.transcription")
        return next((path for path in candidates if path.is_file()), None)
