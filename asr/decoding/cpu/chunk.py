"""The search without a language model, for many frames of a stream in one call of a numba loop.

Backpointers and losing arcs are created only after the frames of a call have been searched. By then it is known which
candidates are on a surviving path; most are not.

Shapes: T frames, K tokens, A candidates and P tokens of all frames, R backpointers, L losing arcs, S states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.decoding.backend import ActiveTokens, Searchable
from asr.decoding.chunk_backend import Chunk, SearchSink
from asr.decoding.cpu.arrays import CandidateArrays, arc_arrays, ensure_capacity, margin_of, pruning_of
from asr.decoding.cpu.frame import expand_stream, prune_winners, room_for_candidates, wider
from asr.decoding.settings import DecodingOptions
from asr.kernels.jit import Intrinsic, jit_required, kernel

_NONE = -1

prefetch: Any = Intrinsic("asr.kernels.intrinsics", "prefetch")


class StreamTokens(NamedTuple):
    """The tokens of one stream (K,)."""

    state: Any
    score: Any
    backpointer: Any


class StreamFrames(NamedTuple):
    """Frames of one stream.

    Attributes:
        log_prob: scaled log-probabilities, flattened; `begin` (T,) is where each frame begins in it.
        peak: (T,) float32, the highest log-probability of each frame.
        score_offset: (1,) float64, added to relative scores to give absolute ones; changed in place.
        final_score: (S,) added to the scores of the last tokens to choose those that stay: if any sum is finite, the
            tokens within `margin` of the best; otherwise all. With (0,), all stay.
        margin: losing arcs with a score gap up to this belong to the lattice; below 0, no lattice is kept.
    """

    log_prob: Any
    begin: Any
    peak: Any
    score_offset: Any
    final_score: Any
    margin: Any


class CandidateStore(NamedTuple):
    """The candidates and tokens of all frames of a call. The arrays grow and are reused by the next call.

    Attributes:
        source, arc: (A,) int32, index of the previous token in its frame, and the arc.
        ranking: (2 A,) int32. Entries 2i form linked lists that end with -1: from a winner to the candidates of its
            frame that lost to it. Entry 2i + 1 is the score of candidate i, a float32. Both are read together.
        winner: (P,) int32, index in its frame of the candidate that became each token.
    """

    source: Any
    arc: Any
    ranking: Any
    winner: Any


class History(NamedTuple):
    """The positions of frames in a `CandidateStore`.

    Attributes:
        candidate_begin: (T + 1,) where the candidates of each frame begin.
        token_begin: (T + 2,) where the tokens before each frame, and after the last, begin and end.
        lowest: (T,) float32, the worst score that survived each frame.
    """

    candidate_begin: Any
    token_begin: Any
    lowest: Any


@kernel(fastmath=False)
def search_frames(
    tokens: Any, arcs: Any, frames: Any, pruning: Any, table: Any, store: Any, first: int
) -> tuple[Any, Any, Any, Any]:
    """Searches the frames of one stream.

    Args:
        tokens: `StreamTokens` before the first frame.
        arcs: arcs of the graph.
        frames: `StreamFrames`.
        pruning: beam and limits.
        table: (S,) int32, all -1 before and after.
        store: a `CandidateStore` of any size.
        first: number of the first new backpointer.

    Returns:
        The tokens after the last frame that stay.
        Backpointers: previous and arc (R,), number of each frame's first one (T,), and number of frames read at each
        (R,); only those on paths to these tokens that lose at most `margin`.
        Losing arcs: backpointer before the arc, backpointer that the arc lost to, arc, and score gap (L,).
        The store, whose arrays may have grown.
    """
    state, score = tokens.state, tokens.score
    source, arc, ranking, winner = store.source, store.arc, store.ranking, store.winner
    num_frames = len(frames.begin)
    candidate_begin, token_begin = np.zeros(num_frames + 1, dtype=np.int64), np.zeros(num_frames + 2, dtype=np.int64)
    lowest = np.full(num_frames, -pruning.beam, dtype=np.float32)
    value = np.empty(0, dtype=np.float32)
    token_begin[1] = len(state)
    for frame in range(num_frames):
        begin, first_token = candidate_begin[frame], token_begin[frame + 1]
        margin, end = pruning.beam, begin
        new_state, kept = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
        while len(state):
            room = room_for_candidates(state, arcs)
            source, arc = ensure_capacity(source, begin + room), ensure_capacity(arc, begin + room)
            ranking, value = ensure_capacity(ranking, 2 * (begin + room)), ensure_capacity(value, room)
            out = CandidateArrays(source[begin:], arc[begin:], value)
            log_prob = frames.log_prob[frames.begin[frame] :]
            num, best, left_out = expand_stream(
                state, score, arcs, log_prob, frames.peak[frame], pruning, margin, False, out
            )
            end, new_state = begin + num, np.empty(num, dtype=np.int32)
            for i in range(num):
                new_state[i] = arcs.dst[arc[begin + i]]
                prefetch(table, new_state[i])
            winners = rank_by_state(new_state, value[:num], ranking[2 * begin : 2 * end], table)
            if len(winners) >= pruning.min_active or not left_out:
                kept = prune_winners(winners, value, pruning)
                if best > -np.inf:
                    frames.score_offset[0] += best
                break
            # With fewer than min_active tokens, candidates that were left out may survive.
            margin = wider(margin)
        state, score = np.empty(len(kept), dtype=np.int64), np.empty(len(kept), dtype=np.float32)
        winner = ensure_capacity(winner, first_token + len(kept))
        for k in range(len(kept)):
            state[k], score[k] = new_state[kept[k]], value[kept[k]]
            winner[first_token + k] = kept[k]
            # Below the search beam an arc belongs to the lattice only where min_active let worse tokens survive.
            lowest[frame] = min(lowest[frame], score[k])
        candidate_begin[frame + 1], token_begin[frame + 2] = end, first_token + len(kept)
    store, history = CandidateStore(source, arc, ranking, winner), History(candidate_begin, token_begin, lowest)
    loss = np.full(token_begin[-1], np.inf, dtype=np.float32)
    ends = ending_tokens(state, score, frames, loss[token_begin[num_frames] :])
    on_paths, losing = trace_back(store, history, frames.margin, loss)
    backpointers, losing_arcs, number = number_paths(store, history, on_paths, losing, tokens.backpointer, first)
    kept_tokens = StreamTokens(state[ends], score[ends], number[token_begin[num_frames] + ends])
    return kept_tokens, backpointers, losing_arcs, store


@kernel(fastmath=False)
def rank_by_state(state: Any, score: Any, ranking: Any, table: Any) -> Any:
    """Recombines the candidates of a frame by state: fills ranking (2 A,) -> the winners (W,) int32, ascending.

    Args:
        state, score: (A,) of the candidates.
        ranking: see `CandidateStore`.
        table: (S,) int32, all -1 before and after.
    """
    num, own_score = len(state), ranking.view(np.float32)
    for i in range(num):
        other = table[state[i]]
        own_score[2 * i + 1] = score[i]
        if other < 0:
            table[state[i]], ranking[2 * i] = i, _NONE
        elif score[i] > score[other]:
            # The previous winner and those that lost to it become the new winner's list.
            table[state[i]], ranking[2 * i] = i, other
        else:
            ranking[2 * i], ranking[2 * other] = ranking[2 * other], i
    winners, num_winners = np.empty(num, dtype=np.int32), 0
    for i in range(num):
        if table[state[i]] == i:
            table[state[i]] = -1
            winners[num_winners] = i
            num_winners += 1
    return winners[:num_winners]


@kernel(fastmath=False)
def ending_tokens(state: Any, score: Any, frames: Any, loss: Any) -> Any:
    """The indices of the last tokens (K,) that stay; sets their loss (K,), which remains infinite for all others."""
    best = np.float32(-np.inf)
    for k in range(len(state) if len(frames.final_score) else 0):
        best = max(best, score[k] + frames.final_score[state[k]])
    if best == -np.inf:
        loss[:] = 0.0
        return np.arange(len(state))
    for k in range(len(state)):
        gap = best - (score[k] + frames.final_score[state[k]])
        if gap <= frames.margin:
            loss[k] = gap
    return np.nonzero(loss < np.inf)[0]


@kernel(fastmath=False)
def trace_back(store: Any, history: Any, margin: Any, loss: Any) -> tuple[Any, Any]:
    """Traces the last tokens back to the first frame.

    Args:
        store, history: results of the search.
        margin: maximum loss of a path.
        loss: (P,) float32, finite for the last tokens that stay; set to the loss of the best path from each token on.

    Returns:
        The tokens on paths within the margin (R,), latest first; the losing arcs (L,), earliest first. Each of these is
        the index of its candidate in the upper 32 bits, and the winning token in the lower ones.
    """
    score = store.ranking.view(np.float32)
    on_paths, num_tokens = np.empty(len(loss), dtype=np.int32), 0
    losing, num_losing = np.empty(256, dtype=np.int64), 0
    for frame in range(len(history.lowest) - 1, -1, -1):
        first, first_before = history.candidate_begin[frame], history.token_begin[frame]
        for token in range(history.token_begin[frame + 2] - 1, history.token_begin[frame + 1] - 1, -1):
            if loss[token] == np.inf:
                continue
            own = first + store.winner[token]
            before = first_before + store.source[own]
            loss[before] = min(loss[before], loss[token])
            on_paths[num_tokens] = token
            num_tokens += 1
            loser = store.ranking[2 * own] if margin >= 0 else _NONE
            while loser >= 0:
                at = first + loser
                gap = score[2 * own + 1] - score[2 * at + 1]
                if score[2 * at + 1] >= history.lowest[frame] and loss[token] + gap <= margin:
                    before = first_before + store.source[at]
                    loss[before] = min(loss[before], loss[token] + gap)
                    losing = ensure_capacity(losing, num_losing + 1)
                    losing[num_losing] = (at << 32) | token
                    num_losing += 1
                loser = store.ranking[2 * at]
    return on_paths[:num_tokens], np.sort(losing[:num_losing])


@kernel(fastmath=False)
def number_paths(
    store: Any, history: Any, on_paths: Any, losing: Any, backpointer: Any, first: int
) -> tuple[Any, Any, Any]:
    """Backpointers and losing arcs as `search_frames` returns them, and the backpointer of each token (P,).

    Args:
        store, history, on_paths, losing: as for `trace_back`.
        backpointer: (K,) of the tokens before the first frame.
        first: number of the first new backpointer.
    """
    score = store.ranking.view(np.float32)
    previous, arc = np.empty(len(on_paths), dtype=np.int64), np.empty(len(on_paths), dtype=np.int64)
    frame_of, frame_begin = np.empty(len(on_paths), dtype=np.int64), np.empty(len(history.lowest), dtype=np.int64)
    src, dst = np.empty(len(losing), dtype=np.int64), np.empty(len(losing), dtype=np.int64)
    losing_arc, score_gap = np.empty(len(losing), dtype=np.int64), np.empty(len(losing), dtype=np.float32)
    number = np.empty(history.token_begin[-1], dtype=np.int64)
    number[: len(backpointer)] = backpointer
    num, num_losing = 0, 0
    for frame in range(len(history.lowest)):
        frame_begin[frame] = first + num
        begin, before = history.candidate_begin[frame], history.token_begin[frame]
        while num < len(on_paths) and on_paths[len(on_paths) - 1 - num] < history.token_begin[frame + 2]:
            token = on_paths[len(on_paths) - 1 - num]
            own = begin + store.winner[token]
            previous[num], arc[num] = number[before + store.source[own]], store.arc[own]
            frame_of[num], number[token] = frame + 1, first + num
            num += 1
        while num_losing < len(losing) and (losing[num_losing] >> 32) < history.candidate_begin[frame + 1]:
            at, token = losing[num_losing] >> 32, losing[num_losing] & 0xFFFFFFFF
            src[num_losing], dst[num_losing] = number[before + store.source[at]], number[token]
            own = begin + store.winner[token]
            losing_arc[num_losing], score_gap[num_losing] = store.arc[at], score[2 * own + 1] - score[2 * at + 1]
            num_losing += 1
    return (previous, arc, frame_begin, frame_of), (src, dst, losing_arc, score_gap), number


_NO_SCORES = np.zeros(0, dtype=np.float32)


class NumbaChunkSearch:
    """A `ChunkBackend` without a language model; it finds the same paths as a search frame by frame.

    Args:
        graph: on the CPU, without input epsilons.
        options: beams and limits.
        frames_per_call: number of frames of a stream after which tokens on no surviving path are dropped.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, frames_per_call: int = 256) -> None:
        self._search_frames = jit_required(search_frames)
        self._frames_per_call = frames_per_call
        self._emitting = graph.emitting
        self._arcs = arc_arrays(graph.emitting)
        self._table = np.full(graph.num_states, -1, dtype=np.int32)
        self._store = CandidateStore(*(4 * (np.empty(0, dtype=np.int32),)))
        self._final_score = graph.final_score.numpy()
        # Of streams that go on.
        self._no_final_score = np.zeros_like(self._final_score)
        self._pruning = pruning_of(options)

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.search`."""
        if not len(tokens):
            return tokens
        max_frames, num_columns = chunk.log_prob.shape[1:]
        peak = chunk.log_prob.amax(2)
        streams, num_tokens = torch.unique_consecutive(tokens.stream, return_counts=True)
        parts = tokens.split(num_tokens.tolist())
        for position, stream in enumerate(streams.tolist()):
            begin = stream * max_frames
            frame_begin = num_columns * torch.arange(begin, begin + int(chunk.num_frames[stream]))
            for num_before in range(0, len(frame_begin), self._frames_per_call):
                if sink.backtrace.is_due:
                    sink.collect(parts)
                some = slice(num_before, num_before + self._frames_per_call)
                parts[position] = self._search_some(
                    stream, parts[position], chunk, frame_begin[some], peak[stream, some], num_before, sink
                )
        return ActiveTokens.join(parts)

    def _search_some(
        self,
        stream: int,
        tokens: ActiveTokens,
        chunk: Chunk,
        frame_begin: Tensor,
        peak: Tensor,
        num_before: int,
        sink: SearchSink,
    ) -> ActiveTokens:
        """Searches some frames of one stream.

        They begin at frame_begin (T,) in the flattened log-probabilities; peak (T,) is the highest of each.
        """
        backtrace, lattice = sink.backtrace, sink.lattice
        final_score = _NO_SCORES
        if lattice is not None and num_before + len(frame_begin) == int(chunk.num_frames[stream]):
            is_end = sink.is_end is None or bool(sink.is_end[stream])
            final_score = self._final_score if is_end else self._no_final_score
        frames = StreamFrames(
            chunk.log_prob.reshape(-1).numpy(),
            frame_begin.numpy(),
            peak.numpy(),
            chunk.score_offset[stream : stream + 1].numpy(),
            final_score,
            margin_of(sink),
        )
        before = StreamTokens(tokens.state.numpy(), tokens.score.numpy(), tokens.backpointer.numpy())
        kept, backpointers, losing_arcs, self._store = self._search_frames(
            before, self._arcs, frames, self._pruning, self._table, self._store, backtrace.num_records
        )
        state, score, backpointer = map(torch.from_numpy, kept)
        previous, arc, block_begin, frame = map(torch.from_numpy, backpointers)
        if lattice is not None:
            src, dst, losing_arc, score_gap = map(torch.from_numpy, losing_arcs)
            losing = (src, dst, self._emitting.arc_of(losing_arc), score_gap)
            lattice.add_frames(torch.full_like(arc, stream), frame + num_before, losing)
        backtrace.add_blocks(previous, self._emitting.arc_of(arc), block_begin.tolist())
        no_context = torch.zeros_like(backpointer)
        return ActiveTokens(torch.full_like(state, stream), state, no_context, score, no_context.double(), backpointer)
