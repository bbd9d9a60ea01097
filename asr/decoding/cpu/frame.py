"""One frame of the search with numba loops: expand, recombine, prune.

On a CPU, they are several times faster than `TorchFrameBackend`, and give the same tokens bit for bit. Candidates that
are outside the beam of the best one so far are dropped at once, and each survivor is written once.

Shapes: N streams, K tokens, A candidates, W winners among them, S states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from asr.decoding.backend import ActiveTokens, Candidates, Expansion, Frame, Searchable, Survivors
from asr.decoding.cpu.arrays import CandidateArrays, arc_arrays, pruning_of, stream_end
from asr.decoding.frame import ROUNDING_SLACK
from asr.decoding.recombination import HASH_MULTIPLIERS
from asr.decoding.settings import DecodingOptions
from asr.kernels.jit import Intrinsic, jit_required, kernel

# After this margin, the next one is infinite.
_WIDEST_MARGIN = 50.0
# Number of arcs that are compared together, and of tokens by which prefetching is ahead.
_BLOCK, _AHEAD = 16, 16
_LOWEST = np.finfo(np.float32).min
# A frame whose highest log-probability is not known.
_NO_PEAK = np.float32(np.inf)
# Without a language model, several candidates may recombine into one; with too few winners, the margin is widened.
_CANDIDATES_PER_WINNER = 2

append_reaching: Any = Intrinsic("asr.kernels.intrinsics", "append_reaching")
prefetch: Any = Intrinsic("asr.kernels.intrinsics", "prefetch")


class FrameArrays(NamedTuple):
    """`asr.decoding.backend.Frame` as arrays."""

    log_prob: Any
    begin: Any
    score_offset: Any


@kernel(fastmath=False)
def room_for_candidates(state: Any, arcs: Any) -> Any:
    """Room for what `expand_stream` writes for tokens in these states (K,): the arc of each, and a block more."""
    return count_arcs(state, arcs) + _BLOCK


@kernel(fastmath=False)
def count_arcs(state: Any, arcs: Any) -> Any:
    """How many arcs leave these states (K,); states that occur several times count several times."""
    total = 0
    for token in range(len(state)):
        total += arcs.begin[state[token] + 1] - arcs.begin[state[token]]
    return total


@kernel(fastmath=False)
def expand_stream(
    state: Any, score: Any, arcs: Any, log_prob: Any, peak: Any, pruning: Any, margin: Any, has_lm: bool, out: Any
) -> tuple[Any, Any, Any]:
    """Extends the tokens of one stream over the arcs that leave their states.

    If the arcs of a state are sorted by score, those after the first that cannot reach the beam with any token of the
    acoustic model are not looked at: in a graph of left biphones, two thirds of all.

    Args:
        state, score: (K,) of the tokens.
        arcs: arcs of the graph.
        log_prob: (C,) or more; the stream's frame comes first.
        peak: at least the highest log-probability of the frame.
        pruning: beams and limits; with a language model, candidates are pruned before it is queried.
        margin: at least the beam; candidates further below the best may be left out if enough others remain.
        has_lm: whether there is a language model.
        out: receives the candidates; must have room for `room_for_candidates`.

    Returns:
        The number of candidates, the best score, which has been subtracted from all, and whether any possible
        candidate may have been left out.
    """
    # The best successor of the best token is a first lower bound on the best score.
    leader = 0
    for token in range(len(state)):
        if score[token] > score[leader]:
            leader = token
    lead = np.float32(-np.inf)
    for position in range(arcs.begin[state[leader]], arcs.begin[state[leader] + 1]):
        reached = score[leader] + arcs.score[position]
        lead = max(lead, reached + log_prob[arcs.token[position]])
    while True:
        best = lead
        floor = np.float32(best - margin - ROUNDING_SLACK)
        left_out = False
        num = 0
        for token in range(len(state)):
            if token + _AHEAD < len(state):
                ahead = arcs.begin[state[token + _AHEAD]]
                # A block lies in two lines of the cache, as a rule.
                for position in (ahead, ahead + _BLOCK - 1):
                    prefetch(arcs.token, position)
                    prefetch(arcs.score, position)
            token_score, end = score[token], arcs.begin[state[token] + 1]
            for block in range(arcs.begin[state[token]], end, _BLOCK):
                if ((token_score + arcs.score[block]) + arcs.excess) + peak < floor:
                    left_out = True
                    break
                size = min(_BLOCK, end - block)
                found, is_better = append_reaching(
                    arcs.token, arcs.score, block, size, log_prob, token_score, max(floor, _LOWEST), best,
                    token, out.source, out.arc, out.score, num,
                )  # fmt: skip
                left_out = left_out or found != size
                prefetch(arcs.dst, block)
                if is_better:
                    for i in range(num, num + found):
                        best = max(best, out.score[i])
                    floor = np.float32(best - margin - ROUNDING_SLACK)
                num += found
        left_out = left_out and bool(floor > -np.inf)
        if not left_out:
            break
        num_inside = 0
        for i in range(num):
            relative = out.score[i] - best
            if relative >= -margin and (
                not has_lm or relative >= -pruning.skip_beam or arcs.num_words[out.arc[i]] == 0
            ):
                num_inside += 1
        if num_inside >= (pruning.min_active if has_lm else _CANDIDATES_PER_WINNER * pruning.min_active):
            break
        margin = wider(margin)
    # If candidates were left out, those outside the margin are only some of all such candidates; all are dropped.
    num, num_found = 0, num
    for i in range(num_found):
        relative = out.score[i] - best
        out.source[num], out.arc[num], out.score[num] = out.source[i], out.arc[i], relative
        num += int(relative >= -margin or not left_out)
    if has_lm:
        num = prune_before_words(out, num, arcs, pruning)
    return num, best, left_out


@kernel(fastmath=False)
def wider(margin: Any) -> Any:
    """The next wider margin."""
    return np.float32(1.5 * margin + 0.5 if margin < _WIDEST_MARGIN else np.inf)


@kernel(fastmath=False)
def prune_before_words(out: Any, num: int, arcs: Any, pruning: Any) -> Any:
    """Moves the candidates that survive the pruning before language model queries to the front -> their number."""
    kept = 0
    for i in range(num):
        if out.score[i] >= -pruning.skip_beam or arcs.num_words[out.arc[i]] == 0:
            out.source[kept], out.arc[kept], out.score[kept] = out.source[i], out.arc[i], out.score[i]
            kept += 1
    num, kept = kept, 0
    threshold = pruning_threshold(out.score[:num], pruning.beam, pruning.min_active, 0)
    for i in range(num):
        if out.score[i] >= threshold:
            out.source[kept], out.arc[kept], out.score[kept] = out.source[i], out.arc[i], out.score[i]
            kept += 1
    return kept


_NUM_BUCKETS = 2048


@kernel(fastmath=False)
def kth_best(value: Any, k: int) -> Any:
    """The k-th largest of finite numbers, 1 <= k <= their number, by repeated bucketing."""
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
def pruning_threshold(score: Any, beam: Any, min_active: int, max_active: int) -> Any:
    """The lowest score that survives, for finite scores of one stream; max_active 0 means no limit."""
    threshold = -beam
    num_inside = 0
    for i in range(len(score)):
        if score[i] >= threshold:
            num_inside += 1
    if num_inside < min_active and num_inside < len(score):
        threshold = kth_best(score, min_active) if len(score) >= min_active else kth_best(score, len(score))
        threshold = min(threshold, -beam)
        num_inside = min_active
    if max_active and num_inside > max_active:
        threshold = max(threshold, kth_best(score, max_active))
    return threshold


@kernel(fastmath=False)
def normalize_scores(stream: Any, score: Any, score_offset: Any) -> None:
    """Subtracts the best score of each stream from its scores (A,), and adds it to score_offset (N,); both in place."""
    best = np.full(len(score_offset), -np.inf, dtype=np.float32)
    for i in range(len(score)):
        best[stream[i]] = max(best[stream[i]], score[i])
    for own in range(len(score_offset)):
        if best[own] == -np.inf:
            best[own] = 0.0
        score_offset[own] += best[own]
    for i in range(len(score)):
        score[i] -= best[stream[i]]


@kernel(fastmath=False)
def context_slot(table: Any, state: Any, context: Any, i: int) -> Any:
    """The slot of candidate i in a hash table by (state, context), with open addressing; -1 is free."""
    mask = len(table) - 1
    slot = (np.int64(state[i]) * HASH_MULTIPLIERS[0]) ^ (context[i] * HASH_MULTIPLIERS[1])
    slot = (slot ^ (slot >> 29)) & mask
    while table[slot] >= 0 and (state[table[slot]] != state[i] or context[table[slot]] != context[i]):
        slot = (slot + 1) & mask
    return slot


@kernel(fastmath=False)
def recombine(state: Any, context: Any, score: Any, table: Any, winner: Any) -> None:
    """Fills winner (A,): the best candidate of one stream with the same state and context, the first of equal ones.

    Args:
        state, score: (A,).
        context: (A,), or (0,) without a language model.
        table: (S,) int32, all -1 before and after; unused with a language model.
        winner: (A,) int64.
    """
    num, has_context = len(state), len(context) > 0
    if has_context:
        num_slots = 16
        while num_slots < 2 * num:
            num_slots *= 2
        table = np.full(num_slots, -1, dtype=np.int32)
    for i in range(num):
        winner[i] = i
        slot = context_slot(table, state, context, i) if has_context else np.int64(state[i])
        other = table[slot]
        if other < 0:
            table[slot] = i
        elif score[i] > score[other]:
            table[slot] = i
            winner[other] = i
        else:
            winner[i] = other
    if not has_context:
        for i in range(num):
            table[state[i]] = -1
    resolve_winners(winner)


@kernel(fastmath=False)
def resolve_winners(winner: Any) -> None:
    """Replaces the candidate that each one (A,) lost to by the final winner, in place.

    A candidate that was overtaken points forward. One that lost on arrival points back, to a candidate that may have
    been overtaken later.
    """
    for i in range(len(winner) - 1, -1, -1):
        if winner[i] > i:
            winner[i] = winner[winner[i]]
    for i in range(len(winner)):
        if winner[i] < i:
            winner[i] = winner[winner[i]]


@kernel(fastmath=False)
def prune_winners(kept: Any, score: Any, pruning: Any) -> Any:
    """Prunes the winners of one stream -> those that survive, ascending.

    Args:
        kept: (W,) indices of the winners; overwritten.
        score: (A,) of all candidates, finite for winners.
        pruning: beam and limits.
    """
    value = np.empty(len(kept), dtype=np.float32)
    for k in range(len(kept)):
        value[k] = score[kept[k]]
    threshold = pruning_threshold(value, pruning.beam, pruning.min_active, pruning.max_active)
    num_kept = 0
    for k in range(len(kept)):
        kept[num_kept] = kept[k]
        num_kept += int(value[k] >= threshold)
    return kept[:num_kept]


@kernel(fastmath=False)
def keep_stream(state: Any, context: Any, score: Any, table: Any, pruning: Any, winner: Any) -> tuple[Any, int]:
    """Recombines and prunes the candidates of one stream; arguments as for `recombine`.

    Returns:
        The winners that survive, ascending, and the number of winners.
    """
    recombine(state, context, score, table, winner)
    kept, num_winners = np.empty(len(state), dtype=np.int64), 0
    for i in range(len(state)):
        kept[num_winners] = i
        num_winners += int(winner[i] == i and score[i] > -np.inf)
    return prune_winners(kept[:num_winners], score, pruning), num_winners


@kernel(fastmath=False)
def expand_frame(
    stream: Any, state: Any, score: Any, arcs: Any, frame: Any, pruning: Any, margin: Any, has_lm: bool
) -> tuple[Any, Any, Any, Any, Any]:
    """`FrameBackend.expand`; stream, state, score (K,), `frame` is a `FrameArrays`, the rest as for `expand_stream`.

    Returns:
        source, arc, stream, score (A,) and is_complete (N,), see `Expansion`.
    """
    room = room_for_candidates(state, arcs)
    source, arc = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
    candidate_stream, candidate_score = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.float32)
    is_complete = np.ones(len(frame.score_offset), dtype=np.bool_)
    first, begin = 0, 0
    while begin < len(state):
        own, end = stream[begin], stream_end(stream, begin)
        out = CandidateArrays(source[first:], arc[first:], candidate_score[first:])
        log_prob = frame.log_prob[frame.begin[own] :]
        num, best, left_out = expand_stream(
            state[begin:end], score[begin:end], arcs, log_prob, _NO_PEAK, pruning, margin, has_lm, out
        )
        if best > -np.inf:
            frame.score_offset[own] += best
        is_complete[own] = has_lm or not left_out
        for i in range(first, first + num):
            source[i] += begin
            candidate_stream[i] = own
        first, begin = first + num, end
    return source[:first], arc[:first], candidate_stream[:first], candidate_score[:first], is_complete


@kernel(fastmath=False)
def keep_frame(
    stream: Any, state: Any, context: Any, score: Any, is_complete: Any, table: Any, pruning: Any
) -> tuple[Any, Any, bool]:
    """`FrameBackend.recombine_and_prune`.

    Args:
        stream, state, score: (A,) the candidates, grouped by stream.
        context: (A,), or (0,) without a language model.
        is_complete: (N,) see `Candidates`.
        table: as for `recombine`.
        pruning: beam and limits.

    Returns:
        winner (A,), kept (K',) and is_complete, see `Survivors`.
    """
    winner, kept, num_kept = np.empty(len(state), dtype=np.int64), np.empty(len(state), dtype=np.int64), 0
    is_enough, begin = True, 0
    while begin < len(state):
        own, end = stream[begin], stream_end(stream, begin)
        own_kept, num_winners = keep_stream(
            state[begin:end], context[begin:end], score[begin:end], table, pruning, winner[begin:end]
        )
        for i in range(begin, end):
            winner[i] += begin
        for k in range(len(own_kept)):
            kept[num_kept] = begin + own_kept[k]
            num_kept += 1
        is_enough = is_enough and (num_winners >= pruning.min_active or is_complete[own])
        begin = end
    return winner, kept[:num_kept], is_enough


_NO_CONTEXT = np.zeros(0, dtype=np.int64)


class NumbaFrameBackend:
    """A `FrameBackend` with numba loops.

    Args:
        graph: on the CPU.
        options: beams and limits.
        has_lm: whether there is a language model.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, has_lm: bool) -> None:
        self._expand = jit_required(expand_frame)
        self._keep = jit_required(keep_frame)
        self._arcs = arc_arrays(graph.emitting)
        self._pruning = pruning_of(options)
        self._has_lm = has_lm
        self._table = np.full(0 if has_lm else graph.num_states, -1, dtype=np.int32)

    def expand(self, tokens: ActiveTokens, frame: Frame, *, prune: bool = True) -> Expansion:
        """As `FrameBackend.expand`."""
        margin = self._pruning.beam if prune else np.float32(np.inf)
        found = self._expand(
            *(tokens.stream.numpy(), tokens.state.numpy(), tokens.score.numpy(), self._arcs),
            *(FrameArrays(*(part.numpy() for part in frame)), self._pruning, margin, self._has_lm),
        )
        return Expansion(*map(torch.from_numpy, found))

    def recombine_and_prune(self, candidates: Candidates) -> Survivors:
        """As `FrameBackend.recombine_and_prune`."""
        context = _NO_CONTEXT if candidates.context_idx is None else candidates.context_idx.numpy()
        winner, kept, is_complete = self._keep(
            *(candidates.stream.numpy(), candidates.state.numpy(), context, candidates.score.numpy()),
            *(candidates.is_complete.numpy(), self._table, self._pruning),
        )
        return Survivors(torch.from_numpy(winner), torch.from_numpy(kept), bool(is_complete))
