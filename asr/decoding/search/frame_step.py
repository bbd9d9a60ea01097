"""One frame of the token search, for all streams together.

Shapes: N streams, S states, K partial paths before the frame, A expanded arcs, K' partial paths after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.decoding.lattice.records import LatticeRecords
from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.cut_off import best_score, survivors
from asr.decoding.search.frame_form import frame_halves
from asr.decoding.search.reading import FrameHalves
from asr.decoding.search.search_graph import ArcSet, Searchable
from asr.decoding.search.token_step import NOT_REACHED, best_of_group, expand, recombine
from asr.decoding.search.tokens import Candidates, Tokens
from asr.lm.contract import LanguageModel

# A table with one place for each (stream, state) is faster than hashing, while it is of a sensible size.
_LARGEST_TABLE = 1 << 24


class FrameStep:
    """Expands, scores, recombines and prunes. Arguments as of `TokenSearch`.

    Loops or kernels do most of it, where they run and `form` does not say otherwise; see `frame_form`.
    """

    def __init__(
        self,
        graph: Searchable,
        options: DecodingOptions,
        lm: LanguageModel | None,
        backtrace: Backtrace,
        lattice: LatticeRecords | None,
        form: str = "auto",
    ) -> None:
        self._graph = graph
        self._options = options
        self._lm = lm
        self._backtrace = backtrace
        self._lattice = lattice
        self._table: Tensor | None = None
        self._halves = frame_halves(form, graph, options, lm is not None)

    def read(self, tokens: Tokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor) -> Tokens:
        """Reads a frame.

        Args:
            tokens: what is alive, `stream` numbering the rows of the next two.
            log_prob: scaled log-probabilities of all streams and frames, flat.
            frame_begin: (N,) int64, where the stream's frame begins in `log_prob`.
            offset: (N,) float64, what relative scores lack; changed in place.
        """
        if self._halves is not None:
            # Triton launches on the current device.
            with torch.cuda.device_of(offset):
                kept = self._read_in_halves(self._halves, tokens, log_prob, frame_begin, offset)
            return self.follow_epsilons(kept, offset)
        arcs = self._graph.emitting
        source, arc = expand(arcs.arc_begin, tokens.state)
        column = arcs.token_id.index_select(0, arc).to(torch.int64)
        if len(offset) == 1:
            stream = torch.zeros_like(source)
            column += frame_begin
        else:
            stream = tokens.stream.index_select(0, source)
            column += frame_begin.index_select(0, stream)
        score = tokens.score.index_select(0, source)
        score += arcs.score.index_select(0, arc)
        score += log_prob.index_select(0, column)
        candidates = self._extend(tokens, arcs, source, arc, stream, score, offset)
        winner, position = self._winners(candidates, offset)
        return self.follow_epsilons(self._kept(tokens, arcs, candidates, winner, position), offset)

    def _read_in_halves(
        self, halves: FrameHalves, tokens: Tokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor
    ) -> Tokens:
        arcs, before = self._graph.emitting, offset.clone()
        found, is_complete = halves.expand(tokens, log_prob, frame_begin, offset)
        while True:
            candidates = self._with_words(tokens, arcs, *found, offset)
            if self._lm is not None and self._options.max_contexts_per_state is not None:
                winner, position, is_enough = *self._winners(candidates, offset), True
            else:
                winner, position, is_enough = halves.keep(
                    candidates.stream, candidates.state, candidates.context_idx, candidates.score, is_complete
                )
            if is_enough:
                return self._kept(tokens, arcs, candidates, winner, position)
            # Fewer than min_active_states are near the best: those that were left out count after all.
            offset.copy_(before)
            found, is_complete = halves.expand(tokens, log_prob, frame_begin, offset, everything=True)

    def follow_epsilons(self, tokens: Tokens, offset: Tensor) -> Tokens:
        """Takes arcs that read nothing until nothing new or better comes of it."""
        arcs = self._graph.epsilon
        if arcs is None:
            return tokens
        newest = tokens
        while len(newest):
            source, arc = expand(arcs.arc_begin, newest.state)
            if not len(source):
                break
            stream = newest.stream.index_select(0, source)
            score = newest.score.index_select(0, source) + arcs.score.index_select(0, arc)
            shift = torch.zeros_like(offset)
            candidates = self._extend(newest, arcs, source, arc, stream, score, shift)
            # Both sets relative to the same best.
            candidates.score += shift.index_select(0, candidates.stream).float()
            both = Tokens.join([tokens, self._tokens_of(newest, candidates)])
            both.score = _relative(both.score, both.stream, offset)
            context_idx = None if self._lm is None else both.context_idx
            winner = recombine(self._place(both.stream, both.state), both.score, context_idx)
            lost = winner != torch.arange(len(winner), device=winner.device)
            kept = self._survivors(both.score.masked_fill(lost, -torch.inf), both.stream, len(offset), is_limited=False)
            is_new = kept >= len(tokens)
            old, new = kept[~is_new], kept[is_new]
            newest = both.select(new)
            arc = arcs.arc_of(candidates.arc.index_select(0, new - len(tokens)))
            newest.record = self._backtrace.add(newest.record, arc)
            tokens = Tokens.join([both.select(old), newest])
        tokens = tokens.select(self._survivors(tokens.score, tokens.stream, len(offset)))
        # Compiled loops want the paths of a stream side by side.
        return tokens if len(offset) == 1 else tokens.select(torch.sort(tokens.stream, stable=True).indices)

    def _extend(
        self,
        tokens: Tokens,
        arcs: ArcSet,
        source: Tensor,
        arc: Tensor,
        stream: Tensor,
        score: Tensor,
        offset: Tensor,
    ) -> Candidates:
        """Scores the words of arcs; source, arc, stream, score (A,)."""
        options = self._options
        score = _relative(score, stream, offset)
        if self._lm is not None:
            # The graph's own scores decide which words are worth asking the language model for.
            if options.word_beam is not None:
                dropped = (arcs.words.num_words.index_select(0, arc) > 0) & (score < -options.word_beam)
                score.masked_fill_(dropped, -torch.inf)
            chosen = self._survivors(score, stream, len(offset), is_limited=False)
            source, arc = source.index_select(0, chosen), arc.index_select(0, chosen)
            score, stream = score.index_select(0, chosen), stream.index_select(0, chosen)
        return self._with_words(tokens, arcs, source, arc, stream, score, offset)

    def _with_words(
        self, tokens: Tokens, arcs: ArcSet, source: Tensor, arc: Tensor, stream: Tensor, score: Tensor, offset: Tensor
    ) -> Candidates:
        """Adds what the language model says; source, arc, stream, score (A,)."""
        context_idx = lm_score = None
        if self._lm is not None:
            context_idx = tokens.context_idx.index_select(0, source)
            changed, word_score, next_idx = arcs.words.score(self._lm, arc, context_idx)
            context_idx.index_copy_(0, changed, next_idx)
            score.index_add_(0, changed, word_score, alpha=self._options.lm_scale)
            lm_score = tokens.lm_score.index_select(0, source)
            lm_score.index_add_(0, changed, word_score.double())
            score = _relative(score, stream, offset)
        state = arcs.dst_state.index_select(0, arc).to(torch.int64)
        return Candidates(source, arc, stream, score, state, context_idx, lm_score)

    def _winners(self, candidates: Candidates, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Recombines and prunes: the winner that each candidate lost to (A,), and the positions of those that stay."""
        place = self._place(candidates.stream, candidates.state)
        table = self._table_for(len(offset))
        winner = recombine(place, candidates.score, candidates.context_idx, table)
        lost = winner != torch.arange(len(winner), device=winner.device)
        score = candidates.score.masked_fill(lost, -torch.inf)
        limit = self._options.max_contexts_per_state
        if limit is not None and candidates.context_idx is not None:
            score.masked_fill_(~best_of_group(place, score, limit), -torch.inf)
        return winner, self._survivors(score, candidates.stream, len(offset))

    def _kept(self, tokens: Tokens, arcs: ArcSet, candidates: Candidates, winner: Tensor, position: Tensor) -> Tokens:
        """Those that stay, each with a record."""
        kept = self._tokens_of(tokens, candidates, position)
        arc = arcs.arc_of(candidates.arc.index_select(0, position))
        kept.record = self._backtrace.add(kept.record, arc)
        if self._lattice is not None:
            self._lattice.add(tokens, candidates, arcs.arc_of(candidates.arc), winner, position, kept.record)
        return kept

    def _tokens_of(self, tokens: Tokens, candidates: Candidates, position: Tensor | None = None) -> Tokens:
        """Some candidates as partial paths, or all, each with the record of the path that it goes on from."""

        def some(value: Tensor) -> Tensor:
            return value if position is None else value.index_select(0, position)

        source = some(candidates.source)
        if candidates.context_idx is None or candidates.lm_score is None:
            context_idx = tokens.context_idx.index_select(0, source)
            lm_score = tokens.lm_score.index_select(0, source)
        else:
            context_idx, lm_score = some(candidates.context_idx), some(candidates.lm_score)
        record = tokens.record.index_select(0, source)
        return Tokens(
            some(candidates.stream), some(candidates.state), context_idx, some(candidates.score), lm_score, record
        )

    def _place(self, stream: Tensor, state: Tensor) -> Tensor:
        """One number for each stream and state."""
        place = stream * self._graph.num_states
        place += state
        return place

    def _table_for(self, num_streams: int) -> Tensor | None:
        size = num_streams * self._graph.num_states
        if self._lm is not None or size > _LARGEST_TABLE:
            return None
        if self._table is None or len(self._table) < size:
            device = self._graph.final_score.device
            self._table = torch.full((size,), NOT_REACHED, dtype=torch.int64, device=device)
        return self._table

    def _survivors(self, score: Tensor, stream: Tensor, num_streams: int, is_limited: bool = True) -> Tensor:
        options = self._options
        max_active = options.max_active_states if is_limited else None
        return survivors(score, stream, num_streams, options.search_beam, options.min_active_states, max_active)


def _relative(score: Tensor, stream: Tensor, offset: Tensor) -> Tensor:
    """Scores relative to the best of each stream, which is added to the stream's offset in place."""
    best = best_score(score, stream, len(offset))
    best = torch.where(best > -torch.inf, best, torch.zeros_like(best))
    offset += best
    score -= best if len(best) == 1 else best.index_select(0, stream)
    return score
