"""The token search with a difference of n-gram models, which is looked up within the loop: many frames to a call.

Shapes: N streams, K partial paths, P paths behind the last frames, Q word queries, R records, B frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.decoding.search.chunk_kernel import with_room
from asr.decoding.search.cut_off_kernel import compiled
from asr.decoding.search.lm_chunk_kernel import keep_words, read_to_words
from asr.lm.compiled_loop import compiled_loop
from asr.lm.ngram import difference_kernel

score_difference: Any = compiled_loop(difference_kernel.score_difference, reorders_sums=False)


@compiled
def read_with_words(
    tokens: Any, arcs: Any, log_prob: Any, frame_begin: Any, num_columns: int, num_left: Any, offset: Any,
    beam: Any, word_beam: Any, lm_scale: Any, min_active: int, max_active: int,
    large: Any, small: Any, first_record: int, most_records: int,
) -> tuple[Any, Any, Any, Any, bool]:  # fmt: skip
    """Reads all frames of each stream, or until there are enough records.

    Args:
        tokens: stream, state, score, context_idx, lm_score, record of the paths before, (K,) each, those of a stream
            side by side.
        arcs: arc_begin, token_id, score, num_words, word_begin, word_id and dst_state of the graph's arcs.
        log_prob, frame_begin, num_columns, num_left, offset, beam, word_beam, min_active, max_active: as of
            `read_to_words`.
        lm_scale: float32.
        large, small: as of `score_difference`.
        first_record: the number of the first record to be made.
        most_records: how many are enough.

    Returns:
        The paths behind the last frames, as `tokens`, (P,) each; the records: previous and arc (R,), and the number of
        each frame's first one (B,). And whether all frames have been read.
    """
    arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state = arcs
    stream, state, score, context_idx, lm_score, record = tokens
    previous, record_arc = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    block_begin = np.empty(0, dtype=np.int64)
    num_records, num_blocks = 0, 0
    is_over = False
    while not is_over and num_records < most_records:
        (
            stream, state, context_idx, score, lm_score, record, source, arc, candidate_stream, candidate_score,
            changed, history, word, before, before_arc, begins,
        ) = read_to_words(
            stream, state, score, context_idx, lm_score, record,
            arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state,
            log_prob, frame_begin, num_columns, num_left, offset,
            beam, word_beam, min_active, max_active, first_record + num_records,
        )  # fmt: skip
        room = num_records + len(before)
        previous, record_arc = with_room(previous, room), with_room(record_arc, room)
        previous[num_records:room], record_arc[num_records:room] = before, before_arc
        num_records = room
        block_begin = with_room(block_begin, num_blocks + len(begins) + 1)
        block_begin[num_blocks : num_blocks + len(begins)] = begins
        num_blocks += len(begins)
        is_over = len(word) == 0
        if is_over:
            break
        word_score, next_idx = score_difference(history, word, large, small)
        _add_further_words(arc, changed, num_words, word_begin, word_id, large, small, word_score, next_idx)
        new_stream, new_state, new_context, new_score, new_lm_score, before, before_arc = keep_words(
            source, arc, candidate_stream, candidate_score, changed, word_score, next_idx, lm_scale, context_idx,
            lm_score, record, dst_state, offset, beam, min_active, max_active,
        )  # fmt: skip
        room = num_records + len(before)
        previous, record_arc = with_room(previous, room), with_room(record_arc, room)
        previous[num_records:room], record_arc[num_records:room] = before, before_arc
        block_begin[num_blocks] = first_record + num_records
        num_blocks += 1
        new_record = first_record + np.arange(num_records, room)
        num_records = room
        # Streams that had no words have come to their end and wait in front of the others.
        has_words = np.zeros(len(offset), dtype=np.bool_)
        for i in range(len(changed)):
            has_words[candidate_stream[changed[i]]] = True
        over = np.empty(len(stream), dtype=np.int64)
        num_over = 0
        for i in range(len(stream)):
            if not has_words[stream[i]]:
                over[num_over] = i
                num_over += 1
        over = over[:num_over]
        stream, state = _joined(stream[over], new_stream), _joined(state[over], new_state)
        context_idx, record = _joined(context_idx[over], new_context), _joined(record[over], new_record)
        score, lm_score = _joined(score[over], new_score), _joined(lm_score[over], new_lm_score)
    paths = (stream, state, score, context_idx, lm_score, record)
    return paths, previous[:num_records], record_arc[:num_records], block_begin[:num_blocks], is_over


@compiled
def _joined(one: Any, other: Any) -> Any:
    both = np.empty(len(one) + len(other), dtype=one.dtype)
    both[: len(one)], both[len(one) :] = one, other
    return both


@compiled
def _add_further_words(
    arc: Any, changed: Any, num_words: Any, word_begin: Any, word_id: Any, large: Any, small: Any,
    word_score: Any, next_idx: Any,
) -> None:  # fmt: skip
    """Adds to what was scored (Q,) the words of the arcs behind the first; changed (Q,) are the arcs' places."""
    position = 1
    while True:
        more = np.empty(len(changed), dtype=np.int64)
        context, word = np.empty(len(changed), dtype=np.int64), np.empty(len(changed), dtype=np.int64)
        num = 0
        for i in range(len(changed)):
            own = arc[changed[i]]
            if num_words[own] > position:
                more[num], context[num], word[num] = i, next_idx[i], word_id[word_begin[own] + position]
                num += 1
        if not num:
            return
        log_prob, following = score_difference(context[:num], word[:num], large, small)
        for j in range(num):
            word_score[more[j]] += log_prob[j]
            next_idx[more[j]] = following[j]
        position += 1
