"""The composed lexicon and language model, before the topology spreads phones over frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asr.graph.artefact import DecodingGraph, graph_from_arrays, write_graph_file
from asr.graph.compact import finish, pack
from asr.graph.graph_arrays import GraphArrays
from asr.text.tokens import TokenTable
from asr.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class PhoneGraph:
    """A determinised, minimised graph from phones to words, backoff epsilons still in it.

    Args:
        arrays: the graph; labels number `phones`, -1 reads nothing.
        phones: the lexicon's phones.
        tokens: the acoustic model's tokens.
        vocabulary: the words.
        meta: how it was made; `topology` and `score_step` are needed to finish it.
    """

    arrays: GraphArrays
    phones: tuple[str, ...]
    tokens: TokenTable
    vocabulary: Vocabulary
    meta: dict[str, Any]

    def finish(self) -> DecodingGraph:
        """The graph that both first passes search: epsilons removed, topology composed."""
        arrays = finish(self.arrays, self.phones, self.meta["topology"], self.tokens)
        return graph_from_arrays(arrays, self.tokens, self.vocabulary, self.meta)

    def save(self, path: str | Path) -> None:
        """Writes the compact form; `DecodingGraph.load` finishes it."""
        tensors = pack(self.arrays, self.meta["score_step"])
        write_graph_file(path, "phones", tensors, self.tokens, self.vocabulary, self.meta, {"phones": self.phones})
