"""Recordings that benchmarks take, and the frames of a bundle's acoustic model for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import soundfile
import torch

from asr.bundle import Bundle
from asr.testing.tones import RATE, tones
from scripts.benchmarks.speech import evenly, frames_of, recordings


def corpus(folder: Path) -> Path:
    """Two chapters of two recordings in LibriSpeech's layout."""
    for chapter in ("1-2", "3-4"):
        part = folder / "librispeech" / "LibriSpeech" / "dev-clean-2" / chapter.replace("-", "/")
        part.mkdir(parents=True)
        lines = []
        for number, words in enumerate(("PAT KIT", "SICK SKIP TO")):
            soundfile.write(part / f"{chapter}-{number}.flac", tones(words.split(), seed=number).numpy(), RATE)
            lines.append(f"{chapter}-{number} {words}\n")
        (part / f"{chapter}.trans.txt").write_text("".join(lines))
    return folder


def test_recordings_are_spread_over_the_corpus(tmp_path: Path) -> None:
    name, found = recordings(corpus(tmp_path), 2)
    assert name == "dev-clean-2" and [path.stem for path, _ in found] == ["1-2-0", "3-4-0"]
    assert [len(words) for _, words in recordings(tmp_path)[1]] == [2, 3, 2, 3]
    assert evenly(list(range(10)), 3) == [0, 3, 6]


@pytest.mark.parametrize("corpora", [None, Path("nowhere")])
def test_the_clips_of_the_demo_serve_where_there_is_no_corpus(corpora: Path | None) -> None:
    name, found = recordings(corpora)
    assert name == "demo clips" and len(found) == 5
    assert all(path.suffix == ".flac" and len(words) > 5 for path, words in found)


def test_frames_are_those_of_the_acoustic_model(tmp_path: Path, tiny_bundle_folder: Path) -> None:
    bundle = Bundle.load(tiny_bundle_folder)
    frames = frames_of(bundle, recordings(corpus(tmp_path))[1])
    assert len(frames) == 4 and torch.equal(frames[0], frames[2]) and not torch.equal(frames[0][:20], frames[1][:20])
    for one in frames:
        torch.testing.assert_close(one.exp().sum(1), torch.ones(len(one)), rtol=1e-3, atol=1e-3)
