"""Tiny corpora of synthetic audio in each layout that the readers know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile


def write_audio(
    path: Path, seconds: float = 0.5, rate: int = 16000, channels: int = 1, subtype: str | None = None
) -> Path:
    """A tone with a little noise, the same for the same arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    num = round(seconds * rate)
    generator = np.random.default_rng(num + channels)
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(num) / rate)
    samples = tone[:, None] + 0.01 * generator.standard_normal((num, channels))
    file_format = "NIST" if path.suffix == ".sph" else None
    soundfile.write(str(path), samples, rate, format=file_format, subtype="PCM_16" if file_format else subtype)
    return path


def write_librispeech(root: Path, part: str = "dev-clean-2", num: int = 4, suffix: str = "flac") -> Path:
    """Two speakers, `num` utterances each; returns the part's folder."""
    for speaker in ("19", "26"):
        chapter = root / part / speaker / "198"
        lines = []
        for index in range(num):
            utterance = f"{speaker}-198-{index:04d}"
            write_audio(chapter / f"{utterance}.{suffix}", 0.4 + 0.1 * index)
            lines.append(f"{utterance} A BAY\n")
        (chapter / f"{speaker}-198.trans.txt").write_text("".join(lines), encoding="utf-8")
    return root / part
