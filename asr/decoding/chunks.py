"""One-pass decoding in chunks: the language model rescores the lattice as it grows, which guides the further search.

A search with the graph's own scores processes a chunk of frames and some further frames, to see how its paths continue.
The language model then rescores the lattice of the chunk alone, as `asr.decoding.rescoring` does for whole lattices.
The next chunk begins with the result: word histories at states of the graph, with their scores. Paths that the language
model has pruned are thus not followed further, and the search compares the others by its scores, too.

Shapes: N utterances, T frames, C tokens, K active tokens, F tokens and B states at the front, R backpointers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.decoding.backend import ActiveTokens, ArcSet, ArcWords, SearchGraph, best_score, normalize_scores
from asr.decoding.backtrace import Backtrace
from asr.decoding.chunk_backend import Chunk, ChunkBackend, SearchSink
from asr.decoding.cpu.lattice import ChunkRecords, LatticeBackpointers, LosingArcs, add_losses, connect_chunk
from asr.decoding.lattice_records import LatticeRecords
from asr.decoding.rescoring import rescoring_options
from asr.decoding.selection import BackendFactory
from asr.decoding.settings import DecodingOptions
from asr.kernels.jit import jit
from asr.lm.interface import LanguageModel, contexts_at_start


class ChunkGraph:
    """The lattice of a chunk as a graph to search; all its scores are pushed, and all states are final.

    Args:
        connected: arc_begin (S + 1,); dst_state, pushed score and decoding graph arc, (A,) each; word_begin (A + 1,)
            and word_id (W,).
    """

    is_pushed = True
    epsilon: ArcSet | None = None

    def __init__(self, *connected: Tensor) -> None:
        arc_begin, dst_state, score, graph_arc, *words = connected
        self.num_states = len(arc_begin) - 1
        no_token = torch.zeros_like(dst_state)
        self.emitting = ArcSet(arc_begin, dst_state, no_token, score, graph_arc, ArcWords(*words))
        self.final_score = self.final_graph_score = torch.zeros(self.num_states, dtype=torch.float32)


class Front(NamedTuple):
    """The tokens with which a chunk begins.

    Attributes:
        tokens: (F,) word histories at states of the graph; the best score of each stream is 0.
        state_idx: (F,) index of the (stream, state) pair of each token.
        stream, state: (B,) the pairs.
        score: (B,) float32, best score of the tokens of each pair.
    """

    tokens: ActiveTokens
    state_idx: Tensor
    stream: Tensor
    state: Tensor
    score: Tensor

    @classmethod
    def of(cls, tokens: ActiveTokens, num_states: int) -> Front:
        """Builds the front of some tokens."""
        pair, state_idx = torch.unique(tokens.stream * num_states + tokens.state, return_inverse=True)
        score = best_score(tokens.score, state_idx, len(pair))
        return cls(tokens, state_idx, pair // num_states, pair % num_states, score)


class Span(NamedTuple):
    """The frames of a chunk.

    Attributes:
        begin: the chunk's first frame.
        num_rescored: (N,) int64, number of frames from there that the language model rescores.
        num_searched: (N,) int64, number of frames from there that are searched.
        is_end: (N,) bool, whether these include the utterance's last frame.
    """

    begin: int
    num_rescored: Tensor
    num_searched: Tensor
    is_end: Tensor

    @classmethod
    def at(cls, begin: int, num_frames: Tensor, options: DecodingOptions) -> Span:
        """The chunk that begins at a frame; the last one has all remaining frames."""
        left = (num_frames - begin).clamp(min=0)
        is_end = left <= options.chunk_frames + options.lookahead_frames
        searched = left.clamp(max=options.chunk_frames + options.lookahead_frames)
        return cls(begin, torch.where(is_end, left, left.clamp(max=options.chunk_frames)), searched, is_end)


class ChunkedSearch:
    """The search of some utterances, to be used once.

    Args:
        graph: on the CPU, without epsilons.
        options: beams and scales. `output_beam` limits the lattice of each chunk, `context_beam` the histories.
        lm: the language model.
        backend: of the search with the graph's own scores, made for lattices.
        make_backend: makes the backends of the searches with the language model.
        keep_lattice: whether to keep a lattice of all frames.
    """

    def __init__(
        self,
        graph: SearchGraph,
        options: DecodingOptions,
        lm: LanguageModel,
        backend: ChunkBackend,
        make_backend: BackendFactory,
        keep_lattice: bool,
    ) -> None:
        self._graph = graph
        words = graph.emitting.words
        self._words = (words.word_begin.numpy(), words.word_id.numpy())
        self._options = options
        self._bounds = rescoring_options(options)
        self._lm = lm
        self._backend = backend
        self._make_backend = make_backend
        self._keep_lattice = keep_lattice
        self.backtrace = Backtrace(graph.final_score.device, collects=False)
        self.records: LatticeRecords | None = None

    def search(
        self, log_prob: Tensor, num_frames: Tensor, lm_state: Tensor | None = None
    ) -> tuple[ActiveTokens, Tensor]:
        """Searches log_prob (N, T, C), num_frames (N,) int64 -> the last tokens, and their streams' offsets (N,).

        lm_state (N, D) is what the language model carries over from earlier sentences, or None.
        """
        num_utts = len(num_frames)
        if self._keep_lattice and num_utts:
            self.records = LatticeRecords(num_utts, self._bounds)
        score_offset = torch.zeros(num_utts, dtype=torch.float64)
        utt_idx = torch.arange(num_utts)
        context_idx = contexts_at_start(self._lm, num_utts, lm_state)
        tokens = ActiveTokens.initial(utt_idx, torch.zeros_like(utt_idx), context_idx)
        finished, begin = ActiveTokens.empty(tokens.state.device), 0
        while len(tokens):
            span = Span.at(begin, num_frames, self._options)
            tokens = self._search_chunk(tokens, log_prob, span, score_offset, finished.context_idx)
            is_over = span.is_end[tokens.stream]
            finished = ActiveTokens.join([finished, tokens.select(is_over.nonzero().squeeze(1))])
            tokens = tokens.select((~is_over).nonzero().squeeze(1))
            begin += self._options.chunk_frames
        return finished, score_offset

    def _search_chunk(
        self, tokens: ActiveTokens, log_prob: Tensor, span: Span, score_offset: Tensor, held: Tensor
    ) -> ActiveTokens:
        """Tokens before a chunk -> tokens after it; changes score_offset (N,) in place, keeps contexts held (H,)."""
        front = Front.of(tokens, self._graph.num_states)
        frames = slice(span.begin, span.begin + int(span.num_searched.max()))
        scaled = self._options.am_scale * log_prob[:, frames]
        records = self._search_ahead(front, scaled, span)
        margin, score = np.float32(self._options.output_beam), np.zeros(len(records.previous))
        score[: len(front.score)] = front.score.numpy()
        arcs = self._graph.emitting
        connect = jit(connect_chunk) or connect_chunk
        of_arcs = (arcs.score.numpy(), arcs.token_id.numpy(), *self._words)
        found = connect(records, span.num_rescored.numpy(), margin, of_arcs, scaled.numpy(), score)
        number, backpointer, *connected = map(torch.from_numpy, found)
        graph = ChunkGraph(*connected)
        loss, state_score = torch.from_numpy(records.loss)[backpointer], torch.from_numpy(score)[backpointer]
        # A token is as far below the best path through its state as it is below the best token of the state.
        state = number[front.state_idx]
        begins = (state >= 0).nonzero().squeeze(1)
        tokens, state = tokens.select(begins), state[begins]
        tokens.score = tokens.score - front.score[front.state_idx[begins]] - loss[state]
        tokens.state = state
        tokens, offset = self._rescore(graph, tokens, span, held)
        # Undoes the pushing: from scores of complete paths to scores so far.
        so_far = tokens.score.double() + offset[tokens.stream] + state_score[tokens.state] + loss[tokens.state]
        # The states after the last frame: those of the front if no frame was read.
        last = backpointer[tokens.state]
        reached = arcs.dst_state[torch.from_numpy(records.arc)[last]].long()
        num_front = len(front.state)
        at_front = torch.cat([front.state, front.state.new_zeros(1)])[last.clamp(max=num_front)]
        tokens.state = torch.where(last < num_front, at_front, reached)
        tokens.score = normalize_scores(so_far, tokens.stream, score_offset).float()
        return tokens

    def _search_ahead(self, front: Front, scaled: Tensor, span: Span) -> ChunkRecords:
        """Searches the chunk and the frames after it, scaled (N, T, C), with the graph's own scores."""
        num_utts, device = len(span.is_end), scaled.device
        backtrace, records = Backtrace(device, collects=False), LatticeRecords(num_utts, self._options)
        nothing = torch.zeros_like(front.state)
        backpointer = backtrace.add(nothing - 1, nothing)
        records.add_frames(front.stream, nothing, (nothing[:0], nothing[:0], nothing[:0], front.score[:0]))
        tokens = ActiveTokens(front.stream, front.state, nothing, front.score, nothing.double(), backpointer)
        chunk = Chunk(scaled, span.num_searched, torch.zeros(num_utts, dtype=torch.float64))
        # No contexts are in use, and the backtrace keeps everything.
        after = self._backend.search(tokens, chunk, SearchSink(backtrace, records, lambda parts: None, span.is_end))
        previous, arc = (part.numpy() for part in backtrace.records())
        (utt_idx, frame), (src, dst, losing_arc, score_gap) = records.arrays()
        loss = self._losses(after, span, len(arc))
        add_up = jit(add_losses) or add_losses
        add_up(LatticeBackpointers(previous, utt_idx, frame), LosingArcs(src, dst, score_gap), loss)
        return ChunkRecords(previous, arc, utt_idx, frame, src, dst, losing_arc, score_gap, loss)

    def _losses(self, tokens: ActiveTokens, span: Span, num_records: int) -> NDArray[np.float32]:
        """How far each last backpointer is below the best of its stream, (R,); infinite for all others."""
        final = torch.where(span.is_end[tokens.stream], self._graph.final_score[tokens.state], 0.0)
        total, num_utts = tokens.score + final, len(span.is_end)
        best = best_score(total, tokens.stream, num_utts)
        # If no path reaches a final state, all count as unfinished.
        unfinished = best[tokens.stream] == -math.inf
        total = torch.where(unfinished, tokens.score, total)
        best = best_score(total, tokens.stream, num_utts)
        loss = torch.full((num_records,), math.inf, dtype=torch.float32)
        loss[tokens.backpointer] = best[tokens.stream] - total
        return np.asarray(loss.numpy(), dtype=np.float32)

    def _rescore(
        self, graph: ChunkGraph, tokens: ActiveTokens, span: Span, held: Tensor
    ) -> tuple[ActiveTokens, Tensor]:
        """Searches a chunk with the language model -> tokens after it, and the offsets of their scores, (N,)."""
        num_utts = len(span.is_end)
        before = torch.zeros(num_utts, dtype=torch.float64)
        tokens = replace(tokens, score=normalize_scores(tokens.score, tokens.stream, before))
        tokens = tokens.select((tokens.score >= -self._bounds.search_beam).nonzero().squeeze(1))
        if self.records is not None:
            self.records.begin_chunk(span.begin)
        backend = self._make_backend(graph, self._bounds, self._lm, self._keep_lattice)
        # The acoustic scores are on the arcs of the lattice.
        no_scores = torch.zeros(num_utts, int(span.num_rescored.max()), 1, dtype=torch.float32)
        offset = torch.zeros(num_utts, dtype=torch.float64)

        def retain(parts: list[ActiveTokens]) -> None:
            self._lm.retain(torch.cat([*(part.context_idx for part in parts), held]))

        sink = SearchSink(self.backtrace, self.records, retain)
        tokens = backend.search(tokens, Chunk(no_scores, span.num_rescored, offset), sink)
        return tokens.select(torch.sort(tokens.stream, stable=True).indices), before + offset
