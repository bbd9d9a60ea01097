"""The audio of utterances, small enough for a page: 16 kHz, mono, MP3 if libsndfile can write it, else FLAC."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import soundfile
from torch import Tensor

from asr.audio.io import PartReader
from asr.errors import AsrError
from asr.reports.evaluation import Clip, Utterance

RATE = 16_000
_MIME = {"MP3": "audio/mpeg", "FLAC": "audio/flac"}


@dataclass
class Clips:
    """Audio of utterances, in the page or in separate files.

    Attributes:
        embedded: utterance -> MIME type and content.
        linked: utterance -> address of its file, relative to the page.
        num_bytes: size of the embedded audio.
        problem: the first error in reading or encoding audio; empty if there was none.
    """

    embedded: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    linked: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    problem: str = ""


class ClipReader:
    """Reads the samples of clips."""

    def __init__(self) -> None:
        self._parts = PartReader()

    def read(self, clip: Clip) -> Tensor:
        """The samples of a clip, (L,) float32 at 16 kHz.

        Raises:
            AsrError: the file cannot be read.
        """
        return self._parts.read(clip.path, clip.begin, clip.end, RATE)


def encode(samples: Tensor) -> tuple[str, bytes]:
    """Encodes samples (L,) as an audio file -> its MIME type and content."""
    kind = "MP3" if "MP3" in soundfile.available_formats() else "FLAC"
    file = io.BytesIO()
    soundfile.write(file, samples.clamp(-1.0, 1.0).numpy(), RATE, format=kind)
    return _MIME[kind], file.getvalue()


def collect_clips(
    utterances: Sequence[Utterance], num_embedded: int, max_bytes: int, folder: Path | None = None
) -> Clips:
    """Collects the audio of utterances.

    Args:
        utterances: most important ones first.
        num_embedded: maximum number of utterances whose audio is embedded.
        max_bytes: maximum total size of embedded audio, in base64.
        folder: folder for the audio of the others, created if missing; None to leave their audio out.

    Raises:
        AsrError: the folder cannot be written.
    """
    found, reader = Clips(), ClipReader()
    names = file_names([one.id for one in utterances])
    for one in utterances:
        is_full = len(found.embedded) >= num_embedded or found.num_bytes >= max_bytes
        if one.audio is None or (is_full and folder is None):
            continue
        try:
            mime, content = encode(reader.read(one.audio))
        except (AsrError, soundfile.SoundFileError) as error:
            found.problem = found.problem or str(error)
            continue
        size = 4 * len(content) // 3
        if not is_full and found.num_bytes + size <= max_bytes:
            found.embedded[one.id] = mime, content
            found.num_bytes += size
        elif folder is not None:
            name = f"{names[one.id]}.{'mp3' if mime == 'audio/mpeg' else 'flac'}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            except OSError as error:
                raise AsrError(f"{folder / name}: the audio cannot be written ({error.strerror}).") from error
            found.linked[one.id] = f"{folder.name}/{name}"
    return found


def file_names(ids: Sequence[str]) -> Mapping[str, str]:
    """Unique file names for utterances, of characters that are safe in shells, browsers and file systems."""
    taken: set[str] = set()
    names = {}
    for one in ids:
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in one)[:80] or "_"
        name, number = plain, 1
        while name.lower() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.lower())
        names[one] = name
    return names
