"""Frames for the benchmark of the CTC decoder: phones of the bundle's network on real speech, letters and pieces made.

No network of letters or pieces comes with the program. Their frames are simulated: each symbol of a text is a peak of
one to three frames with blanks between, in noise that makes about every eighth symbol wrong when read greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from asr.bundle import Bundle
from asr.ctc import CTCTokens
from asr.metrics import read_transcripts
from scripts.benchmarks.inputs import ROOT

LETTERS = ("-", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'")
NOISE, PEAK, NUM_PIECES = 1.6, 5.0, 500


@dataclass(frozen=True)
class CTCWorkload:
    """Utterances of one kind of tokens.

    Args:
        name: `letters`, `pieces` or `phones`, and whether simulated.
        tokens: their columns.
        frames: log_prob (T, C) of each.
        references: its words.
    """

    name: str
    tokens: CTCTokens
    frames: list[Tensor]
    references: list[list[str]]

    @property
    def num_frames(self) -> int:
        return sum(map(len, self.frames))


def simulated(kind: str, texts: Sequence[Sequence[str]], words: Sequence[str]) -> CTCWorkload:
    """Letters or pieces of texts; the pieces are the most frequent strings of the words."""
    tokens = CTCTokens(LETTERS if kind == "letters" else pieces_of(words))
    rng = np.random.default_rng(0)
    usable = [list(text) for text in texts if all(tokens.spell(word) for word in text)]
    frames = []
    for text in usable:
        columns: list[int] = []
        for word in text:
            for symbol in tokens.spell(word)[0]:
                column = tokens.columns[tokens.table.id_of(symbol)]
                if columns and columns[-1] == column:
                    columns.append(tokens.blank_id)
                columns += [column] * int(rng.integers(1, 3)) + [tokens.blank_id] * int(rng.integers(0, 3))
        logits = NOISE * rng.normal(size=(len(columns), len(tokens)))
        # Among more symbols the best of the noise is higher.
        logits[np.arange(len(columns)), columns] += PEAK * np.sqrt(np.log(len(tokens)) / np.log(len(LETTERS)))
        frames.append(torch.from_numpy(logits).log_softmax(1).float())
    return CTCWorkload(f"{kind} (simulated)", tokens, frames, usable)


def pieces_of(words: Sequence[str]) -> list[str]:
    """All letters, within words and at their beginning, and the most frequent strings of two to four letters."""
    count: dict[str, int] = {}
    for rank, word in enumerate(words[:20000]):
        weight = 1 + 20000 // (1 + rank)
        marked = "▁" + word
        for begin in range(len(marked)):
            for length in range(2, 5):
                piece = marked[begin : begin + length]
                if len(piece) == length and piece != "▁":
                    count[piece] = count.get(piece, 0) + weight * (length - 1)
    singles = [*LETTERS[2:], *(f"▁{letter}" for letter in LETTERS[2:])]
    frequent = sorted(count, key=lambda piece: (-count[piece], piece))
    chosen = [*singles, *(piece for piece in frequent if piece not in singles)]
    return ["<blk>", *chosen[: NUM_PIECES - 1]]


def phones(bundle: Bundle, corpora: Path | None, num_utts: int) -> CTCWorkload:
    """Frames of the bundle's network on dev-clean-2, or on the demo's clips where there is no corpus."""
    recordings = _recordings(corpora, num_utts)
    frames, references = [], []
    network, features = bundle.acoustic_model.network, bundle.features.network
    for path, words in recordings:
        samples, _ = soundfile.read(path, dtype="float32")
        waveform = torch.from_numpy(samples).reshape(1, -1)
        with torch.no_grad():
            log_prob, num_frames = network(*features(waveform, torch.tensor([waveform.shape[1]])))
        frames.append(log_prob[0, : int(num_frames[0])].float())
        references.append(words)
    tokens = CTCTokens(list(bundle.graph.tokens.tokens), kind="phones")
    return CTCWorkload("phones", tokens, frames, references)


def _recordings(corpora: Path | None, num_utts: int) -> list[tuple[Path, list[str]]]:
    part = None if corpora is None else corpora / "librispeech" / "LibriSpeech" / "dev-clean-2"
    if part is None or not part.is_dir():
        folder = ROOT / "scripts" / "demo_clips"
        transcripts = read_transcripts(folder / "text") if (folder / "text").is_file() else {}
        return [(folder / f"{name}.flac", list(words)) for name, words in transcripts.items()][:num_utts]
    found = []
    for transcript in sorted(part.glob("*/*/*.trans.txt")):
        for name, words in read_transcripts(transcript).items():
            found += [(path, list(words)) for path in transcript.parent.glob(f"{name}.*")]
    step = max(1, len(found) // num_utts)
    return found[::step][:num_utts]
