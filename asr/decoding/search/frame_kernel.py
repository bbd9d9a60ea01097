"""A frame of the token search as loops over arcs and partial paths, for `compiled_loop`.

The tensor form in `FrameStep` gives the same partial paths on any device; on a CPU
these loops are several times faster: what falls behind the best path met so far is dropped at once, and what goes on
is written once.

Shapes: N streams, K partial paths, A candidates, S states. Paths of one stream stand together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.decoding.search.cut_off_kernel import cut_off
from asr.decoding.search.expand_kernel import expand_paths, num_arcs

_FIRST_MULTIPLIER = 0x1E3779B97F4A7C15
_SECOND_MULTIPLIER = 0x3F58476D1CE4E5B9


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
    offset: Any,
    reach: Any,
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
        offset: (N,) float64; the best score of each stream is added in place.
        reach: what falls this far behind the best may be left out.
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
    is_complete = np.ones(len(offset), dtype=np.bool_)
    begin = 0
    while begin < len(state):
        own = stream[begin]
        end = begin
        while end < len(state) and stream[end] == own:
            end += 1
        first = num
        num, best, left_out = expand_paths(
            state, score, begin, end, arc_begin, token_id, arc_score, num_words, log_prob, frame_begin[own],
            reach, beam, word_beam, min_active, is_pruned, source, arc, candidate_score, first,
        )  # fmt: skip
        if best > -np.inf:
            offset[own] += best
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
            threshold = cut_off(candidate_score[first:num], beam, min_active, 0)
            stay = first
            for i in range(first, num):
                if candidate_score[i] >= threshold:
                    source[stay], arc[stay], candidate_score[stay] = source[i], arc[i], candidate_score[i]
                    stay += 1
            num = stay
        begin = end
    return source[:num], arc[:num], candidate_stream[:num], candidate_score[:num], is_complete


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
            threshold = cut_off(value, beam, min_active, max_active)
            for i in range(num_alive):
                if value[i] >= threshold:
                    kept[num_kept] = kept[num_before + i]
                    num_kept += 1
                    if value[i] >= -beam:
                        num_inside += 1
        is_enough = is_enough and (num_inside >= min_active or is_complete[own])
        begin = end
    return winner, kept[:num_kept], is_enough
