"""Frames for the benchmark of the CTC decoder: outputs of CTC networks for dev-clean-2, some of which are stored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from asr.bundle import Bundle
from asr.ctc import CTCTokens
from scripts.benchmarks.speech import Recording, frames_of

RECORDED = Path(__file__).with_name("ctc_frames.safetensors")
NUM_KEPT = 8


@dataclass(frozen=True)
class CTCWorkload:
    """Utterances of one kind of tokens.

    Args:
        name: `letters`, `pieces` or `phones`, and where the frames are from.
        tokens: their columns.
        frames: log_prob (T, C) of each.
        references: its words.
    """

    name: str
    tokens: CTCTokens
    frames: list[Tensor]
    references: list[list[str]]

    def first(self, num_utts: int) -> CTCWorkload:
        """The same with fewer utterances."""
        return replace(self, frames=self.frames[:num_utts], references=self.references[:num_utts])

    @property
    def num_frames(self) -> int:
        return sum(map(len, self.frames))


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
