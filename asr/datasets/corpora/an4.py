"""CMU AN4: 948 training and 130 test utterances of census data, mostly spelled names, numbers and dates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from asr.datasets.corpora.base import SkippedItem, TranscribedFolder, audio_by_stem, read_transcript, require_folder
from asr.text.normalize import normalize_an4

_SPHINX_LINE = re.compile(r"^(?P<text>.*)\((?P<utterance>[^()\s]+)\)\s*$")


class An4(TranscribedFolder):
    """AN4 in CMU's layout or in a layout like Kaldi's.

    - CMU: `etc/an4_<part>.transcription` with lines `<s> WORDS </s> (utterance)`, and audio in
      `wav/an4*_clstk/<speaker>/` as NIST SPHERE (`.sph`). The headerless `.raw` edition is not supported.
    - Kaldi: `<part>.text` with lines `speaker/utterance WORDS`, and audio in `wav/<part>/<speaker>/`.
    """

    name, title = "an4", "AN4"
    all_parts = ("train", "test")
    transcripts = ("{part}.text", "etc/an4_{part}.transcription")
    layout = "train.text and test.text, or etc/an4_train.transcription"
    source = "an4_sphere.tar.gz from CMU"

    def _read(self, transcript: Path) -> Iterator[tuple[str, str, str] | SkippedItem]:
        for line_number, line in enumerate(read_transcript(transcript), start=1):
            if _is_of_cmu(transcript):
                match = _SPHINX_LINE.match(line)
                if match is None:
                    where = f"{transcript.name}, line {line_number}"
                    yield SkippedItem(where, "the line does not end in (utterance)")
                    continue
                utterance_id, text = match["utterance"], match["text"]
            else:
                first, _, text = line.strip().partition(" ")
                utterance_id = first.rpartition("/")[2]
            # Utterance ids are an<number>-<speaker>-b.
            yield utterance_id, "-".join(utterance_id.split("-")[1:-1]) or utterance_id, normalize_an4(text)

    def _audio(self, corpus_dir: Path, part: str, transcript: Path) -> dict[str, Path]:
        folder = corpus_dir / "wav" / part
        if _is_of_cmu(transcript):
            folders = sorted((corpus_dir / "wav").glob("an4test*" if part == "test" else "an4_*"))
            folder = folders[0] if folders else corpus_dir / "wav"
        require_folder(folder, f"AN4's {part} audio")
        return audio_by_stem(folder)

    def lexicon(self, corpus_dir: Path) -> Path | None:
        candidates = (corpus_dir / "an4.dic", corpus_dir / "etc" / "an4.dic")
        return next((path for path in candidates if path.is_file()), None)


def _is_of_cmu(transcript: Path) -> bool:
    return transcript.suffix == ".transcription"
