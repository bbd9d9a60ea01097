"""What the partial paths of one stream become over the arcs that leave them, as a loop for `jit`.

Shapes: K partial paths, A candidates.


Where the scores of one stream are cut off, as loops for `jit`; the tensor form is `pruning_threshold` beside it.

A frame of the token search as loops over arcs and partial paths, for `jit`.

The tensor form in `FrameStep` gives the same partial paths on any device; on a CPU
these loops are several times faster: what falls behind the best path met so far is dropped at once, and what goes on
is written once.

Shapes: N streams, K partial paths, A candidates, S states. Paths of one stream stand together.


The two halves of a frame, by numba's loops, with tensors in and out.

Shapes: N streams, K partial paths, A candidates, S states.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asr.decoding.backend import Frame
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import Searchable
from asr.decoding.tokens import ActiveTokens, Candidates, Expansion, Survivors
from asr.kernels.jit import jit_required, kernel

# More than the rounding of a difference of two scores can be.
_SLACK = 0.01


_RECOMBINED = 8


@kernel(fastmath=False)
def num_arcs(state: Any, arc_begin: Any) -> Any:
    """How many arcs leave these states (K,), each counted as often as it stands there."""
    total = 0
    for path in range(len(state)):
        total += arc_begin[state[path] + 1] - arc_begin[state[path]]
    return total


@kernel(fastmath=False)
def expand_paths(
    state: Any, score: Any, begin: int, end: int, arc_begin: Any, token_id: Any, arc_score: Any, num_words: Any,
    log_prob: Any, row: Any, margin: Any, beam: Any, word_beam: Any, min_active: int, is_pruned: bool,
    source: Any, arc: Any, value: Any, first: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Fills in, from `first` on, what the paths of one stream become; arguments otherwise as of `expand_frame`.

    Args:
        begin, end: the stream's paths.
        row: where its frame begins in the scores.
        source, arc, value: there is room for all arcs; value is not relative.

    Returns:
        Behind which place the candidates end, the best of their scores, and whether any that is possible was left out.
    """
    # Where the best path leads tells at once what is not worth writing down.
    leader = begin
    for path in range(begin, end):
        if score[path] > score[leader]:
            leader = path
    lead = np.float32(-np.inf)
    for position in range(arc_begin[state[leader]], arc_begin[state[leader] + 1]):
        reached = score[leader] + arc_score[position]
        lead = max(lead, reached + log_prob[row + token_id[position]])
    while True:
        best = lead
        floor = np.float32(best - margin - _SLACK)
        left_out = False
        num = first
        for path in range(begin, end):
            path_score = score[path]
            for position in range(arc_begin[state[path]], arc_begin[state[path] + 1]):
                reached = path_score + arc_score[position]
                reached = reached + log_prob[row + token_id[position]]
                if reached < floor or reached == -np.inf:
                    left_out = left_out or reached > -np.inf
                    continue
                source[num], arc[num], value[num] = path, position, reached
                num += 1
                if reached > best:
                    best = reached
                    floor = np.float32(best - margin - _SLACK)
        if not left_out:
            break
        num_inside = 0
        for i in range(first, num):
            relative = value[i] - best
            if relative >= -beam and (not is_pruned or relative >= -word_beam or num_words[arc[i]] == 0):
                num_inside += 1
        # Without a language model several of these may recombine into one.
        if num_inside >= (min_active if is_pruned else _RECOMBINED * min_active):
            break
        margin = np.float32(np.inf)
    return num, best, left_out


_NUM_BUCKETS = 2048


@kernel(fastmath=False)
def kth_best(value: Any, k: int) -> Any:
    """The k-th largest of finite numbers, k from 1 to their number: buckets inside the bucket that holds it."""
    while True:
        low, high = value[0], value[0]
        for i in range(len(value)):
            low, high = min(low, value[i]), max(high, value[i])
        if low == high:
            return low
        per_bucket = (_NUM_BUCKETS - 1) / (np.float64(high) - np.float64(low))
        histogram = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        for i in range(len(value)):
            histogram[int((np.float64(high) - np.float64(value[i])) * per_bucket)] += 1
        bucket = 0
        while histogram[bucket] < k:
            k -= histogram[bucket]
            bucket += 1
        inside = np.empty(histogram[bucket], dtype=value.dtype)
        num_inside = 0
        for i in range(len(value)):
            if int((np.float64(high) - np.float64(value[i])) * per_bucket) == bucket:
                inside[num_inside] = value[i]
                num_inside += 1
        value = inside


