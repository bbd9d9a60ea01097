"""All paths through a graph, one by one: the oracle of both first passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import assume
from torch import Tensor

from asr.graph.decoding_graph import DecodingGraph
from tests.reference.table_lm import TableLM


@dataclass(frozen=True)
class ScoredWords:
    """A word sequence and the best total of any path that spells it."""

    words: tuple[int, ...]
    total: float


def exhaustive_search(
    graph: DecodingGraph,
    log_prob: Tensor,
    lm: TableLM | None = None,
    am_scale: float = 1.0,
    graph_scale: float = 1.0,
    lm_scale: float = 1.0,
    word_insertion_penalty: float = 0.0,
) -> list[ScoredWords]:
    """Every word sequence that the graph allows for log_prob (T, C), best first.

    Hypothesis draws other examples in place of the few with so many partial paths that they would take minutes.
    """
    begin, dst = graph.arc_begin.tolist(), graph.dst_state.tolist()
    token, score = graph.token_id.tolist(), graph.score.tolist()
    word_begin, word_id = graph.word_begin.tolist(), graph.word_id.tolist()
    final = graph.final_score.tolist()

    def extended(paths: dict, frame: list[float] | None) -> dict:
        """Paths after one more arc, those that read nothing where `frame` is None."""
        result: dict[tuple[int, tuple[int, ...]], float] = {}
        for (state, words), total in paths.items():
            for arc in range(begin[state], begin[state + 1]):
                if (token[arc] < 0) != (frame is None):
                    continue
                new_words = words + tuple(word_id[word_begin[arc] : word_begin[arc + 1]])
                new = total + graph_scale * score[arc] + word_insertion_penalty * (len(new_words) - len(words))
                if frame is not None:
                    new += am_scale * frame[token[arc]]
                place = (dst[arc], new_words)
                result[place] = max(result.get(place, -math.inf), new)
        return result

    def closed(paths: dict) -> dict:
        newest = paths
        while newest:
            newest = {p: s for p, s in extended(newest, None).items() if s > paths.get(p, -math.inf) + 1e-9}
            paths = {**paths, **newest}
        return paths

    paths: dict[tuple[int, tuple[int, ...]], float] = closed({(0, ()): 0.0})
    for frame in log_prob.tolist():
        paths = closed(extended(paths, frame))
        assume(len(paths) < 30_000)
    totals: dict[tuple[int, ...], float] = {}
    for (state, words), total in paths.items():
        if final[state] == -math.inf:
            continue
        total += graph_scale * final[state]
        totals[words] = max(totals.get(words, -math.inf), total)
    if lm is not None:
        totals = {words: total + lm_scale * lm.score_sentence(words) for words, total in totals.items()}
    return sorted((ScoredWords(*item) for item in totals.items()), key=lambda scored: -scored.total)
