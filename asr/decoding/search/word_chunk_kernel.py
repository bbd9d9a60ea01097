"""The token search with a difference of language models, which is looked up within the loop: many frames to a call.

Shapes: N streams, K partial paths, P paths behind the last frames, Q word queries, R records, B frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.decoding.search.chunk_kernel import with_room
from asr.decoding.search.lm_chunk_kernel import keep_words, read_to_words
from asr.lm.difference_kernel import score_difference


def read_with_words(
    tokens: Any, arcs: Any, log_prob: Any, frame_begin: Any, num_columns: int, num_left: Any, offset: Any,
    beam: Any, word_beam: Any, lm_scale: Any, min_active: int, max_active: int,
    large: Any, small: Any, first_record: int, most_records: int,
) -> tuple[Any, Any, Any, Any, Any, bool]:  # fmt: skip
    """Reads the frames of each stream, one stream after the other, as far as the models' loops can answer.

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
        The paths behind the last frames that were read, as `tokens`, (P,) each; the histories (Q,) that streams wait
        for, which stand before a frame that asks them; the records: previous and arc (R,), and the number of each
        frame's first one (B,). And whether all frames have been read.
    """
    arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state = arcs
    streams, states, scores, contexts, lm_scores, last_records = tokens
    none = np.empty(0, dtype=np.int64)
    all_stream, all_state, all_context, all_record = none, none, none, none
    all_score, all_lm_score = scores[:0], lm_scores[:0]
    waits_for, previous, record_arc, block_begin = none, none, none, none
    num_paths, num_waiting, num_records, num_blocks = 0, 0, 0, 0
    begin, is_over = 0, True
    while begin < len(states):
        own, end = streams[begin], begin
        while end < len(states) and streams[end] == own:
            end += 1
        stream, state, score = streams[begin:end], states[begin:end], scores[begin:end]
        context_idx, lm_score, record = contexts[begin:end], lm_scores[begin:end], last_records[begin:end]
        begin = end
        is_going = True
        while is_going:
            (
                stream, state, context_idx, score, lm_score, record, source, arc, candidate_stream, candidate_score,
                changed, history, word, before, before_arc, begins, offset_before,
            ) = read_to_words(
                stream, state, score, context_idx, lm_score, record,
                arc_begin, token_id, arc_score, num_words, word_begin, word_id, dst_state,
                log_prob, frame_begin, num_columns, num_left, offset,
                beam, word_beam, min_active, max_active, first_record + num_records,
            )  # fmt: skip
            previous = _with(previous, num_records, before)
            record_arc = _with(record_arc, num_records, before_arc)
            block_begin = _with(block_begin, num_blocks, begins)
            num_records, num_blocks = num_records + len(before), num_blocks + len(begins)
            if not len(word):
                break
            word_score, next_idx, lacking = _scored(
                history, word, arc[changed], num_words, word_begin, word_id, large, small
            )
            if len(lacking):
                # The frame is read again when it can be answered.
                offset[own] = offset_before[own]
                frame_begin[own] -= num_columns
                num_left[own] += 1
                waits_for = _with(waits_for, num_waiting, lacking)
                num_waiting += len(lacking)
                is_over = False
                break
            stream, state, context_idx, score, lm_score, before, before_arc = keep_words(
                source, arc, candidate_stream, candidate_score, changed, word_score, next_idx, lm_scale, context_idx,
                lm_score, record, dst_state, offset, beam, min_active, max_active,
            )  # fmt: skip
            previous = _with(previous, num_records, before)
            record_arc = _with(record_arc, num_records, before_arc)
            record = first_record + np.arange(num_records, num_records + len(before))
            block_begin = _with(block_begin, num_blocks, record[:1])
            num_records, num_blocks = num_records + len(before), num_blocks + len(record[:1])
            is_going = num_records < most_records
            is_over = is_over and is_going
        all_stream, all_state = _with(all_stream, num_paths, stream), _with(all_state, num_paths, state)
        all_context, all_record = _with(all_context, num_paths, context_idx), _with(all_record, num_paths, record)
        all_score, all_lm_score = _with(all_score, num_paths, score), _with(all_lm_score, num_paths, lm_score)
        num_paths += len(state)
    paths = (
        all_stream[:num_paths], all_state[:num_paths], all_score[:num_paths], all_context[:num_paths],
        all_lm_score[:num_paths], all_record[:num_paths],
    )  # fmt: skip
    return (
        paths, waits_for[:num_waiting], previous[:num_records], record_arc[:num_records], block_begin[:num_blocks],
        is_over,
    )  # fmt: skip


def _with(array: Any, num: int, values: Any) -> Any:
    """The first `num` of an array, and these values behind them, perhaps with more room."""
    array = with_room(array, num + len(values))
    array[num : num + len(values)] = values
    return array


def _scored(
    history: Any, word: Any, arc: Any, num_words: Any, word_begin: Any, word_id: Any, large: Any, small: Any
) -> tuple[Any, Any, Any]:
    """The scores of all words of arcs (Q,), of which `word` is the first, after their histories, and those behind them.

    Where these cannot be told, the histories that are asked come last (Q',).
    """
    word_score, next_idx, could = score_difference(history, word, large, small)
    if not could:
        return word_score, next_idx, history
    more, context = np.empty(len(arc), dtype=np.int64), np.empty(len(arc), dtype=np.int64)
    further, position = np.empty(len(arc), dtype=np.int64), 1
    while True:
        num = 0
        for i in range(len(arc)):
            if num_words[arc[i]] > position:
                more[num], context[num], further[num] = i, next_idx[i], word_id[word_begin[arc[i]] + position]
                num += 1
        if not num:
            return word_score, next_idx, history[:0]
        log_prob, following, could = score_difference(context[:num], further[:num], large, small)
        if not could:
            return word_score, next_idx, context[:num]
        for j in range(num):
            word_score[more[j]] += log_prob[j]
            next_idx[more[j]] = following[j]
        position += 1