@kernel(fastmath=False)
def pruning_threshold(value: Any, beam: Any, min_active: int, max_active: int) -> Any:
    """The worst score that survives, of finite scores of one stream; max_active 0 is no limit."""
    threshold = -beam
    num_inside = 0
    for i in range(len(value)):
        if value[i] >= threshold:
            num_inside += 1
    if num_inside < min_active and num_inside < len(value):
        threshold = kth_best(value, min_active) if len(value) >= min_active else kth_best(value, len(value))
        threshold = min(threshold, -beam)
        num_inside = min_active
    if max_active and num_inside > max_active:
        threshold = max(threshold, kth_best(value, max_active))
    return threshold


_FIRST_MULTIPLIER = 0x1E3779B97F4A7C15


_SECOND_MULTIPLIER = 0x3F58476D1CE4E5B9


@kernel(fastmath=False)
def expand_frame(
    stream: Any,
    state: Any,
    score: Any,
    arc_begin: Any,
    token_id: Any,
    arc_score: Any,
    num_words: Any,
    log_prob: Any,
    frame_begin: Any,
    score_offset: Any,
    margin: Any,
    beam: Any,
    word_beam: Any,
    min_active: int,
    is_pruned: bool,
) -> tuple[Any, Any, Any, Any, Any]:
    """What partial paths become over the arcs that leave them.

    Args:
        stream, state, score: (K,) the paths.
        arc_begin, token_id, arc_score, num_words: the graph's arcs.
        log_prob, frame_begin: scores of all frames, flat, and where each stream's frame begins in them (N,).
        score_offset: (N,) float64; the best score of each stream is added in place.
        margin: what falls this far behind the best may be left out.
        beam, word_beam, min_active: if is_pruned, what stays: inside the beam, or the best min_active; candidates with
            words inside word_beam only.

    Returns:
        source (A,), arc (A,), stream (A,), score (A,) relative to the stream's best; and whether of each stream (N,)
        all that do not stand here are impossible or pruned.
    """
    total = num_arcs(state, arc_begin)
    source = np.empty(total, dtype=np.int64)
    arc = np.empty(total, dtype=np.int64)
    candidate_stream = np.empty(total, dtype=np.int64)
    candidate_score = np.empty(total, dtype=np.float32)
    num = 0
    is_complete = np.ones(len(score_offset), dtype=np.bool_)
    begin = 0
    while begin < len(state):
        own = stream[begin]
        end = begin
        while end < len(state) and stream[end] == own:
            end += 1
        first = num
        num, best, left_out = expand_paths(
            state, score, begin, end, arc_begin, token_id, arc_score, num_words, log_prob, frame_begin[own],
            margin, beam, word_beam, min_active, is_pruned, source, arc, candidate_score, first,
        )  # fmt: skip
        if best > -np.inf:
            score_offset[own] += best
        for i in range(first, num):
            candidate_stream[i] = own
            candidate_score[i] -= best
        if not is_pruned:
            is_complete[own] = not left_out
        elif num > first:
            stay = first
            for i in range(first, num):
                if candidate_score[i] >= -word_beam or num_words[arc[i]] == 0:
                    source[stay], arc[stay], candidate_score[stay] = source[i], arc[i], candidate_score[i]
                    stay += 1
            num = stay
            threshold = pruning_threshold(candidate_score[first:num], beam, min_active, 0)
            stay = first
            for i in range(first, num):
                if candidate_score[i] >= threshold:
                    source[stay], arc[stay], candidate_score[stay] = source[i], arc[i], candidate_score[i]
                    stay += 1
            num = stay
        begin = end
    return source[:num], arc[:num], candidate_stream[:num], candidate_score[:num], is_complete


