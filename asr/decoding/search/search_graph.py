"""A decoding graph made ready for the torch search: scaled scores, arcs that read a frame apart from those that do not.

Shapes: S states, A arcs, E arcs that read a frame, V words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from asr.decoding.options import DecodingOptions
from asr.decoding.search.token_step import ArcWords
from asr.graph.artefact import DecodingGraph


@dataclass(frozen=True, eq=False)
class ArcSet:
    """Some of a graph's arcs, sorted by source state.

    Args:
        arc_begin: (S + 1,) int64.
        dst_state: (E,) int32.
        token_id: (E,) int32.
        score: (E,) float32, graph score and word insertion penalty, scaled.
        graph_arc: (E,) int64, the arc's place in the graph, or None where it is the same.
        words: the words of these arcs.
    """

    arc_begin: Tensor
    dst_state: Tensor
    token_id: Tensor
    score: Tensor
    graph_arc: Tensor | None
    words: ArcWords

    def arc_of(self, position: Tensor) -> Tensor:
        """The graph's arcs at these positions of the set, (K,) -> (K,)."""
        return position if self.graph_arc is None else self.graph_arc.index_select(0, position)

    def for_loop(self) -> tuple[Any, ...]:
        """arc_begin, token_id, score, num_words, word_begin, word_id and dst_state as a loop on a CPU reads them."""
        words = self.words
        arcs = self.arc_begin, self.token_id, self.score, words.num_words, words.word_begin, words.word_id
        return tuple(part.numpy() for part in (*arcs, self.dst_state))


class Searchable(Protocol):
    """What the token search walks: states, arcs that read a frame, perhaps arcs that do not, and ends.

    `final_score` (S,) is scaled, `final_graph_score` (S,) is not; both are -inf where a path may not end. `is_pushed`:
    whether scores tell beforehand how a path may end at best, so that most of what is alive stays so.
    """

    num_states: int
    emitting: ArcSet
    epsilon: ArcSet | None
    final_score: Tensor
    final_graph_score: Tensor
    is_pushed: bool


class SearchGraph:
    """The graph as the token search walks it.

    Args:
        graph: the artefact.
        options: scales and penalty, which are worked into the scores.
    """

    is_pushed = False

    def __init__(self, graph: DecodingGraph, options: DecodingOptions) -> None:
        self.num_states = graph.num_states
        num_words = graph.word_begin[1:] - graph.word_begin[:-1]
        score = graph.score * options.graph_scale + num_words * options.word_insertion_penalty
        self.final_graph_score = graph.final_score
        self.final_score = graph.final_score * options.graph_scale
        self.epsilon: ArcSet | None = None
        if options.graph_scale <= 0:
            # 0 * -inf is no number, and a state that may not end stays one.
            self.final_score = self.final_score.masked_fill(graph.final_score == -torch.inf, -torch.inf)
        if graph.has_epsilons:
            reads = graph.token_id >= 0
            self.emitting = _subset(graph, score, reads)
            self.epsilon = _subset(graph, score, ~reads)
        else:
            words = ArcWords(graph.word_begin, graph.word_id)
            self.emitting = ArcSet(graph.arc_begin, graph.dst_state, graph.token_id, score, None, words)


def _subset(graph: DecodingGraph, score: Tensor, chosen: Tensor) -> ArcSet:
    arc = chosen.nonzero().squeeze(1)
    before = torch.zeros(graph.num_arcs + 1, dtype=torch.int64, device=graph.device)
    before[1:] = chosen.cumsum(0)
    return ArcSet(
        before[graph.arc_begin],
        graph.dst_state[arc],
        graph.token_id[arc],
        score[arc],
        arc,
        ArcWords.of_arcs(graph.word_begin, graph.word_id, arc),
    )
