"""The best distinct sentences of a lattice, in order, as a loop for `jit`. Uncompiled, it is a slow oracle.

This is the n-best-strings search of Mohri and Riley (2002): a best-first search determinizes the lattice over its words
on demand. A node is a word prefix with all states that it can lead to. The score of the best path from each state to an
end is known beforehand, so that each complete sentence taken from the heap is the next best one.

Shapes: S states, A arcs, E pool entries, K sentences.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from asr.decoding.cpu.arrays import ensure_capacity
from asr.kernels.jit import kernel


class SentenceLattice(NamedTuple):
    """A lattice of one utterance whose arcs have at most one word; states come before those that they lead to.

    Exceptions are the states inside an arc that had several words: they have one arc each, and may be anywhere.

    Attributes:
        arc_begin: (S + 1,) int64.
        dst_state: (A,) int64.
        word: (A,) int64, -1 for none.
        arc_total: (A,) float64, scaled scores.
        final_total: (S,) float64, -inf for states that are not final.
        ahead: (S,) float64, the best score from the state to an end, -inf if it leads to none.
    """

    arc_begin: Any
    dst_state: Any
    word: Any
    arc_total: Any
    final_total: Any
    ahead: Any


class Entries(NamedTuple):
    """Paths to states (E,), with room for more: the state, the previous entry, the last arc and the score so far."""

    state: Any
    before: Any
    arc_in: Any
    score: Any


@kernel(fastmath=False)
def best_sentences(lattice: SentenceLattice, start_state: int, num_sentences: int) -> Any:
    """The best sentences, best first.

    Returns:
        total (K,) float64, and the arcs of the best path of each: path_begin (K + 1,), arc (path_begin[K],), int64.
    """
    arc_begin, dst_state, arc_word, arc_total, final_total, ahead = lattice
    entries = Entries(np.empty(64, np.int64), np.empty(64, np.int64), np.empty(64, np.int64), np.empty(64))
    state, before, arc_in, score = entries
    state[0], before[0], arc_in[0], score[0], num_entries = start_state, -1, -1, 0.0, 1
    # A node is a range of entries with different states; an end of -1 marks a sentence that ends at the first entry.
    node_begin, node_end = [0], [1]
    heap = [(-ahead[start_state], 0)]
    # Each open node leads to another sentence with its score, so the best scores bound that of the n-th sentence.
    bounds = [ahead[start_state]]
    entry_of = np.full(len(arc_begin) - 1, -1, np.int64)
    found, found_total = [0 for _ in range(0)], [0.0 for _ in range(0)]
    while len(heap) and len(found) < num_sentences and ahead[start_state] > -np.inf:
        negative, node = heapq.heappop(heap)
        if node_end[node] < 0:
            found.append(node_begin[node])
            found_total.append(-negative)
            continue
        # Slack, so that rounding does not drop a sentence that is as good as the bound.
        floor = bounds[0] - 1e-9 * (1.0 + abs(bounds[0])) if len(bounds) == num_sentences else -np.inf
        best_end, end_entry = -np.inf, -1
        steps = [(0, 0, 0, 0) for _ in range(0)]  # word, state after it, entry before it, arc
        waiting = [0 for _ in range(0)]
        for entry in range(node_begin[node], node_end[node]):
            entry_of[state[entry]] = entry
            heapq.heappush(waiting, state[entry])
        while len(waiting):
            own_state = heapq.heappop(waiting)
            entry = entry_of[own_state]
            entry_of[own_state] = -1
            ending = score[entry] + final_total[own_state]
            if ending > best_end and ending >= floor:
                best_end, end_entry = ending, entry
            for arc in range(arc_begin[own_state], arc_begin[own_state + 1]):
                dst, reached = dst_state[arc], score[entry] + arc_total[arc]
                if reached + ahead[dst] < floor or ahead[dst] == -np.inf:
                    continue
                if arc_word[arc] >= 0:
                    steps.append((arc_word[arc], dst, entry, arc))
                    continue
                other = entry_of[dst]
                if other < 0:
                    other, num_entries = num_entries, num_entries + 1
                    entries = with_room(entries, num_entries)
                    state, before, arc_in, score = entries
                    state[other], entry_of[dst] = dst, other
                    heapq.heappush(waiting, dst)
                elif reached <= score[other]:
                    continue
                score[other], before[other], arc_in[other] = reached, entry, arc
        children = [(0.0, 0, 0) for _ in range(0)]
        if end_entry >= 0:
            children.append((best_end, end_entry, -1))
        steps.sort()
        i = 0
        while i < len(steps):
            first, word, best = num_entries, steps[i][0], -np.inf
            while i < len(steps) and steps[i][0] == word:
                _, dst, entry, arc = steps[i]
                i += 1
                reached = score[entry] + arc_total[arc]
                if num_entries > first and state[num_entries - 1] == dst:
                    # The steps of a word are sorted by state, so equal states are adjacent.
                    if reached > score[num_entries - 1]:
                        other = num_entries - 1
                        score[other], before[other], arc_in[other] = reached, entry, arc
                else:
                    other, num_entries = num_entries, num_entries + 1
                    entries = with_room(entries, num_entries)
                    state, before, arc_in, score = entries
                    state[other], score[other], before[other], arc_in[other] = dst, reached, entry, arc
                best = max(best, reached + ahead[dst])
            children.append((best, first, num_entries))
        # The best child continues the sentence that its parent counted as; each other child adds a sentence.
        best_child = 0
        for i in range(len(children)):
            if children[i][0] > children[best_child][0]:
                best_child = i
        for i in range(len(children)):
            total, begin, end = children[i]
            heapq.heappush(heap, (-total, len(node_begin)))
            node_begin.append(begin)
            node_end.append(end)
            if i != best_child and len(bounds) < num_sentences:
                heapq.heappush(bounds, total)
            elif i != best_child and total > bounds[0]:
                heapq.heapreplace(bounds, total)
    length, path_begin = 0, np.zeros(len(found) + 1, np.int64)
    for i in range(len(found)):
        entry = found[i]
        while before[entry] >= 0:
            entry, length = before[entry], length + 1
        path_begin[i + 1] = length
    path = np.empty(length, np.int64)
    for i in range(len(found)):
        entry, place = found[i], path_begin[i + 1]
        while before[entry] >= 0:
            place -= 1
            path[place] = arc_in[entry]
            entry = before[entry]
    return np.array(found_total), path_begin, path


@kernel(fastmath=False)
def with_room(entries: Any, size: int) -> Any:
    """The entries, in larger arrays if they have room for fewer than `size`."""
    if size <= len(entries.state):
        return entries
    return Entries(
        ensure_capacity(entries.state, size),
        ensure_capacity(entries.before, size),
        ensure_capacity(entries.arc_in, size),
        ensure_capacity(entries.score, size),
    )
