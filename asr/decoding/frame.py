"""Token passing in plain torch, and the four steps of a frame: expand, score words, recombine, prune.

`TokenSearch` advances many streams by chunks of any size. `FrameSearch.advance` is the algorithm for one frame, both
for searching a decoding graph and for rescoring a lattice. `TorchFrameBackend` is the reference implementation, which
the numba and Triton backends must match bit for bit.

Shapes: N streams of a call, T frames, C acoustic tokens, K active tokens before a frame, A candidates, K' tokens after
it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asr.decoding.backend import (
    ActiveTokens,
    ArcSet,
    Candidates,
    Expansion,
    Frame,
    FrameBackend,
    Searchable,
    Survivors,
    expand,
    normalize_scores,
)
from asr.decoding.backtrace import Backtrace
from asr.decoding.chunk_backend import Chunk, ChunkBackend, SearchSink
from asr.decoding.lattice_records import LatticeRecords
from asr.decoding.recombination import NOT_REACHED, best_of_group, prune_tokens, recombine
from asr.decoding.settings import DecodingOptions
from asr.kernels.memory import to_device
from asr.lm.interface import LanguageModel, contexts_at_start

ROUNDING_SLACK = 0.01
"""Exceeds the rounding error of a difference of two scores. Compiled backends prune candidates that are outside the
beam by more than this before the best score of the frame is known."""

# A table with one entry for each (stream, state) is faster than hashing, up to this size.
_LARGEST_TABLE = 1 << 24
FRAMES_BETWEEN_COLLECTIONS = 16
"""Number of frames between two calls of `LanguageModel.retain`, which say what contexts are in use."""


class TokenSearch:
    """A search whose streams may join and leave between chunks.

    Args:
        graph: the prepared graph, or a prepared lattice.
        options: beams and scales.
        lm: language model inside the search, or None.
        backend: made for the same graph, options, language model and lattice setting; no other search uses it at the
            same time.
        backtrace: stores the backpointers.
        lattice: stores the losing arcs, or None.
        held: (H,) int64, contexts in use elsewhere, which the language model must not forget because of this search.
    """

    def __init__(
        self,
        graph: Searchable,
        options: DecodingOptions,
        lm: LanguageModel | None,
        backend: ChunkBackend,
        backtrace: Backtrace,
        lattice: LatticeRecords | None = None,
        *,
        held: Tensor | None = None,
    ) -> None:
        self._graph = graph
        self._options = options
        self._lm = lm
        self._held = () if held is None else (held,)
        self._backtrace = backtrace
        self._lattice = lattice
        self._backend = backend
        self._device = graph.final_score.device
        self._tokens = ActiveTokens.empty(self._device)
        self._score_offset = torch.zeros(0, dtype=torch.float64, device=self._device)
        self._free_streams: list[int] = []

    def start(self, state: Tensor, lm_state: Tensor | None = None) -> Tensor:
        """Opens streams that begin in the given states (N,) int64 -> their numbers (N,) int64.

        lm_state (N, D) is what the language model carries over from earlier sentences, or None.
        """
        num_streams = len(state)
        num_new = max(0, num_streams - len(self._free_streams))
        self._free_streams += range(len(self._score_offset), len(self._score_offset) + num_new)
        self._score_offset = torch.cat([self._score_offset, self._score_offset.new_zeros(num_new)])
        chosen, self._free_streams = self._free_streams[:num_streams], self._free_streams[num_streams:]
        stream = to_device(torch.tensor(chosen, dtype=torch.int64), self._device)
        self._score_offset.index_fill_(0, stream, 0.0)
        context_idx = torch.zeros_like(stream)
        if self._lm is not None:
            context_idx = contexts_at_start(self._lm, num_streams, lm_state)
        tokens = ActiveTokens.initial(torch.arange(num_streams, device=self._device), state, context_idx)
        score_offset = self._score_offset.new_zeros(num_streams)
        tokens = follow_epsilons(tokens, score_offset, self._backtrace, self._graph, self._options, self._lm)
        self._score_offset[stream] += score_offset
        tokens.stream = stream.index_select(0, tokens.stream)
        self._tokens = ActiveTokens.join([self._tokens, tokens])
        return stream

    def advance(self, stream: Tensor, log_prob: Tensor, num_frames: Tensor) -> None:
        """Searches a chunk.

        Args:
            stream: (N,) int64, distinct.
            log_prob: (N, T, C) float32.
            num_frames: (N,) int64.
        """
        row_of = torch.full_like(self._score_offset, -1, dtype=torch.int64)
        row_of[stream] = torch.arange(len(stream), device=self._device)
        row = row_of.index_select(0, self._tokens.stream)
        if len(stream) == len(self._score_offset) - len(self._free_streams):
            # All open streams advance: no search for their tokens, for which the host would wait for a GPU.
            waiting, tokens = ActiveTokens.empty(self._device), replace(self._tokens, stream=row)
        else:
            waiting = self._tokens.select((row < 0).nonzero().squeeze(1))
            chosen = (row >= 0).nonzero().squeeze(1)
            tokens = self._tokens.select(chosen)
            tokens.stream = row.index_select(0, chosen)
        chunk = Chunk(log_prob * self._options.am_scale, num_frames, self._score_offset.index_select(0, stream))
        sink = SearchSink(self._backtrace, self._lattice, lambda parts: self._collect([waiting, *parts]))
        tokens = self._backend.search(tokens, chunk, sink)
        tokens.stream = stream.index_select(0, tokens.stream)
        self._score_offset[stream] = chunk.score_offset
        self._tokens = ActiveTokens.join([waiting, tokens])

    def active(self, stream: int) -> tuple[ActiveTokens, Tensor]:
        """A stream's active tokens, and the offset that makes their scores absolute, (1,) float64."""
        tokens = self._tokens.select((self._tokens.stream == stream).nonzero().squeeze(1))
        return tokens, self._score_offset[stream : stream + 1]

    def all_active(self) -> tuple[ActiveTokens, Tensor]:
        """The active tokens of all streams, and the score offset of each stream, (N,) float64."""
        return self._tokens, self._score_offset

    def keep(self, stream: int, kept: Tensor) -> None:
        """Drops a stream's tokens that are not kept; (K,) bool in the order of `active`."""
        others = (self._tokens.stream != stream).nonzero().squeeze(1)
        own = (self._tokens.stream == stream).nonzero().squeeze(1)
        self._tokens = self._tokens.select(torch.cat([others, own[kept]]))

    def drop(self, stream: int) -> None:
        """Closes a stream; its number may be reused."""
        self._tokens = self._tokens.select((self._tokens.stream != stream).nonzero().squeeze(1))
        self._free_streams.append(stream)

    def _collect(self, parts: list[ActiveTokens]) -> None:
        """Tells the language model which contexts are in use, and collects backpointers if that is due."""
        if self._lm is not None:
            self._lm.retain(torch.cat([*(part.context_idx for part in parts), *self._held]))
        if self._backtrace.is_due:
            living = torch.cat([part.backpointer for part in parts])
            backpointers = (
                self._backtrace.collect(living)
                if self._lattice is None
                else self._lattice.collect(self._backtrace, living)
            )
            for part, own in zip(parts, torch.split(backpointers, [len(part) for part in parts]), strict=True):
                part.backpointer = own


