"""Builds the lattice of a chunk of frames, which the language model then rescores, with a numba loop.

Shapes: N streams, T frames, R backpointers, L losing arcs, S states, A arcs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from asr.kernels.jit import kernel


class ChunkRecords(NamedTuple):
    """Backpointers (R,) and losing arcs (L,) of a chunk, see `LatticeRecords.add_frames`.

    Backpointers of frame 0 are the tokens before the chunk. All others come after those that lead to them.

    Attributes:
        previous, arc: of the backpointers; unused at frame 0.
        utt_idx, frame: streams of the backpointers, and number of frames of the chunk read.
        src, dst, losing_arc, score_gap: of the losing arcs.
        loss: (R,) float32, how far the best path through each backpointer is below the stream's best path.
    """

    previous: Any
    arc: Any
    utt_idx: Any
    frame: Any
    src: Any
    dst: Any
    losing_arc: Any
    score_gap: Any
    loss: Any


@kernel(fastmath=False)
def connect_chunk(
    records: Any, last_frame: Any, margin: Any, arc_score: Any, arc_token: Any, log_prob: Any, score: Any
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """The states and arcs of a chunk that are within the margin, with pushed scores.

    With pushed scores, a path to a state has the score of its best continuation in the search, which extends beyond
    `last_frame`.

    Args:
        records: `ChunkRecords`.
        last_frame: (N,) number of frames that belong to the graph.
        margin: float32, maximum loss of a path.
        arc_score, arc_token: scores and tokens of the arcs that were searched.
        log_prob: (N, T, C) float32, scaled, as in the search.
        score: (R,) float64, given at frame 0; filled in for all states.

    Returns:
        number (R,): the state of each backpointer, -1 for none; backpointer (S,): the inverse.
        arc_begin (S + 1,), dst_state (A,), pushed score (A,) float32 and searched arc (A,) of the graph.
    """
    number, num_states = np.full(len(records.previous), -1, dtype=np.int64), 0
    backpointer = np.empty(len(records.previous), dtype=np.int64)
    for own in range(len(records.previous)):
        utt_idx, frame = records.utt_idx[own], records.frame[own]
        if not records.loss[own] <= margin or frame > last_frame[utt_idx]:
            continue
        number[own], backpointer[num_states] = num_states, own
        num_states += 1
        if frame > 0:
            arc = records.arc[own]
            read = np.float64(arc_score[arc]) + np.float64(log_prob[utt_idx, frame - 1, arc_token[arc]])
            score[own] = score[records.previous[own]] + read
    # The first pass counts the arcs that leave each state, the second one writes them.
    place = np.zeros(num_states + 1, dtype=np.int64)
    dst_state, arc_of = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
    pushed, arc_begin = np.empty(0, dtype=np.float32), place
    for fills in range(2):
        for own in range(len(records.previous)):
            if number[own] >= 0 and records.frame[own] > 0:
                before = number[records.previous[own]]
                if fills:
                    at = place[before]
                    dst_state[at], arc_of[at] = number[own], records.arc[own]
                    pushed[at] = records.loss[records.previous[own]] - records.loss[own]
                place[before] += 1
        for i in range(len(records.dst)):
            won = records.dst[i]
            if number[won] >= 0 and records.loss[won] + records.score_gap[i] <= margin:
                before = number[records.src[i]]
                if fills:
                    at = place[before]
                    dst_state[at], arc_of[at] = number[won], records.losing_arc[i]
                    pushed[at] = records.loss[records.src[i]] - (records.loss[won] + records.score_gap[i])
                place[before] += 1
        if not fills:
            arc_begin = np.zeros(num_states + 1, dtype=np.int64)
            arc_begin[1:] = place[:num_states].cumsum()
            place = arc_begin.copy()
            num_arcs = arc_begin[num_states]
            dst_state, arc_of = np.empty(num_arcs, dtype=np.int32), np.empty(num_arcs, dtype=np.int64)
            pushed = np.empty(num_arcs, dtype=np.float32)
    return number, backpointer[:num_states], arc_begin, dst_state, pushed, arc_of
