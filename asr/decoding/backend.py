"""The search as its backends see it: the graph, tokens and candidates, and what a backend computes in a frame.

`asr.decoding.frame` is the algorithm in plain torch. A backend computes the same with numba or Triton, bit for bit. A
`FrameBackend` does the parts of a frame before and after the language model; a backend may also process whole chunks
(`asr.decoding.chunk_backend`). `asr.decoding.selection.select_backend` chooses.

Shapes: N streams, S states, E arcs of a set, W words, K active tokens, A candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from asr import old_paths
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.interface import LanguageModel


def expand(arc_begin: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Lists all arcs that leave the states of some tokens, by prefix sums.

    Args:
        arc_begin: (S + 1,) int64, arcs of state s are arc_begin[s] to arc_begin[s + 1].
        state: (K,) int64.

    Returns:
        source (A,) the token, and arc (A,) the arc, in token order; both int64.
    """
    begin = arc_begin.index_select(0, state)
    num_arcs = arc_begin.index_select(0, state + 1) - begin
    end = num_arcs.cumsum(0)
    total = int(end[-1]) if len(end) else 0
    source = torch.repeat_interleave(num_arcs, output_size=total)
    arc = (begin - end + num_arcs).index_select(0, source)
    arc += torch.arange(total, device=state.device)
    return source, arc


class ArcWords:
    """The words of arcs, in order; an arc has zero, one or several.

    Args:
        word_begin: (E + 1,) int64, words of arc e are word_id[word_begin[e]] to word_id[word_begin[e + 1]].
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
            return changed, torch.zeros(0, dtype=torch.float32, device=arc.device), context_idx
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

    Raises:
        AsrError: a cycle of input epsilons gains score.
    """

    is_pushed = False

    def __init__(self, graph: DecodingGraph, options: DecodingOptions) -> None:
        self.num_states = graph.num_states
        # Steps without effect are left out, since their results would be as large as the graph.
        score = graph.score if options.graph_scale == 1.0 else graph.score * options.graph_scale
        if options.word_insertion_penalty:
            num_words = graph.word_begin[1:] - graph.word_begin[:-1]
            score = score + num_words.to(score.dtype) * options.word_insertion_penalty
        self.final_graph_score = graph.final_score
        self.final_score = graph.final_score * options.graph_scale
        self.epsilon: ArcSet | None = None
        if options.graph_scale == 0.0:  # 0 * -inf is NaN, but non-final states must remain non-final
            self.final_score = self.final_score.masked_fill(graph.final_score == -torch.inf, -torch.inf)
        if graph.has_epsilons:
            reads = graph.token_id >= 0
            self.emitting = _subset(graph, score, reads)
            self.epsilon = _subset(graph, score, ~reads)
            _refuse_gain(self.epsilon)
        else:
            words = ArcWords(graph.word_begin, graph.word_id)
            self.emitting = ArcSet(graph.arc_begin, graph.dst_state.int(), graph.token_id.int(), score, None, words)


def _subset(graph: DecodingGraph, score: Tensor, chosen: Tensor) -> ArcSet:
    arc = chosen.nonzero().squeeze(1)
    before = torch.zeros(graph.num_arcs + 1, dtype=torch.int64, device=graph.device)
    before[1:] = chosen.cumsum(0)
    return ArcSet(
        before[graph.arc_begin],
        graph.dst_state[arc].int(),
        graph.token_id[arc].int(),
        score[arc],
        arc,
        ArcWords.of_arcs(graph.word_begin, graph.word_id, arc),
    )


# Exceeds the rounding error of a cycle's score.
_NO_GAIN = 1e-6


def _refuse_gain(epsilon: ArcSet) -> None:
    """Raises AsrError if a cycle of epsilon arcs gains score, because a search would follow it for ever."""
    begin, dst, score = (part.cpu().numpy() for part in (epsilon.arc_begin, epsilon.dst_state, epsilon.score))
    src = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
    while True:  # arcs that leave states without an arc to them are on no cycle
        is_entered = np.zeros(len(begin) - 1, dtype=np.bool_)
        is_entered[dst] = True
        if is_entered[src].all():
            break
        src, dst, score = (part[is_entered[src]] for part in (src, dst, score))
    best = np.zeros(len(begin) - 1)
    for _ in range(len(np.unique(src)) + 1 if len(src) else 0):
        further = best.copy()
        np.maximum.at(further, dst, best[src] + score)
        if (further <= best + _NO_GAIN).all():
            return
        best = further
    if len(src):
        raise AsrError(
            "the graph has a cycle of arcs that read no frame and gain score, so that no path is the best; remove the "
            "cycle, or lower its scores or the word insertion penalty."
        )