class FrameSearch:
    """Token passing, frame by frame, for all streams together: makes a `ChunkBackend` of a `FrameBackend`.

    Args:
        graph: the graph to search.
        options: beams and scales.
        lm: language model inside the search, or None.
        backend: runs all parts of a frame except the language model.
    """

    def __init__(
        self, graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, backend: FrameBackend
    ) -> None:
        self._graph = graph
        self._options = options
        self._lm = lm
        self._backend = backend

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """Like `ChunkBackend.search`."""
        log_prob, num_frames, score_offset = chunk
        num_streams, max_frames, num_columns = log_prob.shape
        flat = log_prob.reshape(-1)
        row_begin = torch.arange(num_streams, device=flat.device) * (max_frames * num_columns)
        ends = set(num_frames.tolist())
        finished: list[ActiveTokens] = []
        for frame in range(max_frames):
            if frame in ends:
                goes_on = num_frames.index_select(0, tokens.stream) > frame
                finished.append(tokens.select((~goes_on).nonzero().squeeze(1)))
                tokens = tokens.select(goes_on.nonzero().squeeze(1))
            if not len(tokens):
                break
            if sink.backtrace.is_due or frame % FRAMES_BETWEEN_COLLECTIONS == 0:
                sink.collect([*finished, tokens])
            tokens = self.advance(tokens, Frame(flat, row_begin + frame * num_columns, score_offset), sink)
        return ActiveTokens.join([*finished, tokens])

    def advance(self, tokens: ActiveTokens, frame: Frame, sink: SearchSink) -> ActiveTokens:
        """Tokens before a frame -> tokens after it; the frame's `score_offset` is changed in place."""
        arcs, offset_before = self._graph.emitting, frame.score_offset.clone()
        for prunes in (True, False):
            expansion = self._backend.expand(tokens, frame, prune=prunes)
            candidates = score_words(self._lm, self._options.lm_scale, tokens, arcs, expansion, frame.score_offset)
            survivors = self._backend.recombine_and_prune(candidates)
            if survivors.is_complete:
                break
            # Too few candidates are near the best to reach min_active_states, so repeat the frame without pruning.
            frame.score_offset.copy_(offset_before)
        kept = extended(tokens, candidates, survivors.kept)
        graph_arc = arcs.arc_of(candidates.arc)
        kept.backpointer = sink.backtrace.add(kept.backpointer, graph_arc.index_select(0, survivors.kept))
        if sink.lattice is not None:
            sink.lattice.add(tokens, candidates, graph_arc, survivors, kept.backpointer)
        return follow_epsilons(kept, frame.score_offset, sink.backtrace, self._graph, self._options, self._lm)


