"""Frame-synchronous token passing over many streams at once, fed in chunks of any size.

Shapes: N streams, T frames, C acoustic tokens, K partial paths, A expanded arcs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.decoding.backtrace import Backtrace
from asr.decoding.cut_off import best_score, survivors
from asr.decoding.lattice_records import LatticeRecords
from asr.decoding.options import DecodingOptions
from asr.decoding.search_graph import ArcSet, Searchable
from asr.decoding.token_step import best_of_group, expand, recombine
from asr.decoding.tokens import Tokens
from asr.lm.contract import LanguageModel

_CONTEXT_BITS = 31


class TokenSearch:
    """The search behind the torch pass; streams may join and leave between chunks.

    Args:
        graph: the prepared graph, or a lattice made ready in its stead.
        options: beams and scales.
        lm: language model that takes part in the search, or None.
        word_map: (V,) the graph's word ids to the language model's, or None where they are the same.
        backtrace: where the paths are remembered.
        lattice: where the alternatives are remembered, or None.
    """

    def __init__(
        self,
        graph: Searchable,
        options: DecodingOptions,
        lm: LanguageModel | None,
        word_map: Tensor | None,
        backtrace: Backtrace,
        lattice: LatticeRecords | None = None,
    ) -> None:
        self._graph = graph
        self._options = options
        self._lm = lm
        self._word_map = word_map
        self._backtrace = backtrace
        self._lattice = lattice
        self._device = graph.final_score.device
        self._tokens = Tokens.none(self._device)
        self._score_offset = torch.zeros(0, dtype=torch.float64, device=self._device)
        self._free_streams: list[int] = []

    def start(self, state: Tensor) -> Tensor:
        """Adds streams that have read nothing yet, state (N,) int64 where each begins -> their numbers (N,) int64."""
        num_streams = len(state)
        num_new = max(0, num_streams - len(self._free_streams))
        self._free_streams += range(len(self._score_offset), len(self._score_offset) + num_new)
        self._score_offset = torch.cat([self._score_offset, self._score_offset.new_zeros(num_new)])
        chosen, self._free_streams = self._free_streams[:num_streams], self._free_streams[num_streams:]
        stream = torch.tensor(chosen, dtype=torch.int64, device=self._device)
        self._score_offset[stream] = 0.0
        context_idx = torch.zeros_like(stream) if self._lm is None else self._lm.start(num_streams)
        tokens = Tokens.starting(torch.arange(num_streams, device=self._device), state, context_idx)
        offset = self._score_offset.new_zeros(num_streams)
        tokens = self._follow_epsilons(tokens, offset)
        self._score_offset[stream] += offset
        tokens.stream = stream.index_select(0, tokens.stream)
        self._tokens = Tokens.join([self._tokens, tokens])
        return stream

    def advance(self, stream: Tensor, log_prob: Tensor, num_frames: Tensor) -> None:
        """Reads a chunk.

        Args:
            stream: (N,) int64, distinct.
            log_prob: (N, T, C) float32.
            num_frames: (N,) int64.
        """
        max_frames, num_columns = log_prob.shape[1:]
        flat = (log_prob * self._options.am_scale).reshape(-1)
        row_begin = torch.arange(len(stream), device=self._device) * (max_frames * num_columns)
        row_of = torch.full_like(self._score_offset, -1, dtype=torch.int64)
        row_of[stream] = torch.arange(len(stream), device=self._device)
        row = row_of.index_select(0, self._tokens.stream)
        waiting = [self._tokens.select((row < 0).nonzero().squeeze(1))]
        chosen = (row >= 0).nonzero().squeeze(1)
        tokens = self._tokens.select(chosen)
        tokens.stream = row.index_select(0, chosen)
        offset = self._score_offset.index_select(0, stream)
        ends = set(num_frames.tolist())
        for frame in range(max_frames):
            if frame in ends:
                going = num_frames.index_select(0, tokens.stream) > frame
                done = tokens.select((~going).nonzero().squeeze(1))
                done.stream = stream.index_select(0, done.stream)
                waiting.append(done)
                tokens = tokens.select(going.nonzero().squeeze(1))
            if not len(tokens):
                break
            self._collect([*waiting, tokens])
            tokens = self._step(tokens, flat, row_begin + frame * num_columns, offset)
        tokens.stream = stream.index_select(0, tokens.stream)
        self._score_offset[stream] = offset
        self._tokens = Tokens.join([*waiting, tokens])

    def alive(self, stream: int) -> tuple[Tokens, float]:
        """What is alive in a stream, and what is to be added to its relative scores."""
        tokens = self._tokens.select((self._tokens.stream == stream).nonzero().squeeze(1))
        return tokens, float(self._score_offset[stream])

    def drop(self, stream: int) -> None:
        """Forgets a stream; its number may be given to another."""
        self._tokens = self._tokens.select((self._tokens.stream != stream).nonzero().squeeze(1))
        self._free_streams.append(stream)

    def _collect(self, parts: list[Tokens]) -> None:
        if self._backtrace.is_due:
            records = self._backtrace.collect(torch.cat([part.record for part in parts]))
            for part, record in zip(parts, torch.split(records, [len(part) for part in parts]), strict=True):
                part.record = record

    def _step(self, tokens: Tokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor) -> Tokens:
        """One frame: log_prob (N * T * C,), frame_begin (N,) each stream's place there, offset (N,) is changed."""
        arcs = self._graph.emitting
        source, arc = expand(arcs.arc_begin, tokens.state)
        column = frame_begin.index_select(0, tokens.stream).index_select(0, source)
        column += arcs.token_id.index_select(0, arc)
        score = tokens.score.index_select(0, source)
        score += arcs.score.index_select(0, arc)
        score += log_prob.index_select(0, column)
        tokens = self._keep(tokens, self._extend(tokens, arcs, source, arc, score, offset), offset)
        return self._follow_epsilons(tokens, offset)

    def _extend(
        self, tokens: Tokens, arcs: ArcSet, source: Tensor, arc: Tensor, score: Tensor, offset: Tensor
    ) -> tuple[Tokens, Tensor, Tensor]:
        """What tokens become over arcs, words scored; `record` is the previous one. Also their arcs and sources."""
        options = self._options
        stream = tokens.stream.index_select(0, source)
        score = _relative(score, stream, offset)
        if self._lm is not None:
            # The graph's own scores decide which words are worth asking the language model for.
            chosen = survivors(score, stream, len(offset), options.search_beam, options.min_active_states, None)
            source, arc = source.index_select(0, chosen), arc.index_select(0, chosen)
            score, stream = score.index_select(0, chosen), stream.index_select(0, chosen)
        context_idx = tokens.context_idx.index_select(0, source)
        lm_score = tokens.lm_score.index_select(0, source)
        if self._lm is not None:
            changed, word_score, next_idx = arcs.words.score(self._lm, self._word_map, arc, context_idx)
            context_idx.index_copy_(0, changed, next_idx)
            score.index_add_(0, changed, word_score, alpha=options.lm_scale)
            lm_score.index_add_(0, changed, word_score.double())
            score = _relative(score, stream, offset)
        state = arcs.dst_state.index_select(0, arc).to(torch.int64)
        record = tokens.record.index_select(0, source)
        return Tokens(stream, state, context_idx, score, lm_score, record), arcs.arc_of(arc), source

    def _place(self, tokens: Tokens) -> Tensor:
        return tokens.stream * self._graph.num_states + tokens.state

    def _key(self, place: Tensor, tokens: Tokens) -> Tensor:
        return place if self._lm is None else (place << _CONTEXT_BITS) + tokens.context_idx

    def _keep(self, before: Tokens, extended: tuple[Tokens, Tensor, Tensor], offset: Tensor) -> Tokens:
        """Recombines and prunes; what stays gets a record."""
        tokens, arc, source = extended
        options = self._options
        place = self._place(tokens)
        winner = recombine(self._key(place, tokens), tokens.score)
        score = tokens.score.masked_fill(winner != torch.arange(len(winner), device=winner.device), -torch.inf)
        if options.max_contexts_per_state is not None and self._lm is not None:
            score = score.masked_fill(~best_of_group(place, score, options.max_contexts_per_state), -torch.inf)
        position = survivors(
            score,
            tokens.stream,
            len(offset),
            options.search_beam,
            options.min_active_states,
            options.max_active_states,
        )
        kept = tokens.select(position)
        kept.record = self._backtrace.add(kept.record, arc.index_select(0, position))
        if self._lattice is not None:
            word_score = tokens.lm_score - before.lm_score.index_select(0, source)
            self._lattice.add(tokens, arc, word_score, winner, position, kept.record)
        return kept

    def _follow_epsilons(self, tokens: Tokens, offset: Tensor) -> Tokens:
        """Takes arcs that read nothing until nothing new or better comes of it."""
        arcs = self._graph.epsilon
        if arcs is None:
            return tokens
        newest = tokens
        while True:
            source, arc = expand(arcs.arc_begin, newest.state)
            if not len(source):
                break
            score = newest.score.index_select(0, source) + arcs.score.index_select(0, arc)
            shift = torch.zeros_like(offset)
            extended, arc, source = self._extend(newest, arcs, source, arc, score, shift)
            # Both sets relative to the same best.
            extended.score += shift.index_select(0, extended.stream).float()
            both = Tokens.join([tokens, extended])
            both.score = _relative(both.score, both.stream, offset)
            winner = recombine(self._key(self._place(both), both), both.score)
            stays = (winner == torch.arange(len(winner), device=winner.device)) & (
                both.score >= -self._options.search_beam
            )
            old = stays[: len(tokens)].nonzero().squeeze(1)
            new = stays[len(tokens) :].nonzero().squeeze(1)
            newest = both.select(new + len(tokens))
            newest.record = self._backtrace.add(newest.record, arc.index_select(0, new))
            tokens = Tokens.join([both.select(old), newest])
            if not len(new):
                break
        position = survivors(
            tokens.score,
            tokens.stream,
            len(offset),
            self._options.search_beam,
            self._options.min_active_states,
            self._options.max_active_states,
        )
        return tokens.select(position)


def _relative(score: Tensor, stream: Tensor, offset: Tensor) -> Tensor:
    """Scores relative to the best of each stream, which is added to the stream's offset in place."""
    best = best_score(score, stream, len(offset))
    best = torch.where(best > -torch.inf, best, torch.zeros_like(best))
    offset += best
    return score - (best if len(best) == 1 else best.index_select(0, stream))
