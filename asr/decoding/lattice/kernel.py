"""What a lattice's paths lose and gain, as loops for `compiled_loop`. Uncompiled they are slow oracles.

Shapes: R records, L losers, S states, A arcs.
"""

from __future__ import annotations

from typing import Any


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