def follow_epsilons(
    tokens: ActiveTokens,
    score_offset: Tensor,
    backtrace: Backtrace,
    graph: Searchable,
    options: DecodingOptions,
    lm: LanguageModel | None,
) -> ActiveTokens:
    """Follows the graph's epsilon arcs until no token is new or better; score_offset (N,) is changed in place."""
    arcs = graph.epsilon
    if arcs is None:
        return tokens
    num_streams, newest = len(score_offset), tokens
    while len(newest):
        source, arc = expand(arcs.arc_begin, newest.state)
        if not len(source):
            break
        stream = newest.stream.index_select(0, source)
        score = newest.score.index_select(0, source) + arcs.score.index_select(0, arc)
        shift = torch.zeros_like(score_offset)
        score = normalize_scores(score, stream, shift)
        expansion = Expansion(source, arc, stream, score, torch.ones_like(shift, dtype=torch.bool))
        if lm is not None:
            expansion = prune_before_words(expansion, arcs, options)
        candidates = score_words(lm, options.lm_scale, newest, arcs, expansion, shift)
        # The scores of both sets must be relative to the same offset.
        candidates.score += shift.index_select(0, candidates.stream).float()
        both = ActiveTokens.join([tokens, extended(newest, candidates)])
        both.score = normalize_scores(both.score, both.stream, score_offset)
        context_idx = None if lm is None else both.context_idx
        winner = recombine(both.stream * graph.num_states + both.state, both.score, context_idx)
        score = only_winners(both.score, winner)
        kept = prune_tokens(score, both.stream, num_streams, options.search_beam, options.min_active_states, None)
        is_new = kept >= len(tokens)
        old, new = kept[~is_new], kept[is_new]
        newest = both.select(new)
        graph_arc = arcs.arc_of(candidates.arc.index_select(0, new - len(tokens)))
        newest.backpointer = backtrace.add(newest.backpointer, graph_arc)
        tokens = ActiveTokens.join([both.select(old), newest])
    tokens = tokens.select(_prune(tokens.score, tokens.stream, num_streams, options))
    # Backends require the tokens of a stream to be adjacent.
    return tokens if num_streams == 1 else tokens.select(torch.sort(tokens.stream, stable=True).indices)


def score_words(
    lm: LanguageModel | None,
    lm_scale: float,
    tokens: ActiveTokens,
    arcs: ArcSet,
    expansion: Expansion,
    score_offset: Tensor,
) -> Candidates:
    """Adds the language model's scores of the words on the arcs; score_offset (N,) is changed in place."""
    source, arc, stream, score, is_complete, with_words = expansion
    context_idx = lm_score = None
    if lm is not None:
        context_idx = tokens.context_idx.index_select(0, source)
        has_words, word_score, next_idx = arcs.words.score(lm, arc, context_idx, with_words)
        context_idx.index_copy_(0, has_words, next_idx)
        score.index_add_(0, has_words, word_score, alpha=lm_scale)
        lm_score = tokens.lm_score.index_select(0, source)
        lm_score.index_add_(0, has_words, word_score.double())
        score = normalize_scores(score, stream, score_offset)
    state = arcs.dst_state.index_select(0, arc).to(torch.int64)
    return Candidates(source, arc, stream, score, state, context_idx, lm_score, is_complete)


