"""A decoding graph prepared for the search: scaled scores, and emitting arcs separated from epsilon arcs.

Shapes: S states, A arcs of a set, V words, K tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asr.decoding.interface import DecodingOptions
from asr.decoding.tokens import expand
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.interface import LanguageModel


class ArcWords:
    """The words of arcs, in order; an arc has zero, one or several.

    Args:
        word_begin: (A + 1,) int64, words of arc a are word_id[word_begin[a]] to word_id[word_begin[a + 1]].
        word_id: (W,) integer.
    """

    def __init__(self, word_begin: Tensor, word_id: Tensor) -> None:
        self.word_begin = word_begin
        self.word_id = word_id.to(torch.int64)
        self.num_words = (word_begin[1:] - word_begin[:-1]).to(torch.int32)
        self.max_words = int(self.num_words.max()) if len(self.num_words) else 0

    @classmethod
    def of_arcs(cls, word_begin: Tensor, word_id: Tensor, arc: Tensor) -> ArcWords:
        """The words of arcs (K,), given word_begin and word_id of all arcs."""
        owner, position = expand(word_begin, arc)
        num_words = torch.bincount(owner, minlength=len(arc))
        return cls(torch.cat([num_words.new_zeros(1), num_words.cumsum(0)]), word_id.index_select(0, position))

    def score(
        self, lm: LanguageModel, arc: Tensor, context_idx: Tensor, changed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores the words of arcs, all j-th words in one call of the language model.

        Args:
            lm: the language model, with the word ids of the arcs.
            arc: (K,).
            context_idx: (K,) the history before the arc.
            changed: (Q,) int64, the positions of arcs that have words; None to find them here.

        Returns:
            changed (Q,), the positions of arcs that have words; their lm_score (Q,); their next context_idx (Q,).
        """
        if changed is None:
            changed = self.num_words.index_select(0, arc).nonzero().squeeze(1)
        arc, context_idx = arc.index_select(0, changed), context_idx.index_select(0, changed)
        if not len(changed):
            return changed, torch.zeros(0, device=arc.device), context_idx
        word = self.word_id.index_select(0, self.word_begin.index_select(0, arc))
        return changed, *self.score_rest(lm, arc, *lm.score(context_idx, word))

    def score_rest(
        self, lm: LanguageModel, arc: Tensor, lm_score: Tensor, context_idx: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores all words but the first of arcs (Q,); lm_score, context_idx (Q,) after the first word -> after all."""
        for position in range(1, self.max_words):
            more = (self.num_words.index_select(0, arc) > position).nonzero().squeeze(1)
            if not len(more):
                break
            word = self.word_id.index_select(0, self.word_begin.index_select(0, arc.index_select(0, more)) + position)
            log_prob, next_idx = lm.score(context_idx.index_select(0, more), word)
            lm_score = lm_score.index_add(0, more, log_prob)
            context_idx = context_idx.index_copy(0, more, next_idx)
        return lm_score, context_idx


@dataclass(frozen=True, eq=False)
class ArcSet:
    """A subset of a graph's arcs, sorted by source state.

    Args:
        arc_begin: (S + 1,) int64.
        dst_state: (E,) int32.
        token_id: (E,) int32.
        score: (E,) float32, graph score and word insertion penalty, scaled.
        graph_arc: (E,) int64, the index of each arc in the graph; None if the indices are equal.
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


class Searchable(Protocol):
    """The interface of graphs that can be searched: states, emitting arcs, optional epsilon arcs, and final scores.

    `final_score` (S,) is scaled, `final_graph_score` (S,) is not; both are -inf where a path may not end. `is_pushed`
    says whether a partial path's score is that of its best completion; most tokens then survive.
    """

    num_states: int
    emitting: ArcSet
    epsilon: ArcSet | None
    final_score: Tensor
    final_graph_score: Tensor
    is_pushed: bool


class SearchGraph:
    """A decoding graph with scaled scores, as the search reads it.

    Args:
        graph: the decoding graph.
        options: scales and penalty, which go into the scores.
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
            # 0 * -inf is NaN and a negative scale gives +inf, but non-final states must remain non-final.
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
