"""The best distinct sentences of a lattice, in order, as loops for `jit`. Uncompiled, they are a slow oracle.

This is the n-best-strings search of Mohri and Riley (2002): a best-first search determinizes the lattice over its words
on demand. The loss of a path is by how much its best continuation to an end is below the best path of the lattice. The
score of the best path from each state to an end is known beforehand, so losses are exact, and each complete sentence
taken from the heap is the next best one.

A word prefix can lead to several states, with a loss at each. How it goes on depends only on these states and on the
differences of their losses, which many prefixes share. Such a set of states is expanded once, for the first of its
prefixes that is taken from the heap. That suffices for later ones, whose loss is larger and whose limit is lower.

Shapes: S states, A arcs, K sentences.
"""

from __future__ import annotations

import heapq
import sys
from typing import Any, NamedTuple

import numpy as np

from asr.decoding.cpu.arrays import ensure_capacity
from asr.kernels.jit import kernel

_FARTHEST = sys.float_info.max
_SAME_LOSS = 1e-9  # sums of the same losses in another order may differ by rounding


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
        arc_of: (A,) int64, the arc of the lattice that this was made of; -1 for all but the first of several words.
    """

    arc_begin: Any
    dst_state: Any
    word: Any
    arc_total: Any
    final_total: Any
    ahead: Any
    arc_of: Any


@kernel(fastmath=False)
def best_sentences(lattice: SentenceLattice, start_state: int, num_sentences: int) -> Any:
    """The best sentences, best first.

    Returns:
        total (K,) float64, and the arcs of the best path of each by `arc_of`: path_begin (K + 1,), arc
        (path_begin[K],), int64.
    """
    # A path to a state: the state, the entry before it, the arc between them, the loss.
    entries = [(start_state, -1, -1, 0.0)]
    # A set of states: its range of entries, its range of steps once it is expanded, an older set with the same first
    # state. The losses of its entries are those beyond the smallest.
    sets = [(0, 1, -1, -1, -1)]
    # A step from a set over a word: the loss that it adds, the set it leads to and its first entry; the set -1 ends.
    steps = [(0.0, 0, 0)]
    # A node is a word prefix or a sentence: its last step, and the node before it.
    nodes = [(0, -1)]
    heap = [(0.0, 0)]
    # Each node leads to another sentence with its loss. The smallest losses, negated, bound that of the n-th sentence.
    bounds = [0.0]
    entry_of, newest = np.full(len(lattice.ahead), -1, np.int64), np.full(len(lattice.ahead), -1, np.int64)
    found, found_loss = [0 for _ in range(0)], [0.0 for _ in range(0)]
    while len(heap) and len(found) < num_sentences and lattice.ahead[start_state] > -np.inf:
        loss, node = heapq.heappop(heap)
        _, own_set, _ = steps[nodes[node][0]]
        if own_set < 0:
            found.append(node)
            found_loss.append(loss)
            continue
        limit = -bounds[0] if len(bounds) == num_sentences else _FARTHEST
        begin, end, first_step, end_step, older = sets[own_set]
        if first_step < 0:
            moves = moves_from(begin, end, entries, lattice, limit - loss, entry_of)
            first_step = len(steps)
            add_steps(moves, entries, sets, steps, newest)
            end_step = len(steps)
            sets[own_set] = (begin, end, first_step, end_step, older)
        for step in range(first_step, end_step):
            longer = loss + steps[step][0]
            if longer > limit:
                break
            heapq.heappush(heap, (longer, len(nodes)))
            nodes.append((step, node))
            # The best step continues the sentence that the node counted as; each other step adds a sentence.
            if step > first_step and len(bounds) < num_sentences:
                heapq.heappush(bounds, -longer)
            elif step > first_step and -longer > bounds[0]:
                heapq.heapreplace(bounds, -longer)
    path_begin, arc = paths_to(found, nodes, steps, sets, entries, lattice.arc_of)
    return lattice.ahead[start_state] - np.array(found_loss), path_begin, arc


@kernel(fastmath=False)
def moves_from(begin: int, end: int, entries: Any, lattice: SentenceLattice, limit: float, entry_of: Any) -> Any:
    """Continues paths over any arcs without words, then over one word or to the end.

    Args:
        begin, end: range of entries, of different states.
        entries: appended to.
        lattice: the lattice.
        limit: the largest loss of a path.
        entry_of: (S,) scratch, -1.

    Returns:
        A sorted list of (word, state, loss, entry before it, arc); to the end, word, state and arc are -1.
    """
    arc_begin, dst_state, arc_word, arc_total, final_total, ahead, _ = lattice
    moves = [(0, 0, 0.0, 0, 0) for _ in range(0)]
    waiting = [0 for _ in range(0)]
    for entry in range(begin, end):
        state, _, _, loss = entries[entry]
        # A copy, as there may be a better path from another state of the set.
        entry_of[state] = len(entries)
        entries.append((state, entry, -1, loss))
        heapq.heappush(waiting, state)
    while len(waiting):
        own_state = heapq.heappop(waiting)
        entry = entry_of[own_state]
        entry_of[own_state] = -1
        loss = entries[entry][3]
        ending = loss + (ahead[own_state] - final_total[own_state])
        if ending <= limit:
            moves.append((-1, -1, ending, entry, -1))
        for arc in range(arc_begin[own_state], arc_begin[own_state + 1]):
            dst = dst_state[arc]
            reached = loss + (ahead[own_state] - (arc_total[arc] + ahead[dst]))
            if reached > limit:
                continue
            other = entry_of[dst]
            if arc_word[arc] >= 0:
                moves.append((arc_word[arc], dst, reached, entry, arc))
            elif other < 0:
                entry_of[dst] = len(entries)
                entries.append((dst, entry, arc, reached))
                heapq.heappush(waiting, dst)
            elif reached < entries[other][3]:
                entries[other] = (dst, entry, arc, reached)
    moves.sort()
    return moves


@kernel(fastmath=False)
def add_steps(moves: Any, entries: Any, sets: Any, steps: Any, newest: Any) -> None:
    """Joins moves over the same word to steps, and adds these, the best first.

    Args:
        moves: as from `moves_from`.
        entries, sets, steps: appended to.
        newest: (S,) the newest set whose first state is each state, or -1.
    """
    own = [(0.0, 0, 0) for _ in range(0)]
    i = 0
    while i < len(moves):
        word, _, best, _, _ = moves[i]
        begin = i
        while i < len(moves) and moves[i][0] == word:
            best = min(best, moves[i][2])
            i += 1
        first = len(entries)
        for _, state, loss, entry, arc in moves[begin:i]:
            # The best path to each state comes first.
            if len(entries) == first or entries[-1][0] != state:
                entries.append((state, entry, arc, loss - best))
        own.append((best, set_from(first, entries, sets, newest) if word >= 0 else -1, first))
    own.sort()
    for step in own:
        steps.append(step)


@kernel(fastmath=False)
def set_from(first: int, entries: Any, sets: Any, newest: Any) -> Any:
    """The set of the entries from `first` on: an older one with the same states and losses, or else a new one."""
    state, end = entries[first][0], len(entries)
    found = newest[state]
    while found >= 0:
        own_first, own_end, _, _, older = sets[found]
        is_same = own_end - own_first == end - first
        for i in range(first, end):
            if is_same:
                own_state, _, _, own_loss = entries[own_first + i - first]
                is_same = own_state == entries[i][0] and abs(own_loss - entries[i][3]) <= _SAME_LOSS
        if is_same:
            return found
        found = older
    sets.append((first, end, -1, -1, newest[state]))
    newest[state] = len(sets) - 1
    return newest[state]


@kernel(fastmath=False)
def paths_to(found: Any, nodes: Any, steps: Any, sets: Any, entries: Any, arc_of: Any) -> Any:
    """The arcs of the best paths to K nodes: path_begin (K + 1,), arc (path_begin[K],), int64."""
    path_begin, arcs = np.zeros(len(found) + 1, np.int64), np.empty(0, np.int64)
    backward = np.empty(len(arc_of), np.int64)
    for i in range(len(found)):
        node, length, offset = found[i], 0, 0
        while node > 0:
            step, node = nodes[node]
            begin, end, _, _, _ = sets[steps[nodes[node][0]][1]]
            # The entries of the set are those of the first step that led to it; other steps have others.
            entry = steps[step][2] + offset
            while not begin <= entry < end:
                _, before, arc, _ = entries[entry]
                if arc >= 0 and arc_of[arc] >= 0:
                    backward[length] = arc_of[arc]
                    length += 1
                entry = before
            offset = entry - begin
        path_begin[i + 1] = path_begin[i] + length
        arcs = ensure_capacity(arcs, path_begin[i + 1])
        arcs[path_begin[i] : path_begin[i + 1]] = backward[:length][::-1]
    return path_begin, arcs[: path_begin[-1]]