def prune_before_words(expansion: Expansion, arcs: ArcSet, options: DecodingOptions) -> Expansion:
    """Prunes candidates by the graph's own scores, before the language model scores their words."""
    source, arc, stream, score, is_complete, _ = expansion
    if options.skip_beam is not None:
        dropped = (arcs.words.num_words.index_select(0, arc) > 0) & (score < -options.skip_beam)
        score = score.masked_fill(dropped, -torch.inf)
    kept = prune_tokens(score, stream, len(is_complete), options.search_beam, options.min_active_states, None)
    source, arc, stream, score = (part.index_select(0, kept) for part in (source, arc, stream, score))
    return Expansion(source, arc, stream, score, is_complete)


def only_winners(score: Tensor, winner: Tensor) -> Tensor:
    """Sets scores (A,) of candidates that lost in recombination to -inf; winner (A,)."""
    lost = winner != torch.arange(len(winner), device=winner.device)
    return score.masked_fill(lost, -torch.inf)


def _prune(score: Tensor, stream: Tensor, num_streams: int, options: DecodingOptions) -> Tensor:
    limits = options.min_active_states, options.max_active_states
    return prune_tokens(score, stream, num_streams, options.search_beam, *limits)


def extended(tokens: ActiveTokens, candidates: Candidates, position: Tensor | None = None) -> ActiveTokens:
    """Candidates, all or those at `position`, as tokens with the backpointers of the tokens that they extend."""

    def some(value: Tensor) -> Tensor:
        return value if position is None else value.index_select(0, position)

    source = some(candidates.source)
    if candidates.context_idx is None or candidates.lm_score is None:
        context_idx = tokens.context_idx.index_select(0, source)
        lm_score = tokens.lm_score.index_select(0, source)
    else:
        context_idx, lm_score = some(candidates.context_idx), some(candidates.lm_score)
    backpointer = tokens.backpointer.index_select(0, source)
    return ActiveTokens(
        some(candidates.stream), some(candidates.state), context_idx, some(candidates.score), lm_score, backpointer
    )


class TorchFrameBackend:
    """The reference implementation of `FrameBackend`, on any device.

    Args:
        graph: on the device of the search.
        options: beams and limits.
        has_lm: whether a language model takes part.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, has_lm: bool) -> None:
        self._arcs = graph.emitting
        self._num_states = graph.num_states
        self._options = options
        self._has_lm = has_lm
        self._table: Tensor | None = None

    def expand(self, tokens: ActiveTokens, frame: Frame, *, prune: bool = True) -> Expansion:
        """Like `FrameBackend.expand`; without a language model, nothing is pruned."""
        arcs = self._arcs
        source, arc = expand(arcs.arc_begin, tokens.state)
        column = arcs.token_id.index_select(0, arc).to(torch.int64)
        if len(frame.begin) == 1:
            stream = torch.zeros_like(source)
            column += frame.begin
        else:
            stream = tokens.stream.index_select(0, source)
            column += frame.begin.index_select(0, stream)
        score = tokens.score.index_select(0, source)
        score += arcs.score.index_select(0, arc)
        score += frame.log_prob.index_select(0, column)
        score = normalize_scores(score, stream, frame.score_offset)
        is_complete = torch.ones_like(frame.begin, dtype=torch.bool)
        expansion = Expansion(source, arc, stream, score, is_complete)
        return prune_before_words(expansion, arcs, self._options) if self._has_lm else expansion

    def recombine_and_prune(self, candidates: Candidates) -> Survivors:
        """Like `FrameBackend.recombine_and_prune`."""
        num_streams, stream = len(candidates.is_complete), candidates.stream
        place = stream * self._num_states + candidates.state
        winner = recombine(place, candidates.score, candidates.context_idx, self._table_for(num_streams))
        score = only_winners(candidates.score, winner)
        limit = self._options.max_contexts_per_state
        if limit is not None and candidates.context_idx is not None:
            score.masked_fill_(~best_of_group(place, score, limit), -torch.inf)
        return Survivors(winner, _prune(score, stream, num_streams, self._options), True)

    def _table_for(self, num_streams: int) -> Tensor | None:
        size = num_streams * self._num_states
        if self._has_lm or size > _LARGEST_TABLE:
            return None
        if self._table is None or len(self._table) < size:
            self._table = torch.full((size,), NOT_REACHED, dtype=torch.int64, device=self._arcs.score.device)
        return self._table


class SplitFrameBackend:
    """Expands with one backend, and recombines and prunes with another.

    Args:
        expanding, recombining: backends for the same graph and options.
    """

    def __init__(self, expanding: FrameBackend, recombining: FrameBackend) -> None:
        self.expand = expanding.expand
        self.recombine_and_prune = recombining.recombine_and_prune
