"""Exact removal of input epsilons, by extending the arcs that lead to them.

An arc to a state with epsilons is copied for each state that epsilons reach from there. The usual method instead copies
the arcs that leave those states to the state with the epsilons. In the graph of a backoff model, that would give each
history the first phones of all words. Histories have few incoming and many outgoing arcs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.graph.fst import INPUT_EPSILON, GraphArrays, Words, expand, offsets


def remove_epsilons(graph: GraphArrays) -> GraphArrays:
    """An equivalent graph without input epsilons and without states that are on no path from start to end.

    The best score of every (labels, words) pair is unchanged. Of arcs that differ only in score, the best is kept.

    Raises:
        AsrError: epsilons form a cycle, a path of epsilons alone outputs words, or no path reaches a final state.
    """
    if not graph.has_epsilons:
        return trim(graph)
    graph = _without_start_epsilons(graph)
    epsilons = _Epsilons.of(graph)
    is_useful = (epsilons.num_others > 0) | (graph.final_score > -np.inf)
    reads = np.flatnonzero(graph.label != INPUT_EPSILON)
    src_state, label = graph.src_state()[reads], graph.label[reads]
    paths = [_Paths(np.arange(len(reads)), graph.dst_state[reads], graph.score[reads], graph.words.take(reads))]
    while len(longer := epsilons.extend(paths[-1])):
        paths.append(longer)
        _refuse_cycle(len(paths), graph)
    every = _Paths.concatenate(paths)
    every = every.take(np.flatnonzero(is_useful[every.state]))
    every = every.take(_best(src_state[every.root], label[every.root], every))
    root = every.root
    return trim(
        GraphArrays.from_arcs(src_state[root], every.state, label[root], every.score, every.words, graph.final_score)
    )


def trim(graph: GraphArrays) -> GraphArrays:
    """Removes states that are not on a path from the start to a final state; the others keep their order.

    Raises:
        AsrError: there is no such path.
    """
    src_state = graph.src_state()
    from_start = _reached(np.array([0]), src_state, graph.dst_state, graph.num_states)
    to_end = _reached(np.flatnonzero(graph.final_score > -np.inf), graph.dst_state, src_state, graph.num_states)
    kept = from_start & to_end
    if not kept[0]:
        raise AsrError("the decoding graph is empty: no path leads from its start to a final state.")
    return graph if kept.all() else graph.take_states(np.flatnonzero(kept))


@dataclass(frozen=True)
class _Paths:
    """Paths of one arc (or the start) and epsilons: index of the arc, state reached, score and words so far."""

    root: npt.NDArray[np.int64]
    state: npt.NDArray[np.int32]
    score: npt.NDArray[np.float32]
    words: Words

    def __len__(self) -> int:
        return len(self.root)

    def take(self, rows: npt.NDArray[np.int64]) -> _Paths:
        return _Paths(self.root[rows], self.state[rows], self.score[rows], self.words.take(rows))

    @classmethod
    def concatenate(cls, parts: list[_Paths]) -> _Paths:
        return cls(
            np.concatenate([part.root for part in parts]),
            np.concatenate([part.state for part in parts]),
            np.concatenate([part.score for part in parts]),
            Words.concatenate([part.words for part in parts]),
        )


@dataclass(frozen=True)
class _Epsilons:
    """The epsilon arcs of a graph, sorted by source state, and the number of other arcs of each state."""

    begin: npt.NDArray[np.int64]
    dst_state: npt.NDArray[np.int32]
    score: npt.NDArray[np.float32]
    words: Words
    num_others: npt.NDArray[np.int64]

    @classmethod
    def of(cls, graph: GraphArrays) -> _Epsilons:
        arcs = np.flatnonzero(graph.label == INPUT_EPSILON)
        counts = np.bincount(graph.src_state()[arcs], minlength=graph.num_states)
        return cls(
            offsets(counts),
            graph.dst_state[arcs],
            graph.score[arcs],
            graph.words.take(arcs),
            np.diff(graph.arc_begin) - counts,
        )

    def extend(self, paths: _Paths) -> _Paths:
        """All paths that are one epsilon longer."""
        arc, row = expand(self.begin[:-1][paths.state], np.diff(self.begin)[paths.state])
        words = paths.words.take(row).joined_with(self.words.take(arc))
        return _Paths(paths.root[row], self.dst_state[arc], paths.score[row] + self.score[arc], words)


def _without_start_epsilons(graph: GraphArrays) -> GraphArrays:
    """Copies to the start state the arcs of all states that epsilons reach from it."""
    epsilons = _Epsilons.of(graph)
    start = np.zeros(1, dtype=np.int64)
    paths = [_Paths(start, start.astype(np.int32), np.zeros(1, dtype=np.float32), Words.empty(1))]
    while len(longer := epsilons.extend(paths[-1])):
        paths.append(longer)
        _refuse_cycle(len(paths), graph)
    if len(paths) == 1:
        return graph
    every = _Paths.concatenate(paths[1:])
    ends = graph.final_score[every.state] + every.score
    if (every.words.counts[ends > -np.inf] > 0).any():
        raise AsrError("the decoding graph outputs words without any input; give all words a pronunciation.")
    final_score = graph.final_score.copy()
    final_score[0] = max(final_score[0], ends.max())

    arc, row = expand(graph.arc_begin[every.state], np.diff(graph.arc_begin)[every.state])
    arc, row = arc[graph.label[arc] != INPUT_EPSILON], row[graph.label[arc] != INPUT_EPSILON]
    src_state = graph.src_state()
    kept = np.flatnonzero((src_state != 0) | (graph.label != INPUT_EPSILON))
    taken_over = every.words.take(row).joined_with(graph.words.take(arc))
    return GraphArrays.from_arcs(
        np.concatenate([src_state[kept], np.zeros(len(arc), dtype=np.int32)]),
        np.concatenate([graph.dst_state[kept], graph.dst_state[arc]]),
        np.concatenate([graph.label[kept], graph.label[arc]]),
        np.concatenate([graph.score[kept], every.score[row] + graph.score[arc]]),
        Words.concatenate([graph.words.take(kept), taken_over]),
        final_score,
    )


def _refuse_cycle(num_steps: int, graph: GraphArrays) -> None:
    if num_steps > graph.num_states:
        raise AsrError("the decoding graph has a cycle of input epsilons; remove it first.")


def _best(src_state: npt.NDArray[np.int32], label: npt.NDArray[np.int32], paths: _Paths) -> npt.NDArray[np.int64]:
    """Indices of the best path for each (source, label, end, words), in order."""
    ends = src_state.astype(np.int64) << 32 | paths.state
    # Few pairs of states have several arcs. Sorting finds these pairs, and only their labels and words are compared.
    by_ends = np.argsort(ends, kind="stable")
    is_repeat = np.zeros(len(ends) + 1, dtype=bool)
    is_repeat[1:-1] = ends[by_ends[1:]] == ends[by_ends[:-1]]
    several = by_ends[is_repeat[:-1] | is_repeat[1:]]
    keys = (paths.words.take(several).identities(), label[several], ends[several])
    order = np.lexsort((-paths.score[several], *keys))
    is_worse = np.zeros(len(order), dtype=bool)
    is_worse[1:] = np.all([key[order[1:]] == key[order[:-1]] for key in keys], axis=0)
    kept = np.ones(len(ends), dtype=bool)
    kept[several[order[is_worse]]] = False
    return np.flatnonzero(kept)


def _reached(
    seeds: npt.NDArray[np.int64], src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32], num_states: int
) -> npt.NDArray[np.bool_]:
    """Which states can be reached from the seeds over arcs src -> dst, (S,); breadth-first search."""
    by_src = np.argsort(src, kind="stable")
    dst = dst[by_src]
    begin = offsets(np.bincount(src, minlength=num_states))
    counts = np.diff(begin)
    reached = np.zeros(num_states, dtype=bool)
    reached[seeds] = True
    last = np.zeros(num_states, dtype=np.int64)
    while len(seeds):
        position, _ = expand(begin[seeds], counts[seeds])
        found = dst[position]
        found = found[~reached[found]]
        reached[found] = True
        last[found] = np.arange(len(found))
        seeds = found[last[found] == np.arange(len(found))]  # each state once
    return reached
