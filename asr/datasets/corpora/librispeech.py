"""LibriSpeech and mini LibriSpeech, as FLAC or any other audio; the parts can be downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asr.datasets.corpora.base import CorpusPart, SkippedItem, audio_by_stem, join, read_transcript, require_folder
from asr.errors import AsrError
from asr.text.normalize import normalize_librispeech

LIBRISPEECH_PARTS = (
    "train-clean-100",
    "train-clean-360",
    "train-other-500",
    "dev-clean",
    "dev-other",
    "test-clean",
    "test-other",
)

MINI_LIBRISPEECH_PARTS = ("train-clean-5", "dev-clean-2")


class LibriSpeech:
    """LibriSpeech: `<part>/<speaker>/<chapter>/` has the audio, and `<speaker>-<chapter>.trans.txt` with `id WORDS`.

    Args:
        parts: the parts to look for in a folder.
        default_download: the parts to download if none are given.
    """

    name = "librispeech"

    def __init__(
        self,
        parts: Sequence[str] = LIBRISPEECH_PARTS + MINI_LIBRISPEECH_PARTS,
        default_download: Sequence[str] = LIBRISPEECH_PARTS,
    ) -> None:
        self._parts = tuple(parts)
        self._default_download = tuple(default_download)

    def parts_in(self, corpus_dir: Path) -> list[str]:
        require_folder(corpus_dir, "LibriSpeech")
        root = _root(corpus_dir)
        parts = [part for part in self._parts if (root / part).is_dir()]
        if not parts:
            raise AsrError(
                f"{corpus_dir}: none of the parts {', '.join(self._parts)} is here; give the folder above them."
            )
        return parts

    def list_part(self, corpus_dir: Path, part: str) -> CorpusPart:
        if part not in LIBRISPEECH_PARTS + MINI_LIBRISPEECH_PARTS:
            known = ", ".join(LIBRISPEECH_PARTS + MINI_LIBRISPEECH_PARTS)
            raise AsrError(f"{part!r} is not a part of LibriSpeech; the parts are {known}.")
        folder = _root(corpus_dir) / part
        require_folder(folder, f"LibriSpeech's part {part}")
        texts: dict[str, tuple[str, str]] = {}
        skipped: list[SkippedItem] = []
        for transcript in sorted(folder.glob("*/*/*.trans.txt")):
            try:
                lines = read_transcript(transcript)
            except AsrError as error:
                skipped.append(SkippedItem(transcript.name, str(error)))
                continue
            for line in lines:
                utterance_id, _, text = line.strip().partition(" ")
                if utterance_id in texts:
                    skipped.append(
                        SkippedItem(utterance_id, f"{transcript}: a second transcript; the first one is kept")
                    )
                    continue
                texts[utterance_id] = (utterance_id.split("-")[0], normalize_librispeech(text))
        if not texts:
            raise AsrError(
                f"{folder}: there are no transcripts; expected <speaker>/<chapter>/<speaker>-<chapter>.trans.txt files."
            )
        return join(texts, audio_by_stem(folder), skipped, folder)

    def lexicon(self, corpus_dir: Path) -> Path | None:
        return None

    def download(self, corpus_dir: Path, parts: Sequence[str]) -> None:
        # lhotse deletes the folder of a part before it unpacks: never ask for a part that exists.
        missing = [part for part in parts or self._default_download if not (_root(corpus_dir) / part).is_dir()]
        if not missing:
            return
        from lhotse.recipes import download_librispeech

        target = corpus_dir.parent if corpus_dir.name == "LibriSpeech" else corpus_dir
        try:
            download_librispeech(target, dataset_parts=missing)
        except Exception as error:  # urllib, tarfile and the disk each raise their own
            raise AsrError(
                f"{target}: LibriSpeech's {', '.join(missing)} could not be downloaded ({error}); try again, or "
                "download https://www.openslr.org/12 (mini: /31) and unpack it there."
            ) from error


def _root(corpus_dir: Path) -> Path:
    """The folder of the parts: the given one, or `LibriSpeech` in it."""
    return corpus_dir / "LibriSpeech" if (corpus_dir / "LibriSpeech").is_dir() else corpus_dir