@kernel(fastmath=False)
def keep_frame(
    stream: Any,
    state: Any,
    context_idx: Any,
    score: Any,
    is_complete: Any,
    table: Any,
    beam: Any,
    min_active: int,
    max_active: int,
) -> tuple[Any, Any, bool]:
    """Recombines candidates and prunes them.

    Args:
        stream, state, score: (A,) the candidates, score relative to the stream's best.
        context_idx: (A,), or (0,) where there is no language model.
        is_complete: (N,), whether a stream's candidates are all there are.
        table: (S,) int32, all -1, which they are again afterwards; (0,) with a language model.
        beam, min_active, max_active: what stays.

    Returns:
        winner (A,), the best candidate of the same stream, state and context, of equally good ones the first; the
        positions of the winners that stay, ascending; and whether nothing that is missing could have stayed: inside
        the beam there are min_active of each stream that is not complete.
    """
    num = len(state)
    winner = np.arange(num)
    kept = np.empty(num, dtype=np.int64)
    num_kept, is_enough = 0, True
    has_context = len(context_idx) > 0
    begin = 0
    while begin < num:
        own = stream[begin]
        end = begin
        while end < num and stream[end] == own:
            end += 1
        if has_context:
            num_slots = 16
            while num_slots < 2 * (end - begin):
                num_slots *= 2
            table = np.full(num_slots, -1, dtype=np.int32)
        mask = len(table) - 1
        for i in range(begin, end):
            slot = np.int64(state[i])
            if has_context:
                slot = (slot * _FIRST_MULTIPLIER) ^ (context_idx[i] * _SECOND_MULTIPLIER)
                slot = (slot ^ (slot >> 29)) & mask
                while table[slot] >= 0 and (
                    state[table[slot]] != state[i] or context_idx[table[slot]] != context_idx[i]
                ):
                    slot = (slot + 1) & mask
            other = table[slot]
            if other < 0:
                table[slot] = i
            elif score[i] > score[other]:
                table[slot] = i
                winner[other] = i
            else:
                winner[i] = other
        if not has_context:
            for i in range(begin, end):
                table[state[i]] = -1
        # Who was overtaken points forward, who came too late points back to one that may have been overtaken since.
        for i in range(end - 1, begin - 1, -1):
            if winner[i] > i:
                winner[i] = winner[winner[i]]
        num_alive = 0
        for i in range(begin, end):
            if winner[i] < i:
                winner[i] = winner[winner[i]]
            if winner[i] == i and score[i] > -np.inf:
                kept[num_kept + num_alive] = i
                num_alive += 1
        value = np.empty(num_alive, dtype=np.float32)
        for i in range(num_alive):
            value[i] = score[kept[num_kept + i]]
        num_before, num_inside = num_kept, 0
        if num_alive:
            threshold = pruning_threshold(value, beam, min_active, max_active)
            for i in range(num_alive):
                if value[i] >= threshold:
                    kept[num_kept] = kept[num_before + i]
                    num_kept += 1
                    if value[i] >= -beam:
                        num_inside += 1
        is_enough = is_enough and (num_inside >= min_active or is_complete[own])
        begin = end
    return winner, kept[:num_kept], is_enough


_NO_CONTEXT = np.zeros(0, dtype=np.int64)
_NO_TABLE = np.zeros(0, dtype=np.int32)


class NumbaFrameBackend:
    """`FrameBackend` by numba's loops.

    Args:
        graph: on the CPU.
        options: beams and limits.
        has_lm: whether a language model takes part.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, has_lm: bool) -> None:
        arcs = graph.emitting
        self._expand = jit_required(expand_frame)
        self._keep = jit_required(keep_frame)
        self._arc_begin = arcs.arc_begin.numpy()
        self._token_id = arcs.token_id.numpy()
        self._arc_score = arcs.score.numpy()
        self._num_words = arcs.words.num_words.numpy()
        self._beam = np.float32(options.search_beam)
        self._word_beam = np.float32(np.inf if options.word_beam is None else options.word_beam)
        self._limits = (options.min_active_states, options.max_active_states)
        self._has_lm = has_lm
        self._num_states = graph.num_states
        self._table: NDArray[np.int32] | None = _NO_TABLE if has_lm else None

    def expand(self, tokens: ActiveTokens, frame: Frame, *, prune: bool = True) -> Expansion:
        """As `FrameBackend.expand`."""
        found = self._expand(
            tokens.stream.numpy(),
            tokens.state.numpy(),
            tokens.score.numpy(),
            self._arc_begin,
            self._token_id,
            self._arc_score,
            self._num_words,
            frame.log_prob.numpy(),
            frame.begin.numpy(),
            frame.score_offset.numpy(),
            self._beam if prune else np.float32(np.inf),
            self._beam,
            self._word_beam,
            self._limits[0],
            self._has_lm,
        )
        return Expansion(*map(torch.from_numpy, found))

    def recombine_and_prune(self, candidates: Candidates) -> Survivors:
        """As `FrameBackend.recombine_and_prune`."""
        if self._table is None:
            self._table = np.full(self._num_states, -1, dtype=np.int32)
        context_idx = candidates.context_idx
        winner, kept, is_complete = self._keep(
            candidates.stream.numpy(),
            candidates.state.numpy(),
            _NO_CONTEXT if context_idx is None else context_idx.numpy(),
            candidates.score.numpy(),
            candidates.is_complete.numpy(),
            self._table,
            self._beam,
            *self._limits,
        )
        return Survivors(torch.from_numpy(winner), torch.from_numpy(kept), bool(is_complete))
