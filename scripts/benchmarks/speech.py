"""Real speech for the benchmarks: recordings with transcripts, and a bundle's acoustic model outputs for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.datasets.corpora import CORPORA
from asr.metrics import read_transcripts
from asr.recognizer import Recognizer
from asr.results import StageTimes
from scripts.benchmarks.inputs import ROOT, with_progress

_LIBRISPEECH = Path("librispeech", "LibriSpeech")
_T = TypeVar("_T")


class Recording(NamedTuple):
    path: Path
    words: tuple[str, ...]


def recordings(corpora: Path | None, num: int | None = None, part: str = "dev-clean-2") -> tuple[str, list[Recording]]:
    """What was recorded, and `num` recordings, spread evenly: a part of LibriSpeech, or the demo's clips without it."""
    folder = None if corpora is None else corpora / _LIBRISPEECH / part
    if folder is None or not folder.is_dir():
        folder = ROOT / "scripts" / "demo_clips"
        name, lists = "demo clips", [folder / "reference.txt"]
    else:
        name, lists = part, sorted(folder.rglob("*.trans.txt"))
    found = [
        Recording(path, words)
        for transcripts in lists
        for stem, words in read_transcripts(transcripts).items()
        for path in transcripts.parent.glob(f"{stem}.*")
    ]
    return name, found if num is None else evenly(found, num)


def an4_recordings(corpora: Path | None) -> list[Recording]:
    """AN4's test part; empty if the corpus is missing."""
    if corpora is None or not (corpora / "an4").is_dir():
        return []
    utterances = CORPORA["an4"].list_part(corpora / "an4", "test").utterances
    return [Recording(utterance.audio, tuple(utterance.text.split())) for utterance in utterances]


def frames_of(bundle: Bundle, speech: Sequence[Recording]) -> list[Tensor]:
    """The acoustic model's log_prob (T, C) of each recording."""
    recognizer = Recognizer(bundle, mode="ngram", decoder="token-passing")
    frames = []
    with torch.no_grad():
        for recording in with_progress(speech, "acoustic model"):
            waveform = read_audio(recording.path, recognizer.sampling_rate)
            log_prob, num_frames = recognizer.log_prob([waveform], StageTimes())
            frames.append(log_prob[0, : int(num_frames[0])].float())
    return frames


def evenly(items: list[_T], num: int) -> list[_T]:
    """This number of items, spread evenly over the list."""
    return [items[i * len(items) // num] for i in range(num)] if num < len(items) else items
