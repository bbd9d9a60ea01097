"""Decoding graphs of several sentences in a row, with silence between them.

Shapes: S states, A arcs, E states where a sentence may end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asr.graph.fst import GraphArrays, IntArray, expand, offsets
from asr.text.symbols import EOS_ID

SILENCE = 0
"""The column of silence among tied states."""


def with_sentence_ends(graph: GraphArrays, num_frames: int) -> GraphArrays:
    """Adds arcs by which another sentence follows, after silence.

    The silence begins wherever a sentence may end, on an arc with the word `</s>` and the score of that end. After
    `num_frames` frames it becomes the silence before a sentence, with its score, which lasts as long as it likes.

    Args:
        graph: labels are tied states; the arcs of each state are sorted by score, the best first.
        num_frames: the least number of frames of silence, at least 2.

    Returns:
        The graph with `num_frames` - 1 more states at the end.
    """
    is_silent = _silent_states(graph)
    before = np.flatnonzero(graph.label[: graph.arc_begin[1]] == SILENCE)
    before = before[is_silent[graph.dst_state[before]]]
    # Silence after the last word would only be another way to divide the same silence.
    may_end = np.isfinite(graph.final_score) & ~is_silent
    may_end[0] = False  # nothing has been said
    ends = np.flatnonzero(may_end)
    first, num_new = graph.num_states, num_frames - 1
    # The arcs of the new states: from each to the next one, and from the last one to the silence before a sentence.
    dst_state = np.append(np.arange(first + 1, first + num_new), graph.dst_state[before])
    score = np.append(np.zeros(num_new - 1), graph.score[before])
    words = graph.words.take(before)
    num_words = np.append(np.zeros(num_new - 1, dtype=np.int64), words.counts)
    num_arcs = np.concatenate((np.diff(graph.arc_begin) + may_end, np.ones(num_new - 1, dtype=np.int64), [len(before)]))
    # They come last, after those of the states where a sentence may end.
    place = np.append(_places_by_score(graph, ends), np.full(len(score), graph.num_arcs))
    word_place = np.append(graph.word_begin[place[: len(ends)]], np.full(len(words.word_id), len(graph.word_id)))
    return GraphArrays(
        arc_begin=offsets(num_arcs),
        dst_state=np.insert(graph.dst_state, place, np.append(np.full(len(ends), first), dst_state)),
        label=np.insert(graph.label, place, SILENCE),
        score=np.insert(graph.score, place, np.append(graph.final_score[ends], score)),
        word_begin=offsets(np.insert(graph.words.counts, place, np.append(np.ones(len(ends)), num_words))),
        word_id=np.insert(graph.word_id, word_place, np.append(np.full(len(ends), EOS_ID), words.word_id)),
        final_score=np.append(graph.final_score, np.full(num_new, -np.inf, dtype=np.float32)),
    )


def _silent_states(graph: GraphArrays) -> npt.NDArray[np.bool_]:
    """Which states are within silence, (S,) bool: an arc of silence leads back to them."""
    is_silent = np.zeros(graph.num_states, dtype=bool)
    is_silent[graph.dst_state[(graph.label == SILENCE) & (graph.dst_state == graph.src_state())]] = True
    return is_silent


def _places_by_score(graph: GraphArrays, states: IntArray) -> IntArray:
    """Where an arc with the final score belongs among the arcs of each of these states (E,)."""
    arc, owner = expand(graph.arc_begin[states], np.diff(graph.arc_begin)[states])
    num_better = np.bincount(owner[graph.score[arc] >= graph.final_score[states][owner]], minlength=len(states))
    return graph.arc_begin[states] + num_better
