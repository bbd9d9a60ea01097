"""A lattice put together and pruned, as a loop for `compiled_loop`. Uncompiled it is a slow oracle.

Shapes: N utterances, T frames, C tokens, S states, A arcs, W words.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.decoding.lattice.kernel import order_by_source, spread_backward, spread_forward


def build_pruned(parts: Any, graph: Any, log_prob: Any, scales: Any, beam: float) -> Any:
    """What `lattice_from_graph` makes of parts, pruned as by `prune`.

    Args:
        parts: frame, utt_idx, start_state, src_state, dst_state, arc, lm_score, final_graph_score and final_lm_score,
            as of `LatticeParts`; what belongs to states is overwritten.
        graph: token_id, score, word_begin and word_id of the decoding graph.
        log_prob: (N, T, C) unscaled.
        scales: am_scale, graph_scale, lm_scale and word_insertion_penalty.
        beam: what loses more is dropped.

    Returns:
        The fields of `Lattice`, in their order.
    """
    frame, utt_idx, start_state, src_state, dst_state, arc, lm_score, final_graph_score, final_lm_score = parts
    token_id, score, word_begin, word_id = graph
    am_scale, graph_scale, lm_scale, penalty = scales
    order, arc_begin = order_by_source(src_state, len(frame))
    src_state, dst_state, arc, lm_score = src_state[order], dst_state[order], arc[order], lm_score[order]
    arc_token, am_score = np.empty(len(arc), dtype=token_id.dtype), np.empty(len(arc), dtype=np.float32)
    graph_score, total = np.empty(len(arc), dtype=np.float32), np.empty(len(arc), dtype=np.float64)
    first_word, num_words = np.empty(len(arc), dtype=np.int64), np.empty(len(arc), dtype=np.int64)
    # Nothing here waits for what is loaded there.
    for i in range(len(arc)):
        arc_token[i], graph_score[i] = token_id[arc[i]], score[arc[i]]
        first_word[i], num_words[i] = word_begin[arc[i]], word_begin[arc[i] + 1] - word_begin[arc[i]]
    for i in range(len(arc)):
        am_score[i] = log_prob[utt_idx[src_state[i]], frame[src_state[i]], arc_token[i]]
        scaled = am_scale * np.float64(am_score[i]) + graph_scale * np.float64(graph_score[i])
        total[i] = scaled + lm_scale * np.float64(lm_score[i]) + penalty * np.float64(num_words[i])
    forward, backward = np.full(len(frame), -np.inf), np.full(len(frame), -np.inf)
    forward[start_state] = 0.0
    spread_forward(arc_begin, dst_state, total, forward)
    for state in range(len(frame)):
        if final_graph_score[state] > -np.inf:
            final = graph_scale * np.float64(final_graph_score[state])
            backward[state] = final + lm_scale * np.float64(final_lm_score[state])
    spread_backward(arc_begin, dst_state, total, backward)
    limit = backward[start_state] - beam
    # Rounding must not cost the best path its arcs.
    limit = limit - 1e-6 * np.maximum(np.abs(limit), 1.0)
    is_start, number, num_kept = np.zeros(len(frame), dtype=np.bool_), np.full(len(frame), -1), 0
    is_start[start_state] = True
    for state in range(len(frame)):
        through = forward[state] + backward[state]
        if is_start[state] or (through >= limit[utt_idx[state]] and through > -np.inf):
            number[state] = num_kept
            num_kept += 1
    # What stays moves up.
    num_arcs, total_words = 0, 0
    new_begin, new_word_begin = np.zeros(num_kept + 1, dtype=np.int64), np.zeros(len(arc) + 1, dtype=np.int64)
    for i in range(len(arc)):
        through = forward[src_state[i]] + total[i] + backward[dst_state[i]]
        lowest = limit[utt_idx[src_state[i]]]
        if number[src_state[i]] < 0 or number[dst_state[i]] < 0 or through < lowest or through == -np.inf:
            continue
        new_begin[number[src_state[i]] + 1] += 1
        dst_state[num_arcs], arc[num_arcs], arc_token[num_arcs] = number[dst_state[i]], arc[i], arc_token[i]
        am_score[num_arcs], graph_score[num_arcs], lm_score[num_arcs] = am_score[i], graph_score[i], lm_score[i]
        first_word[num_arcs] = first_word[i]
        total_words += num_words[i]
        num_arcs += 1
        new_word_begin[num_arcs] = total_words
    words = np.empty(total_words, dtype=np.int64)
    for i in range(num_arcs):
        for position in range(new_word_begin[i], new_word_begin[i + 1]):
            words[position] = word_id[first_word[i] + position - new_word_begin[i]]
    for state in range(len(frame)):
        if number[state] >= 0:
            own = number[state]
            frame[own], utt_idx[own] = frame[state], utt_idx[state]
            final_graph_score[own], final_lm_score[own] = final_graph_score[state], final_lm_score[state]
    return (
        frame[:num_kept], utt_idx[:num_kept], number[start_state], new_begin.cumsum(), dst_state[:num_arcs],
        arc[:num_arcs], arc_token[:num_arcs], am_score[:num_arcs], graph_score[:num_arcs], lm_score[:num_arcs],
        new_word_begin[: num_arcs + 1], words, final_graph_score[:num_kept], final_lm_score[:num_kept],
    )  # fmt: skip
