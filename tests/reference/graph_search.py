"""Every word sequence that a graph writes for some frames, with its best score: the plainest search there is."""

from __future__ import annotations

import torch

from asr.graph.decoding_graph import DecodingGraph

Scores = dict[tuple[int, ...], float]


def word_sequence_scores(graph: DecodingGraph, log_prob: torch.Tensor) -> Scores:
    """All complete paths, the best score for each word sequence.

    Args:
        graph: with or without epsilons.
        log_prob: (T, C) frame log-probabilities.
    """
    columns = (graph.src_state(), graph.dst_state, graph.token_id, graph.score)
    arcs = list(zip(*(column.tolist() for column in columns), strict=True))
    begin, word_id = graph.word_begin.tolist(), graph.word_id.tolist()
    out: dict[int, list[tuple[int, int, float, tuple[int, ...]]]] = {}
    for arc_idx, (src_state, dst_state, token_id, score) in enumerate(arcs):
        words = tuple(word_id[begin[arc_idx] : begin[arc_idx + 1]])
        out.setdefault(src_state, []).append((dst_state, token_id, score, words))

    active = _with_epsilons({(graph.start_state, ()): 0.0}, out)
    for frame in log_prob.tolist():
        reached: dict[tuple[int, tuple[int, ...]], float] = {}
        for (state, words), total in active.items():
            for dst_state, token_id, score, more in out.get(state, []):
                if token_id >= 0:
                    key = (dst_state, words + more)
                    reached[key] = max(reached.get(key, float("-inf")), total + score + frame[token_id])
        active = _with_epsilons(reached, out)
    result: Scores = {}
    for (state, words), total in active.items():
        score = total + float(graph.final_score[state])
        if score > float("-inf"):
            result[words] = max(result.get(words, float("-inf")), score)
    return result


def _with_epsilons(
    active: dict[tuple[int, tuple[int, ...]], float],
    out: dict[int, list[tuple[int, int, float, tuple[int, ...]]]],
) -> dict[tuple[int, tuple[int, ...]], float]:
    active = dict(active)
    agenda = list(active)
    for state, words in agenda:
        for dst_state, token_id, score, more in out.get(state, []):
            key = (dst_state, words + more)
            if token_id < 0 and active[state, words] + score > active.get(key, float("-inf")):
                active[key] = active[state, words] + score
                agenda.append(key)
    return active
