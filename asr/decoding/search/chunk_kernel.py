"""Several frames of one stream in one call, by the loops of a frame, where no language model takes part.

A stream is followed by itself, so that the part of the graph around its paths stays in the processor's cache.

Shapes: K partial paths, T frames, S states, P paths before the first frame and behind each, one after the other,
R records, L losers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.decoding.search.cut_off_kernel import compiled
from asr.decoding.search.frame_kernel import expand_frame, keep_frame


@compiled
def read_frames(
    state: Any,
    score: Any,
    record: Any,
    arc_begin: Any,
    token_id: Any,
    arc_score: Any,
    num_words: Any,
    dst_state: Any,
    log_prob: Any,
    frame_begin: Any,
    offset: Any,
    table: Any,
    beam: Any,
    min_active: int,
    max_active: int,
    reach: Any,
    first_record: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any]:
    """Reads some frames.

    Args:
        state, score, record: (K,) the partial paths before.
        arc_begin, token_id, arc_score, num_words, dst_state: the graph's arcs.
        log_prob, frame_begin: scores, flat, and where each frame begins in them (T,).
        offset: (1,) float64; what scores lack is added in place.
        table, beam, min_active, max_active: as of `keep_frame`.
        reach: what loses by no more is told, too, below 0 nothing.
        first_record: the number of the first record to be made.

    Returns:
        The paths behind the last frame: state, score, record (K',).
        Records: previous and arc (R,), the number of each frame's first one (T,), and the frames read at each (R,).
        They are of the paths that lead to one behind the last frame and lose by no more than `reach` on the way, by
        nothing where nothing is told.
        Losers: the record that each comes from, the one that it lost, its arc, and by how much it lost (L,).
    """
    no_context, stream = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    no_beam = np.float32(np.inf)
    num_before, num_frames = len(state), len(frame_begin)
    num, first, num_losers = num_before, 0, 0
    previous, path_arc = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    path_begin, loser_begin = np.empty(num_frames + 1, dtype=np.int64), np.zeros(num_frames + 1, dtype=np.int64)
    src, dst, lost_arc = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    lost_by = np.empty(0, dtype=np.float32)
    for frame in range(num_frames):
        if len(stream) < len(state):
            stream = np.zeros(2 * len(state), dtype=np.int64)
        before, frame_reach = offset[0], beam
        while True:
            source, arc, new_stream, new_score, is_complete = expand_frame(
                stream[: len(state)], state, score, arc_begin, token_id, arc_score, num_words, log_prob,
                frame_begin[frame : frame + 1], offset, frame_reach, beam, no_beam, min_active, False,
            )  # fmt: skip
            new_state = np.empty(len(arc), dtype=np.int64)
            for i in range(len(arc)):
                new_state[i] = dst_state[arc[i]]
            winner, kept, is_enough = keep_frame(
                new_stream, new_state, no_context, new_score, is_complete, table, beam, min_active, max_active
            )
            if is_enough:
                break
            # Fewer than min_active are near the best: those that were left out count after all.
            offset[0] = before
            frame_reach = no_beam
        path_begin[frame] = num
        previous, path_arc = with_room(previous, num + len(kept)), with_room(path_arc, num + len(kept))
        state, score = np.empty(len(kept), dtype=np.int64), np.empty(len(kept), dtype=np.float32)
        for i in range(len(kept)):
            state[i], score[i] = new_state[kept[i]], new_score[kept[i]]
            previous[num + i], path_arc[num + i] = first + source[kept[i]], arc[kept[i]]
        if reach >= 0:
            room = num_losers + len(arc)
            src, dst = with_room(src, room), with_room(dst, room)
            lost_arc, lost_by = with_room(lost_arc, room), with_room(lost_by, room)
            # As everywhere in the search, what falls behind its beam is gone, unless so few survive that worse ones do.
            lowest = -beam
            path = np.full(len(arc), -1, dtype=np.int32)
            for i in range(len(kept)):
                path[kept[i]] = num + i
                lowest = min(lowest, score[i])
            lost, num_lost = np.empty(len(arc), dtype=np.int32), 0
            for i in range(len(arc)):
                lost[num_lost] = i
                num_lost += int((winner[i] != i) & (new_score[i] >= lowest))
            for k in range(num_lost):
                i = lost[k]
                won, by = path[winner[i]], new_score[winner[i]] - new_score[i]
                src[num_losers], dst[num_losers] = first + source[i], won
                lost_arc[num_losers], lost_by[num_losers] = arc[i], by
                num_losers += int((won >= 0) & (by <= reach))
        first = num
        num += len(kept)
        loser_begin[frame + 1] = num_losers
    path_begin[num_frames] = num
    loss = _losses(previous[:num], path_begin, src, dst, lost_by, loser_begin, reach)
    number = np.empty(num, dtype=np.int64)
    number[:num_before] = record
    num_records = 0
    block_begin, record_frame = np.empty(num_frames, dtype=np.int64), np.empty(num, dtype=np.int64)
    for frame in range(num_frames):
        block_begin[frame] = first_record + num_records
        for i in range(path_begin[frame], path_begin[frame + 1]):
            if loss[i] < np.inf:
                # Never behind the place that is read.
                number[i] = first_record + num_records
                previous[num_records], path_arc[num_records] = number[previous[i]], path_arc[i]
                record_frame[num_records] = frame + 1
                num_records += 1
    stay = 0
    for i in range(num_losers):
        if loss[dst[i]] + lost_by[i] <= reach and loss[dst[i]] < np.inf:
            src[stay], dst[stay] = number[src[i]], number[dst[i]]
            lost_arc[stay], lost_by[stay] = lost_arc[i], lost_by[i]
            stay += 1
    # What is handed out must not hold on to rooms that are many times its size: these serve the next frames again.
    return (
        state, score, number[first:].copy(),
        previous[:num_records].copy(), path_arc[:num_records].copy(), block_begin, record_frame[:num_records].copy(),
        src[:stay].copy(), dst[:stay].copy(), lost_arc[:stay].copy(), lost_by[:stay].copy(),
    )  # fmt: skip


@compiled
def _losses(previous: Any, path_begin: Any, src: Any, dst: Any, lost_by: Any, loser_begin: Any, reach: Any) -> Any:
    """How much the best way on from each path (P,) loses against the best way to the same last path, or infinity."""
    loss = np.full(path_begin[-1], np.inf, dtype=np.float32)
    num_frames = len(path_begin) - 1
    loss[path_begin[num_frames - 1] if num_frames else 0 :] = 0.0
    for frame in range(num_frames - 1, -1, -1):
        for i in range(path_begin[frame], path_begin[frame + 1]):
            loss[previous[i]] = min(loss[previous[i]], loss[i])
        for i in range(loser_begin[frame], loser_begin[frame + 1]):
            by = loss[dst[i]] + lost_by[i]
            if by <= reach:
                loss[src[i]] = min(loss[src[i]], by)
    return loss


@compiled
def with_room(array: Any, size: int) -> Any:
    """The array, or a larger one that begins with it."""
    if size <= len(array):
        return array
    larger = np.empty(2 * size, dtype=array.dtype)
    larger[: len(array)] = array
    return larger
