"""speechocean762: short English sentences read by 250 native speakers of Mandarin, half of them children."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asr.datasets.corpora.base import CorpusPart, SkippedItem, audio_by_stem, join, read_transcript, require_folder
from asr.datasets.kaldi import read_table
from asr.errors import AsrError
from asr.text.normalize import normalize_english

PARTS = ("train", "test")


class SpeechOcean762:
    """speechocean762 in the layout of its distribution, or with one audio folder for each part.

    - Distribution: `<part>/text` with lines `utterance TEXT`, `<part>/wav.scp`, `<part>/utt2spk`, and audio in
      `WAVE/SPEAKER<id>/`.
    - Audio folders: `<part>.text` with lines `speaker/utterance TEXT`, and audio in `<any folder>/<part>/<speaker>/`.
    """

    name = "speechocean762"

    def parts_in(self, corpus_dir: Path) -> list[str]:
        require_folder(corpus_dir, "speechocean762")
        parts = [part for part in PARTS if self._transcript(corpus_dir, part) is not None]
        if not parts:
            raise AsrError(
                f"{corpus_dir}: this is not speechocean762; expected train/text with train/wav.scp, or train.text."
            )
        return parts

    def list_part(self, corpus_dir: Path, part: str) -> CorpusPart:
        require_folder(corpus_dir, "speechocean762")
        if part not in PARTS:
            raise AsrError(f"{part!r} is not a part of speechocean762; the parts are {', '.join(PARTS)}.")
        transcript = self._transcript(corpus_dir, part)
        if transcript is None:
            raise AsrError(
                f"{corpus_dir}: there are no transcripts of speechocean762's part {part}; expected {part}/text."
            )
        official = transcript.name == "text"
        speakers = read_table(transcript.parent / "utt2spk") if official else {}
        texts: dict[str, tuple[str, str]] = {}
        skipped: list[SkippedItem] = []
        for line in read_transcript(transcript):
            first, _, text = line.strip().replace("\t", " ").partition(" ")
            folder, _, utterance_id = first.rpartition("/")
            if utterance_id in texts:
                skipped.append(SkippedItem(utterance_id, f"{transcript}: a second transcript; the first one is kept"))
                continue
            speaker = folder or speakers.get(utterance_id, utterance_id[:5])
            texts[utterance_id] = (speaker, normalize_english(text))
        if official:
            listed = read_table(transcript.parent / "wav.scp")
            audio = {
                utterance: corpus_dir / name for utterance, name in listed.items() if (corpus_dir / name).is_file()
            }
        else:
            folders = [path for path in sorted(corpus_dir.glob(f"*/{part}")) if path.is_dir()]
            if not folders:
                raise AsrError(
                    f"{corpus_dir}: there is no audio of speechocean762's part {part}; expected a folder */{part}."
                )
            audio = audio_by_stem(folders[0])
        return join(texts, audio, skipped, corpus_dir)

    def lexicon(self, corpus_dir: Path) -> Path | None:
        return None

    def download(self, corpus_dir: Path, parts: Sequence[str]) -> None:
        if not corpus_dir.is_dir():
            raise AsrError(
                f"{corpus_dir}: speechocean762 cannot be downloaded by this program; download https://www.openslr.org/101."
            )

    def _transcript(self, corpus_dir: Path, part: str) -> Path | None:
        candidates = (corpus_dir / part / "text", corpus_dir / f"{part}.text")
        return next((path for path in candidates if path.is_file()), None)
