"""Frames for the benchmark of the CTC decoder.

Real ones are those of a bundle with a CTC network, on dev-clean-2; some are kept in a file. For kinds of tokens without
any, outputs are simulated: each symbol of a text is a peak of one to three frames with blanks between, in noise that
makes about every eighth symbol wrong when read greedily.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from asr.bundle import Bundle
from asr.ctc import CTCTokens
from asr.text.lexicon import Lexicon
from scripts.benchmarks.speech import Recording, frames_of

RECORDED = Path(__file__).with_name("ctc_frames.safetensors")
NUM_KEPT = 8
LETTERS = ("-", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'")
NOISE, PEAK, NUM_PIECES = 1.6, 5.0, 500


@dataclass(frozen=True)
class CTCWorkload:
    """Utterances of one kind of tokens.

    Args:
        name: `letters`, `pieces` or `phones`, and where the frames are from.
        tokens: their columns.
        frames: log_prob (T, C) of each.
        references: its words.
        is_simulated: whether no network has made the frames.
    """

    name: str
    tokens: CTCTokens
    frames: list[Tensor]
    references: list[list[str]]
    is_simulated: bool = False

    def first(self, num_utts: int) -> CTCWorkload:
        """The same with fewer utterances."""
        return replace(self, frames=self.frames[:num_utts], references=self.references[:num_utts])

    @property
    def num_frames(self) -> int:
        return sum(map(len, self.frames))


def simulated(
    kind: str, texts: Sequence[Sequence[str]], words: Sequence[str], lexicon: Lexicon | None = None
) -> CTCWorkload:
    """Letters, pieces or phones of texts; the pieces are the most frequent strings of the words.

    Phones need a lexicon, whose first pronunciations are spoken.
    """
    if lexicon is not None:
        tokens = CTCTokens(["<blk>", *lexicon.phones], kind="phones")
    else:
        tokens = CTCTokens(LETTERS if kind == "letters" else pieces_of(words))

    def symbols_of(word: str) -> Sequence[str]:
        if lexicon is not None and word not in lexicon:
            return ()
        spellings = tokens.spell(word) if lexicon is None else lexicon[word]
        return spellings[0] if spellings else ()

    rng = np.random.default_rng(0)
    usable = [list(text) for text in texts if all(map(symbols_of, text))]
    frames = []
    for text in usable:
        columns: list[int] = []
        for word in text:
            for symbol in symbols_of(word):
                column = tokens.columns[tokens.table.id_of(symbol)]
                if columns and columns[-1] == column:
                    columns.append(tokens.blank_id)
                columns += [column] * int(rng.integers(1, 3)) + [tokens.blank_id] * int(rng.integers(0, 3))
        logits = NOISE * rng.normal(size=(len(columns), len(tokens)))
        # Among more symbols the best of the noise is higher.
        logits[np.arange(len(columns)), columns] += PEAK * np.sqrt(np.log(len(tokens)) / np.log(len(LETTERS)))
        frames.append(torch.from_numpy(logits).log_softmax(1).float())
    return CTCWorkload(f"{kind} (simulated)", tokens, frames, usable, is_simulated=True)


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


def tokens_of(bundle: Bundle) -> CTCTokens:
    """The columns of a bundle's CTC network, whose kind the symbols tell."""
    return CTCTokens(list(bundle.graph.tokens.tokens))


def recorded(bundle: Bundle, speech: Sequence[Recording]) -> CTCWorkload:
    """Frames of a bundle's CTC network."""
    tokens = tokens_of(bundle)
    name = f"{tokens.kind} of dev-clean-2"
    return CTCWorkload(name, tokens, frames_of(bundle, speech), [list(one.words) for one in speech])


def write(workloads: Iterable[CTCWorkload], path: Path) -> None:
    """Keeps the first utterances of each, in half precision."""
    tensors, described = {}, {}
    for workload in workloads:
        kind, kept = workload.tokens.kind, workload.first(NUM_KEPT)
        tensors[kind] = torch.cat(kept.frames).half()
        described[kind] = {
            "name": kept.name,
            "symbols": list(kept.tokens.symbols),
            "lengths": list(map(len, kept.frames)),
            "references": kept.references,
        }
    save_file(tensors, path, {"workloads": json.dumps(described)})


def read(path: Path) -> dict[str, CTCWorkload]:
    """What `write` has kept, by kind; nothing without the file."""
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as stored:
        described = json.loads(stored.metadata()["workloads"])
        return {
            kind: CTCWorkload(
                of["name"],
                CTCTokens(of["symbols"], kind=kind),
                list(stored.get_tensor(kind).float().log_softmax(1).split(of["lengths"])),
                of["references"],
            )
            for kind, of in described.items()
        }
