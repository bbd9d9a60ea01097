"""What a search of a chunk of frames has left, as a graph for the language model to go over, by a numba loop.

Shapes: N streams, T frames, R back-pointers, L losing arcs, S states, A arcs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from asr.kernels.jit import kernel


class ChunkRecords(NamedTuple):
    """Back-pointers (R,) and losing arcs (L,) of a chunk, see `LatticeRecords.add_frames`.

    Back-pointers of frame 0 are the tokens with which the chunk began; all others come after those that lead to them.

    Attributes:
        previous, arc: of the back-pointers; neither counts at frame 0.
        utt_idx, frame: their streams, and the frames of the chunk read.
        src, dst, losing_arc, score_gap: of the losing arcs.
        loss: (R,) float32, by how much the best path through each loses against the stream's best.
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
    """The states and arcs of a chunk that are within the margin, scores pushed.

    A path that ends at a state has the score of its best way on by the scores of the search, which goes on behind
    `last_frame`.

    Args:
        records: `ChunkRecords`.
        last_frame: (N,) frames of the chunk that belong to the graph.
        margin: float32, the most that a path may lose.
        arc_score, arc_token: of the arcs that were searched.
        log_prob: (N, T, C) float32, as they were searched, scaled.
        score: (R,) float64, known at frame 0; filled in for all states.

    Returns:
        number (R,): the state of each back-pointer, -1 for none; backpointer (S,): the reverse.
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
    # First how many arcs leave each state, then the arcs.
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
