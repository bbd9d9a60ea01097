"""The token search with a language model between two of its answers, as loops for `compiled_loop`.

A stream is followed by itself up to its next frame that has words. So all streams ask together, whatever frame each
has come to, and the frames without words cost no call of their own.

Shapes: N streams, K partial paths, P paths behind the frames that have been read, A candidates, Q of them with words,
R records, B frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.decoding.search.chunk_kernel import with_room
from asr.decoding.search.frame_kernel import expand_frame, keep_frame


def read_to_words(
    stream: Any, state: Any, score: Any, context_idx: Any, lm_score: Any, record: Any,
    arc_begin: Any, token_id: Any, arc_score: Any, num_words: Any, word_begin: Any, word_id: Any, dst_state: Any,
    log_prob: Any, frame_begin: Any, num_columns: int, num_left: Any, offset: Any,
    beam: Any, word_beam: Any, min_active: int, max_active: int, first_record: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any]:  # fmt: skip
    """Reads the frames of each stream until one has words inside the beam, which is expanded only, or none is left.

    Args:
        stream, state, score, context_idx, lm_score, record: (K,) the paths before, those of a stream side by side.
        arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state: the graph's arcs and their words.
        log_prob: scores of all frames, flat, of num_columns each.
        frame_begin, num_left: (N,) where the stream's next frame begins in them, and how many frames are to be read;
            changed in place.
        offset: (N,) float64; what scores lack is added in place.
        beam, word_beam, min_active, max_active: as of `expand_frame` and `keep_frame`.
        first_record: the number of the first record to be made.

    Returns:
        The paths behind the frames that have been read: stream, state, context_idx, score, lm_score, record (P,).
        Candidates of the frames that have words: source among these paths, arc, stream, score (A,); which have words,
        their histories and their first words (Q,).
        Records: previous and arc (R,), and the number of each frame's first one (B,).
        What offset (N,) was before the frames that are expanded only.
    """
    none = np.empty(0, dtype=np.int64)
    path_stream, path_state, path_context, path_record = none, none, none, none
    path_score, path_lm_score = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.float64)
    source, arc, candidate_stream = none, none, none
    candidate_score = np.empty(0, dtype=np.float32)
    changed, history, word = none, none, none
    previous, record_arc, block_begin = none, none, none
    num_paths, num_candidates, num_changed, num_records, num_blocks = 0, 0, 0, 0, 0
    is_complete, no_table = np.ones(1, dtype=np.bool_), np.zeros(0, dtype=np.int32)
    offset_before = offset.copy()
    zeros = np.zeros(len(state), dtype=np.int64)
    begin = 0
    while begin < len(state):
        own, end = stream[begin], begin
        while end < len(state) and stream[end] == own:
            end += 1
        own_state, own_score, own_context = state[begin:end], score[begin:end], context_idx[begin:end]
        own_lm_score, own_record = lm_score[begin:end], record[begin:end]
        own_source, own_arc, own_candidate = none, none, candidate_score[:0]
        begin = end
        while num_left[own] and len(own_state):
            if len(zeros) < len(own_state):
                zeros = np.zeros(2 * len(own_state), dtype=np.int64)
            offset_before[own] = offset[own]
            own_source, own_arc, _, own_candidate, _ = expand_frame(
                zeros[: len(own_state)], own_state, own_score, arc_begin, token_id, arc_score, num_words, log_prob,
                frame_begin[own : own + 1], offset[own : own + 1], beam, beam, word_beam, min_active, True,
            )  # fmt: skip
            frame_begin[own] += num_columns
            num_left[own] -= 1
            has_words = False
            for i in range(len(own_arc)):
                has_words = has_words or num_words[own_arc[i]] > 0
            if has_words:
                break
            num = len(own_arc)
            if len(zeros) < num:
                zeros = np.zeros(2 * num, dtype=np.int64)
            new_state, new_context = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
            for i in range(num):
                new_state[i], new_context[i] = dst_state[own_arc[i]], own_context[own_source[i]]
            _, kept, _ = keep_frame(
                zeros[:num], new_state, new_context, own_candidate, is_complete, no_table, beam, min_active, max_active
            )
            room = num_records + len(kept)
            previous, record_arc = with_room(previous, room), with_room(record_arc, room)
            block_begin = with_room(block_begin, num_blocks + 1)
            block_begin[num_blocks] = first_record + num_records
            num_blocks += 1
            own_lm_score = own_lm_score[own_source[kept]]
            for i in range(len(kept)):
                previous[num_records + i] = own_record[own_source[kept[i]]]
                record_arc[num_records + i] = own_arc[kept[i]]
            own_state, own_context, own_score = new_state[kept], new_context[kept], own_candidate[kept]
            own_record = first_record + np.arange(num_records, room)
            num_records = room
            own_source, own_arc, own_candidate = none, none, candidate_score[:0]
        room = num_paths + len(own_state)
        path_stream, path_state = with_room(path_stream, room), with_room(path_state, room)
        path_context, path_record = with_room(path_context, room), with_room(path_record, room)
        path_score, path_lm_score = with_room(path_score, room), with_room(path_lm_score, room)
        path_stream[num_paths:room] = own
        path_state[num_paths:room], path_context[num_paths:room] = own_state, own_context
        path_score[num_paths:room], path_lm_score[num_paths:room] = own_score, own_lm_score
        path_record[num_paths:room] = own_record
        room = num_candidates + len(own_arc)
        source, arc = with_room(source, room), with_room(arc, room)
        candidate_stream, candidate_score = with_room(candidate_stream, room), with_room(candidate_score, room)
        changed, history, word = with_room(changed, room), with_room(history, room), with_room(word, room)
        for i in range(len(own_arc)):
            at = num_candidates + i
            source[at], arc[at] = num_paths + own_source[i], own_arc[i]
            candidate_stream[at], candidate_score[at] = own, own_candidate[i]
            if num_words[own_arc[i]] > 0:
                changed[num_changed], history[num_changed] = at, own_context[own_source[i]]
                word[num_changed] = word_id[word_begin[own_arc[i]]]
                num_changed += 1
        num_paths += len(own_state)
        num_candidates = room
    return (
        path_stream[:num_paths], path_state[:num_paths], path_context[:num_paths], path_score[:num_paths],
        path_lm_score[:num_paths], path_record[:num_paths],
        source[:num_candidates], arc[:num_candidates], candidate_stream[:num_candidates],
        candidate_score[:num_candidates], changed[:num_changed], history[:num_changed], word[:num_changed],
        previous[:num_records], record_arc[:num_records], block_begin[:num_blocks], offset_before,
    )  # fmt: skip


def keep_words(
    source: Any, arc: Any, stream: Any, score: Any, changed: Any, word_score: Any, next_idx: Any, lm_scale: Any,
    context_idx: Any, lm_score: Any, record: Any, dst_state: Any, offset: Any,
    beam: Any, min_active: int, max_active: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:  # fmt: skip
    """Adds what the language model says, recombines and prunes.

    Args:
        source, arc, stream, score: (A,) the candidates; the scores are changed in place.
        changed, word_score, next_idx: (Q,) those with words, what these score and the histories behind them.
        lm_scale: float32.
        context_idx, lm_score, record: (P,) of the paths before.
        dst_state: where the graph's arcs lead.
        offset: (N,) float64; what scores lack is added in place.
        beam, min_active, max_active: as of `keep_frame`.

    Returns:
        stream, state, context_idx, score, lm_score, the record before and the arc of what stays, (K',) each.
    """
    num = len(arc)
    state, new_context = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    new_lm_score = np.empty(num, dtype=np.float64)
    for i in range(num):
        state[i], new_context[i], new_lm_score[i] = dst_state[arc[i]], context_idx[source[i]], lm_score[source[i]]
    for i in range(len(changed)):
        at = changed[i]
        score[at] += word_score[i] * lm_scale
        new_lm_score[at] += word_score[i]
        new_context[at] = next_idx[i]
    best = np.full(len(offset), -np.inf, dtype=np.float32)
    for i in range(num):
        best[stream[i]] = max(best[stream[i]], score[i])
    for own in range(len(offset)):
        if best[own] == -np.inf:
            best[own] = 0.0
        offset[own] += best[own]
    for i in range(num):
        score[i] -= best[stream[i]]
    is_complete, no_table = np.ones(len(offset), dtype=np.bool_), np.zeros(0, dtype=np.int32)
    _, kept, _ = keep_frame(stream, state, new_context, score, is_complete, no_table, beam, min_active, max_active)
    previous = record[source[kept]]
    return stream[kept], state[kept], new_context[kept], score[kept], new_lm_score[kept], previous, arc[kept]
