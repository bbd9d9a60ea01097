"""What a lattice's paths lose and gain, as loops for `compiled_loop`. Uncompiled they are slow oracles.

Shapes: R records, L losers, S states, A arcs.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def add_losses(previous: Any, frame: Any, src: Any, dst: Any, lost_by: Any, loss: Any) -> None:
    """How much the best way on from each record loses against the best path.

    Args:
        previous, frame: (R,) the record before, -1 at a start, and the frames read; those of a frame stand together and
            behind all that lead to them.
        src, dst, lost_by: (L,) the losers, in the order of the frames of the records that they lost.
        loss: (R,) float32, that of ending there, infinite where a path may not; lowered in place.
    """
    end, loser = len(previous), len(dst) - 1
    while end > 0:
        begin = end - 1
        while begin > 0 and frame[begin - 1] == frame[end - 1]:
            begin -= 1
        while loser >= 0 and dst[loser] >= begin:
            if src[loser] >= 0:
                loss[src[loser]] = min(loss[src[loser]], loss[dst[loser]] + lost_by[loser])
            loser -= 1
        for i in range(begin, end):
            if previous[i] >= 0:
                loss[previous[i]] = min(loss[previous[i]], loss[i])
        end = begin


def kept_within(
    reach: float, previous: Any, utt_idx: Any, frame: Any, src: Any, dst: Any, lost_by: Any, loss: Any, num_utts: int
) -> Any:
    """The records and losers on paths that lose by no more than `reach`, as states and arcs of a lattice.

    Args:
        reach: at most so much is lost.
        previous, frame, src, dst, lost_by: as of `add_losses`.
        utt_idx: (R,) the utterance of each record.
        loss: (R,) what `add_losses` has made of it.
        num_utts: so many states, the starts of the utterances, come before the others.

    Returns:
        record (R',), loser (L',): those that stay, ascending.
        state (R',): the records again, by frame; number (R + 1,): as what each is numbered, from num_utts on, -1 where
        it does not stay and in the spare last place.
        src_state, dst_state (R' + L',): of the arcs, those of the records first.
    """
    record, loser = np.empty(len(loss), dtype=np.int64), np.empty(len(dst), dtype=np.int64)
    # Where the states of each frame begin.
    begin = np.zeros(int(frame.max()) + 2 if len(frame) else 1, dtype=np.int64)
    num_records, num_losers = 0, 0
    for i in range(len(loss)):
        if loss[i] <= reach:
            record[num_records] = i
            num_records += 1
            begin[frame[i] + 1] += 1
    for i in range(len(dst)):
        if loss[dst[i]] + lost_by[i] <= reach:
            loser[num_losers] = i
            num_losers += 1
    begin = begin.cumsum()
    number, state = np.full(len(loss) + 1, -1, dtype=np.int64), np.empty(num_records, dtype=np.int64)
    for i in record[:num_records]:
        place = begin[frame[i]]
        begin[frame[i]] += 1
        number[i], state[place] = num_utts + place, i
    num_arcs = num_records + num_losers
    src_state, dst_state = np.empty(num_arcs, dtype=np.int64), np.empty(num_arcs, dtype=np.int64)
    for arc in range(num_arcs):
        if arc < num_records:
            own, before = record[arc], previous[record[arc]]
        else:
            own, before = dst[loser[arc - num_records]], src[loser[arc - num_records]]
        src_state[arc] = utt_idx[own] if before < 0 else number[before]
        dst_state[arc] = number[own]
    return record[:num_records], loser[:num_losers], state, number, src_state, dst_state


def order_by_source(src_state: Any, num_states: int) -> Any:
    """The arcs (A,) in the order of the states that they leave, otherwise as they were, and arc_begin (S + 1,)."""
    arc_begin = np.zeros(num_states + 1, dtype=np.int64)
    for state in src_state:
        arc_begin[state + 1] += 1
    arc_begin = arc_begin.cumsum()
    place, order = arc_begin.copy(), np.empty(len(src_state), dtype=np.int64)
    for arc in range(len(src_state)):
        order[place[src_state[arc]]] = arc
        place[src_state[arc]] += 1
    return order, arc_begin


def spread_forward(arc_begin: Any, dst_state: Any, arc_total: Any, score: Any) -> None:
    """Raises the score of each state (S,) to the best over the arcs that lead to it, states in the order of frames."""
    for state in range(len(score)):
        for arc in range(arc_begin[state], arc_begin[state + 1]):
            score[dst_state[arc]] = max(score[dst_state[arc]], score[state] + arc_total[arc])


def spread_backward(arc_begin: Any, dst_state: Any, arc_total: Any, score: Any) -> None:
    """Raises the score of each state (S,) to the best over the arcs that leave it, states in the order of frames."""
    for state in range(len(score) - 1, -1, -1):
        for arc in range(arc_begin[state], arc_begin[state + 1]):
            score[state] = max(score[state], score[dst_state[arc]] + arc_total[arc])
