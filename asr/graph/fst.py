"""Graphs as plain arrays: transducers for composition, and graphs during building.

Shapes: S states, A arcs, W words on all arcs together, Q requested arcs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asr.kernels.jit import jit

EPSILON = 0


@dataclass(frozen=True)
class Transducer:
    """A weighted transducer with one input and one output label on each arc; arcs are sorted by source state.

    Attributes:
        start: the start state.
        arc_begin: (S + 1,) int64, first arc of each state.
        input_label: (A,) int32, 0 for epsilon.
        output_label: (A,) int32, 0 for epsilon.
        score: (A,) float32, natural log, higher is better.
        dst_state: (A,) int32.
        final_score: (S,) float32, -inf for states that are not final.
    """

    start: int
    arc_begin: npt.NDArray[np.int64]
    input_label: npt.NDArray[np.int32]
    output_label: npt.NDArray[np.int32]
    score: npt.NDArray[np.float32]
    dst_state: npt.NDArray[np.int32]
    final_score: npt.NDArray[np.float32]

    @classmethod
    def from_arcs(
        cls,
        start: int,
        src_state: npt.NDArray[Any],
        input_label: npt.NDArray[Any],
        output_label: npt.NDArray[Any],
        score: npt.NDArray[Any],
        dst_state: npt.NDArray[Any],
        final_score: npt.NDArray[Any],
        sort_by: str,
    ) -> Transducer:
        """Sorts arcs by source state and then by the label `sort_by` (`input` or `output`), as composition requires."""
        order = np.lexsort((input_label if sort_by == "input" else output_label, src_state))
        return cls(
            start,
            offsets(np.bincount(src_state, minlength=len(final_score))),
            input_label[order].astype(np.int32),
            output_label[order].astype(np.int32),
            score[order].astype(np.float32),
            dst_state[order].astype(np.int32),
            final_score.astype(np.float32),
        )


def round_scores(score: npt.NDArray[Any], step: float) -> npt.NDArray[np.float32]:
    """Rounds scores to multiples of `step`, a power of two, so that their sums and differences in float32 are exact.

    Determinization moves scores along paths; with exact sums, equal continuations stay equal and can be merged.
    """
    return (np.round(score.astype(np.float64) / step) * step).astype(np.float32)


IntArray = npt.NDArray[np.int64]
INPUT_EPSILON = -1


@dataclass(frozen=True)
class GraphArrays:
    """Arcs sorted by source state; state 0 is the start. The fields are those of `DecodingGraph`.

    The search is fastest if the arcs of each state are sorted by score, the best first, see `best_first`.

    Attributes:
        arc_begin: (S + 1,) int64.
        dst_state: (A,) int32.
        label: (A,) int32, a phone or a token; -1 for epsilon.
        score: (A,) float32.
        word_begin: (A + 1,) int64.
        word_id: (W,) int32.
        final_score: (S,) float32.
    """

    arc_begin: IntArray
    dst_state: npt.NDArray[np.int32]
    label: npt.NDArray[np.int32]
    score: npt.NDArray[np.float32]
    word_begin: IntArray
    word_id: npt.NDArray[np.int32]
    final_score: npt.NDArray[np.float32]

    @classmethod
    def from_arcs(
        cls,
        src_state: npt.NDArray[Any],
        dst_state: npt.NDArray[Any],
        label: npt.NDArray[Any],
        score: npt.NDArray[Any],
        words: Words,
        final_score: npt.NDArray[Any],
    ) -> GraphArrays:
        """Sorts arcs by source state; arcs of the same state keep their order."""
        order = np.argsort(src_state, kind="stable")
        words = words.take(order)
        return cls(
            offsets(np.bincount(src_state, minlength=len(final_score))),
            dst_state[order].astype(np.int32),
            label[order].astype(np.int32),
            score[order].astype(np.float32),
            words.begin,
            words.word_id,
            final_score.astype(np.float32),
        )

    @classmethod
    def from_transducer(cls, fst: Transducer, label: npt.NDArray[np.int32]) -> GraphArrays:
        """The arcs of a transducer with these labels (A,) in place of its input labels; its start becomes state 0."""
        words = Words.single(fst.output_label)
        arcs = (fst.arc_begin, fst.dst_state, label, fst.score, words.begin, words.word_id)
        graph = cls(*arcs, fst.final_score)
        return graph if fst.start == 0 else graph.take_states(np.roll(np.arange(graph.num_states), -fst.start))

    def best_first(self) -> GraphArrays:
        """The same graph with the arcs of each state sorted by score, the best first; equal scores keep their order."""
        src_state = self.src_state()
        is_in_order = (src_state[1:] != src_state[:-1]) | (self.score[1:] <= self.score[:-1])
        if is_in_order.all():
            return self
        order = np.lexsort((-self.score, src_state))
        words = self.words.take(order)
        return replace(
            self,
            dst_state=self.dst_state[order],
            label=self.label[order],
            score=self.score[order],
            word_begin=words.begin,
            word_id=words.word_id,
        )

    @property
    def num_states(self) -> int:
        return len(self.final_score)

    @property
    def num_arcs(self) -> int:
        return len(self.dst_state)

    @property
    def words(self) -> Words:
        """The word lists of all arcs."""
        return Words(self.word_begin, self.word_id)

    @property
    def has_epsilons(self) -> bool:
        """Whether any arc has an input epsilon."""
        return bool((self.label == INPUT_EPSILON).any())

    def src_state(self) -> npt.NDArray[np.int32]:
        """The source state of each arc, (A,)."""
        return np.repeat(np.arange(self.num_states, dtype=np.int32), np.diff(self.arc_begin))

    def take_states(self, states: npt.NDArray[Any]) -> GraphArrays:
        """The subgraph of the given states, renumbered in this order; arcs to other states are dropped."""
        number = np.full(self.num_states, -1, dtype=np.int32)
        number[states] = np.arange(len(states), dtype=np.int32)
        position, owner = expand(self.arc_begin[states], np.diff(self.arc_begin)[states])
        dst_state = number[self.dst_state[position]]
        if len(states) < self.num_states:
            inside = dst_state >= 0
            position, owner, dst_state = position[inside], owner[inside], dst_state[inside]
        words = self.words.take(position)
        return GraphArrays(
            arc_begin=offsets(np.bincount(owner, minlength=len(states))),
            dst_state=dst_state,
            label=self.label[position],
            score=self.score[position],
            word_begin=words.begin,
            word_id=words.word_id,
            final_score=self.final_score[states],
        )

    def breadth_first(self) -> GraphArrays:
        """The same graph with its states in the order in which a breadth-first search from the start finds them.

        Most states that are searched in the same frame are then near each other in memory. States that no path reaches
        come last. With numba, the loop over all arcs is compiled.
        """
        # Each arc ends in a state that was found before, or in the next one.
        found_before = np.maximum.accumulate(np.append(np.int32(0), self.dst_state[:-1]))
        if (self.dst_state <= found_before[: self.num_arcs] + 1).all():
            return self
        state, number = np.empty(self.num_states, dtype=np.int32), np.empty(self.num_states, dtype=np.int32)
        (jit(list_breadth_first) or list_breadth_first)(self.arc_begin, self.dst_state, state, number)
        reorder = jit(reorder_states)
        if reorder is None:
            return self.take_states(state)
        empty: dict[str, Any] = {name: np.empty_like(part) for name, part in Arcs.of(self)._asdict().items()}
        ordered = replace(self, final_score=self.final_score[state], **empty)
        reorder(Arcs.of(self), state, number, Arcs.of(ordered))
        return ordered


class Arcs(NamedTuple):
    """The arrays of `GraphArrays` that describe arcs, in its order, for compiled loops."""

    arc_begin: IntArray
    dst_state: npt.NDArray[np.int32]
    label: npt.NDArray[np.int32]
    score: npt.NDArray[np.float32]
    word_begin: IntArray
    word_id: npt.NDArray[np.int32]

    @classmethod
    def of(cls, graph: GraphArrays) -> Arcs:
        """Those of a graph."""
        return cls(*(getattr(graph, name) for name in cls._fields))


def list_breadth_first(
    arc_begin: IntArray,
    dst_state: npt.NDArray[np.int32],
    state: npt.NDArray[np.int32],
    number: npt.NDArray[np.int32],
) -> None:
    """Fills state (S,) with the states in the order of `GraphArrays.breadth_first`, and number (S,) with their places.

    For a compiled loop.
    """
    number[:] = -1
    num_found = num_read = 0
    for start in range(len(state)):
        if number[start] >= 0:
            continue
        state[num_found], number[start] = start, num_found
        num_found += 1
        while num_read < num_found:
            own = state[num_read]
            num_read += 1
            for arc in range(arc_begin[own], arc_begin[own + 1]):
                if number[dst_state[arc]] < 0:
                    state[num_found], number[dst_state[arc]] = dst_state[arc], num_found
                    num_found += 1


def reorder_states(graph: Arcs, state: npt.NDArray[np.int32], number: npt.NDArray[np.int32], ordered: Arcs) -> None:
    """Fills the arcs of a graph whose states are those of another one in another order, in a compiled loop.

    Args:
        graph: the other one.
        state: (S,), the states in the new order.
        number: (S,), the place of each state there.
        ordered: arrays as large as those of `graph`.
    """
    place = word = 0
    for new in range(len(state)):
        ordered.arc_begin[new] = place
        for arc in range(graph.arc_begin[state[new]], graph.arc_begin[state[new] + 1]):
            ordered.dst_state[place] = number[graph.dst_state[arc]]
            ordered.label[place], ordered.score[place] = graph.label[arc], graph.score[arc]
            ordered.word_begin[place] = word
            place += 1
            for position in range(graph.word_begin[arc], graph.word_begin[arc + 1]):
                ordered.word_id[word] = graph.word_id[position]
                word += 1
    ordered.arc_begin[len(state)], ordered.word_begin[place] = place, word


@dataclass(frozen=True)
class Words:
    """Word lists, one for each arc.

    Attributes:
        begin: (A + 1,) int64; list a is `word_id[begin[a] : begin[a + 1]]`.
        word_id: (W,) int32.
    """

    begin: IntArray
    word_id: npt.NDArray[np.int32]

    @classmethod
    def single(cls, word_id: npt.NDArray[Any]) -> Words:
        """Builds lists of at most one word; 0 means no word."""
        return cls(offsets(word_id != 0), word_id[word_id != 0].astype(np.int32))

    @classmethod
    def empty(cls, num_lists: int) -> Words:
        """Builds empty lists."""
        return cls(np.zeros(num_lists + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.begin) - 1

    @property
    def counts(self) -> IntArray:
        """The length of each list."""
        return np.diff(self.begin)

    def take(self, lists: npt.NDArray[Any]) -> Words:
        """The requested lists, (Q,), in the given order."""
        counts = self.begin[1:][lists] - self.begin[:-1][lists]
        filled = np.flatnonzero(counts)  # most arcs have no word, and the others have one
        position = self.begin[:-1][lists[filled]]
        if counts.max(initial=0) > 1:
            position, _ = expand(position, counts[filled])
        return Words(offsets(counts), self.word_id[position])

    def joined_with(self, other: Words) -> Words:
        """Appends to each list the list of `other` with the same index."""
        counts = np.stack([self.counts, other.counts], axis=1)
        begin = offsets(counts.sum(axis=1))
        word_id = np.empty(int(begin[-1]), dtype=np.int32)
        for part, shift in ((self, 0), (other, counts[:, 0])):
            _, owner = expand(part.begin[:-1], part.counts)
            word_id[begin[:-1][owner] + np.broadcast_to(shift, len(part))[owner] + _ranks(part.counts)] = part.word_id
        return Words(begin, word_id)

    @classmethod
    def concatenate(cls, parts: list[Words]) -> Words:
        """The lists of all parts, one after another."""
        counts = np.concatenate([part.counts for part in parts])
        return cls(offsets(counts), np.concatenate([part.word_id for part in parts]))

    def identities(self) -> IntArray:
        """Numbers that are equal for equal lists, 0 for empty ones, (A,)."""
        identity = np.zeros(len(self), dtype=np.int64)
        for column in range(int(self.counts.max(initial=0))):
            longer = np.flatnonzero(self.counts > column)
            word_id = self.word_id[self.begin[:-1][longer] + column].astype(np.int64)
            _, number = np.unique(identity[longer] << 32 | word_id, return_inverse=True)
            identity[longer] = number + identity.max() + 1
        return identity


def distinct(values: npt.NDArray[np.int64]) -> IntArray:
    """The distinct values, sorted."""
    # np.unique of NumPy 2.3 hashes integers, which takes five times as long for millions of them.
    values = np.sort(values)
    is_first = np.ones(len(values), dtype=bool)
    is_first[1:] = values[1:] != values[:-1]
    return values[is_first]


def offsets(counts: npt.NDArray[Any] | Sequence[int]) -> IntArray:
    """Counts (A,) -> where each run begins, and where the last one ends (A + 1,)."""
    begin = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=begin[1:])
    return begin


def expand(begin: npt.NDArray[Any], counts: npt.NDArray[Any]) -> tuple[IntArray, IntArray]:
    """The positions `begin[q]` to `begin[q] + counts[q] - 1` of all runs q in order, and the run of each position."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return begin[owner] + _ranks(counts), owner


def _ranks(counts: npt.NDArray[Any]) -> IntArray:
    """The indices 0, 1, ... within each run, for all runs in order."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - counts, counts)
