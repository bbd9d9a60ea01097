"""A frame of the token search with a language model: what is done before it is asked, and behind, compiled by numba.

Shapes: N streams, K partial paths, A candidates, Q of them with words, S states.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.decoding.search.cut_off_kernel import compiled
from asr.decoding.search.frame_kernel import expand_frame, keep_frame


@compiled
def expand_words(
    stream: Any,
    state: Any,
    score: Any,
    context_idx: Any,
    arc_begin: Any,
    token_id: Any,
    arc_score: Any,
    num_words: Any,
    word_begin: Any,
    word_id: Any,
    log_prob: Any,
    frame_begin: Any,
    offset: Any,
    beam: Any,
    word_beam: Any,
    min_active: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    """What partial paths become over arcs, and what is to be asked.

    Args:
        stream, state, score, context_idx: (K,) the paths.
        arc_begin, token_id, arc_score, num_words, word_begin, word_id: the graph's arcs and their words.
        log_prob, frame_begin, offset, beam, word_beam, min_active: as of `expand_frame`.

    Returns:
        source, arc, stream, score of the candidates (A,); which have words, their histories and their first words (Q,).
    """
    source, arc, new_stream, new_score, _ = expand_frame(
        stream, state, score, arc_begin, token_id, arc_score, num_words,
        log_prob, frame_begin, offset, beam, beam, word_beam, min_active, True,
    )  # fmt: skip
    changed, history = np.empty(len(arc), dtype=np.int64), np.empty(len(arc), dtype=np.int64)
    word = np.empty(len(arc), dtype=np.int64)
    num = 0
    for i in range(len(arc)):
        if num_words[arc[i]] > 0:
            changed[num], history[num] = i, context_idx[source[i]]
            word[num] = word_id[word_begin[arc[i]]]
            num += 1
    return source, arc, new_stream, new_score, changed[:num], history[:num], word[:num]


@compiled
def keep_words(
    source: Any,
    arc: Any,
    stream: Any,
    score: Any,
    changed: Any,
    word_score: Any,
    next_idx: Any,
    lm_scale: Any,
    context_idx: Any,
    lm_score: Any,
    record: Any,
    dst_state: Any,
    offset: Any,
    beam: Any,
    min_active: int,
    max_active: int,
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    """Adds what the language model says, recombines and prunes.

    Args:
        source, arc, stream, score: (A,) the candidates; the scores are changed in place.
        changed, word_score, next_idx: (Q,) those with words, what these score and the histories behind them.
        lm_scale: float32.
        context_idx, lm_score, record: (K,) of the paths before.
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