@dataclass
class ActiveTokens:
    """K partial paths. Those of a stream are adjacent.

    Args:
        stream: (K,) int64, the utterance that each belongs to.
        state: (K,) int64, graph state or lattice state.
        context_idx: (K,) int64, word history.
        score: (K,) float32, relative to the best of its stream; the stream's `score_offset` makes it absolute.
        lm_score: (K,) float64, the language model score of the path, unscaled.
        backpointer: (K,) int64, entry of the `Backtrace`, -1 at the start.
    """

    stream: Tensor
    state: Tensor
    context_idx: Tensor
    score: Tensor
    lm_score: Tensor
    backpointer: Tensor

    def __len__(self) -> int:
        return len(self.state)

    @staticmethod
    def empty(device: torch.device) -> ActiveTokens:
        """No tokens."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        return ActiveTokens(none, none, none, none.float(), none.double(), none)

    @staticmethod
    def initial(stream: Tensor, state: Tensor, context_idx: Tensor) -> ActiveTokens:
        """Paths that have read nothing yet, (K,) each."""
        zeros = torch.zeros_like(stream)
        return ActiveTokens(stream, state, context_idx, zeros.float(), zeros.double(), zeros - 1)

    def select(self, position: Tensor) -> ActiveTokens:
        """The tokens at these positions, in this order."""
        return ActiveTokens(*(getattr(self, field.name).index_select(0, position) for field in fields(self)))

    def split(self, sizes: list[int]) -> list[ActiveTokens]:
        """Splits the tokens into consecutive parts of these sizes."""
        columns = [getattr(self, field.name).split(sizes) for field in fields(self)]
        return [ActiveTokens(*parts) for parts in zip(*columns, strict=True)]

    @staticmethod
    def join(parts: list[ActiveTokens]) -> ActiveTokens:
        """Concatenates several sets."""
        if len(parts) == 1:
            return parts[0]
        return ActiveTokens(
            *(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(ActiveTokens))
        )


def best_score(score: Tensor, stream: Tensor, num_streams: int) -> Tensor:
    """The best score of each stream, (N,); -inf for streams without scores."""
    best = torch.full((num_streams,), -torch.inf, dtype=score.dtype, device=score.device)
    if num_streams == 1:
        return score.amax(0, keepdim=True) if len(score) else best
    return best.scatter_reduce_(0, stream, score, "amax")


def normalize_scores(score: Tensor, stream: Tensor, score_offset: Tensor) -> Tensor:
    """Subtracts each stream's best score, (K,) -> (K,), and adds it to `score_offset` (N,) in place."""
    best = best_score(score, stream, len(score_offset))
    best = torch.where(best > -torch.inf, best, torch.zeros_like(best))
    score_offset += best
    score -= best if len(best) == 1 else best.index_select(0, stream)
    return score


class Expansion(NamedTuple):
    """Tokens and the arcs that extend them.

    Attributes:
        source, arc, stream: (A,) int64, see `Candidates`.
        score: (A,) float32, relative to the stream's best, without the language model.
        is_complete: (N,) bool, see `Candidates`.
        with_words: ascending positions of those whose arcs have words; None if not computed yet.
    """

    source: Tensor
    arc: Tensor
    stream: Tensor
    score: Tensor
    is_complete: Tensor
    with_words: Tensor | None = None


@dataclass
class Candidates:
    """Tokens extended over arcs, before recombination.

    Args:
        source: (A,) int64, the token that is extended.
        arc: (A,) int64, the arc's position in its `ArcSet`.
        stream: (A,) int64.
        score: (A,) float32, relative to the stream's best.
        state: (A,) int64, the arc's destination.
        context_idx: (A,) int64, None without a language model.
        lm_score: (A,) float64, None without a language model.
        is_complete: (N,) bool, False if a candidate of the stream was left out that might have survived.
    """

    source: Tensor
    arc: Tensor
    stream: Tensor
    score: Tensor
    state: Tensor
    context_idx: Tensor | None
    lm_score: Tensor | None
    is_complete: Tensor


class Survivors(NamedTuple):
    """The outcome of recombination and pruning.

    Attributes:
        winner: (A,) int64, the position of the candidate that each lost to, or its own if it won.
        kept: (K',) int64, ascending positions of the winners that survive.
        is_complete: False if a candidate that was left out might have survived; then expand again with `prune=False`.
    """

    winner: Tensor
    kept: Tensor
    is_complete: bool


class Frame(NamedTuple):
    """One frame of all streams.

    Attributes:
        log_prob: scaled log-probabilities of all streams and frames, flattened.
        begin: (N,) int64, where each stream's frame begins in `log_prob`.
        score_offset: (N,) float64, added to relative scores to give absolute ones; changed in place.
    """

    log_prob: Tensor
    begin: Tensor
    score_offset: Tensor


class FrameBackend(Protocol):
    """One frame of the search without the language model; the reference is `asr.decoding.frame.TorchFrameBackend`."""

    def expand(self, tokens: ActiveTokens, frame: Frame, *, prune: bool = True) -> Expansion:
        """Extends tokens over the arcs that leave their states.

        Args:
            tokens: grouped by stream; `stream` indexes the rows of the frame.
            frame: the best score of each stream is added to its `score_offset`.
            prune: whether candidates far below the best may be left out.

        Returns:
            With a language model, the candidates whose words it must score. Without one, at least all survivors.
        """

    def recombine_and_prune(self, candidates: Candidates) -> Survivors:
        """Keeps the best candidate of each (stream, state, context), and prunes these by beam and limits."""


old_paths.offer(__name__)
