"""Several frames of the token search in one call, by the loops of a frame, where no language model takes part.

Shapes: N streams, K partial paths, T frames, S states, R records.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.decoding.search.cut_off_kernel import compiled
from asr.decoding.search.frame_kernel import expand_frame, keep_frame


@compiled
def read_frames(
    stream: Any,
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
    num_frames: int,
    num_columns: int,
    offset: Any,
    table: Any,
    beam: Any,
    min_active: int,
    max_active: int,
    first_record: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    """Reads frames of streams none of which ends before the last.

    Args:
        stream, state, score, record: (K,) the partial paths before, those of a stream side by side.
        arc_begin, token_id, arc_score, num_words, dst_state: the graph's arcs.
        log_prob, frame_begin: scores of all frames, flat, and where each stream's first frame begins in them (N,).
        num_frames: T.
        num_columns: how far on the next frame begins.
        offset: (N,) float64; what scores lack is added in place.
        table, beam, min_active, max_active: as of `keep_frame`.
        first_record: the number of the first record to be made.

    Returns:
        stream, state, score, record of the paths behind the last frame; the records made, previous (R,) and arc (R,);
        and the number of each frame's first record (T,).
    """
    previous = np.empty(4 * len(state) * num_frames + 1024, dtype=np.int64)
    record_arc = np.empty_like(previous)
    block_begin = np.empty(num_frames, dtype=np.int64)
    no_context = np.zeros(0, dtype=np.int64)
    no_beam, before = np.float32(np.inf), np.empty_like(offset)
    num = 0
    for frame in range(num_frames):
        before[:] = offset
        reach = beam
        while True:
            source, arc, new_stream, new_score, is_complete = expand_frame(
                stream, state, score, arc_begin, token_id, arc_score, num_words,
                log_prob, frame_begin + frame * num_columns, offset, reach, beam, no_beam, min_active, False,
            )  # fmt: skip
            new_state = np.empty(len(arc), dtype=np.int64)
            for i in range(len(arc)):
                new_state[i] = dst_state[arc[i]]
            _, kept, is_enough = keep_frame(
                new_stream, new_state, no_context, new_score, is_complete, table, beam, min_active, max_active
            )
            if is_enough:
                break
            # Fewer than min_active are near the best: those that were left out count after all.
            offset[:] = before
            reach = no_beam
        if num + len(kept) > len(previous):
            room = np.empty(max(num + len(kept), 2 * len(previous)), dtype=np.int64)
            arc_room = np.empty_like(room)
            room[:num], arc_room[:num] = previous[:num], record_arc[:num]
            previous, record_arc = room, arc_room
        block_begin[frame] = first_record + num
        stream, state = np.empty(len(kept), dtype=np.int64), np.empty(len(kept), dtype=np.int64)
        next_record, score = np.empty(len(kept), dtype=np.int64), np.empty(len(kept), dtype=np.float32)
        for i in range(len(kept)):
            at = kept[i]
            stream[i], state[i], score[i] = new_stream[at], new_state[at], new_score[at]
            previous[num], record_arc[num] = record[source[at]], arc[at]
            next_record[i] = first_record + num
            num += 1
        record = next_record
    return stream, state, score, record, previous[:num], record_arc[:num], block_begin
