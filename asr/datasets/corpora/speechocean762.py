"""speechocean762: short English sentences read by 250 native speakers of Mandarin, half of them children."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asr.datasets.corpora.base import SkippedItem, TranscribedFolder, audio_by_stem, read_transcript
from asr.datasets.kaldi import read_table
from asr.errors import AsrError
from asr.text.normalize import normalize_english


class SpeechOcean762(TranscribedFolder):
    """speechocean762 in the layout of its distribution, or with one audio folder for each part.

    - Distribution: `<part>/text` with lines `utterance TEXT`, `<part>/wav.scp`, `<part>/utt2spk`, and audio in
      `WAVE/SPEAKER<id>/`.
    - Audio folders: `<part>.text` with lines `speaker/utterance TEXT`, and audio in `<any folder>/<part>/<speaker>/`.
    """

    name = title = "speechocean762"
    all_parts = ("train", "test")
    transcripts = ("{part}/text", "{part}.text")
    layout = "train/text with train/wav.scp, or train.text"
    source = "https://www.openslr.org/101"

    def _read(self, transcript: Path) -> Iterator[tuple[str, str, str] | SkippedItem]:
        speakers = read_table(transcript.parent / "utt2spk") if _is_official(transcript) else {}
        for line in read_transcript(transcript):
            first, _, text = line.strip().replace("\t", " ").partition(" ")
            folder, _, utterance_id = first.rpartition("/")
            yield utterance_id, folder or speakers.get(utterance_id, utterance_id[:5]), normalize_english(text)

    def _audio(self, corpus_dir: Path, part: str, transcript: Path) -> dict[str, Path]:
        if _is_official(transcript):
            listed = read_table(transcript.parent / "wav.scp")
            return {utterance: corpus_dir / name for utterance, name in listed.items() if (corpus_dir / name).is_file()}
        folders = [path for path in sorted(corpus_dir.glob(f"*/{part}")) if path.is_dir()]
        if not folders:
            raise AsrError(
                f"{corpus_dir}: there is no audio of speechocean762's part {part}; expected a folder */{part}."
            )
        return audio_by_stem(folders[0])


def _is_official(transcript: Path) -> bool:
    return transcript.name == "text"
