"""C and H for left biphones: the columns of each phone after each other phone, composed with a graph of phones.

A phone reads one column in its first frame and another in any further frames (the topology of lattice-free MMI, Povey
et al. 2016). Different contexts may share columns (`TiedStates`). In silence, one of these columns, a sentence may end
and another begin (`with_sentence_ends`).

Shapes: P phones, silence first; C columns of the acoustic model; S states and A arcs of a graph, E states where a
sentence may end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.graph.fst import Arcs, GraphArrays, IntArray, Words, distinct, expand, offsets
from asr.kernels.jit import jit
from asr.text.documents import parse_json, read_text
from asr.text.symbols import BLANK, EOS_ID, TokenTable

BIPHONE_TOPOLOGY = "chain-biphone"
TIED_STATES = "tied_states"  # the field's name in the metadata of graphs and checkpoints
ENTRY, LOOP = 0, 1


@dataclass(frozen=True)
class TiedStates:
    """The columns that each phone reads after each other phone.

    Each column belongs to one phone. Column 0, the blank of other models, belongs to silence.

    Attributes:
        phones: silence first.
        entry: (P, P) int64, [previous phone, phone] -> column of the phone's first frame.
        loop: (P, P) int64, [previous phone, phone] -> column of its further frames.
    """

    phones: tuple[str, ...]
    entry: npt.NDArray[np.int64]
    loop: npt.NDArray[np.int64]

    @property
    def num_columns(self) -> int:
        """C."""
        return int(max(self.entry.max(), self.loop.max())) + 1

    def column_names(self) -> list[str]:
        """The name of each column, such as `AA_1_3` for the fourth of the columns for the first frame of AA."""
        names = [BLANK] * self.num_columns
        for phone_idx, phone in enumerate(self.phones):
            for state, table in ((ENTRY, self.entry), (LOOP, self.loop)):
                for leaf, column in enumerate(np.unique(table[:, phone_idx]).tolist()):
                    if column:
                        names[column] = f"{phone}_{state + 1}_{leaf}"
        return names

    def columns_of(self, phones: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The entry and the loop columns of an utterance's phones, of the same shape, (U,); silence precedes them."""
        before = np.concatenate(([0], phones[:-1]))
        return self.entry[before, phones], self.loop[before, phones]

    @functools.cached_property
    def phone_of_column(self) -> npt.NDArray[np.int64]:
        """The phone that each column belongs to, (C,)."""
        phone = np.zeros(self.num_columns, dtype=np.int64)
        everyone = np.broadcast_to(np.arange(len(self.phones)), self.entry.shape)
        phone[self.entry] = everyone
        phone[self.loop] = everyone
        return phone

    @functools.cached_property
    def _entries(self) -> frozenset[int]:
        """The columns of first frames."""
        return frozenset(self.entry.flatten().tolist())

    @classmethod
    def from_file(cls, path: Path) -> TiedStates:
        """Reads the JSON that training wrote.

        Raises:
            AsrError: the file cannot be read or does not contain tied states.
        """
        try:
            return cls.from_json(parse_json(read_text(path, "tied states")))
        except ValueError as error:
            raise AsrError(f"{path}: the file does not contain tied states ({error}).") from error

    def phones_of_runs(self, runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Converts the columns of a path to phones: (phone, first frame, frame after the last) for each.

        Args:
            runs: (column, first frame, frame after the last) of each run of equal columns other than 0. An entry column
                in two consecutive frames means that a phone of one frame occurs twice.
        """
        phones: list[tuple[int, int, int]] = []
        for column, first, after in runs:
            phone = int(self.phone_of_column[column])
            if column in self._entries:
                phones += [(phone, frame, frame + 1) for frame in range(first, after)]
            elif phones and phones[-1][0] == phone and phones[-1][2] == first:
                phones[-1] = (phone, phones[-1][1], after)
            else:
                phones.append((phone, first, after))
        return phones

    def tied_from(self, other: TiedStates, count: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Expresses each column as a mixture of the columns of other tied states with the same phones.

        Args:
            other: tied states with C' columns.
            count: (P, P), how often each [previous phone, phone] occurred.

        Returns:
            (C, C'), rows sum to 1: the share of the column's occurrences that belongs to each column of `other`.
        """
        share = np.zeros((self.num_columns, other.num_columns))
        for own_table, other_table in ((self.entry, other.entry), (self.loop, other.loop)):
            # Contexts that never occurred count a little, so that no row sums to 0.
            np.add.at(share, (own_table, other_table), count + 1e-3)
        normalized: npt.NDArray[np.float64] = share / share.sum(1, keepdims=True)
        return normalized

    def require_tokens(self, tokens: TokenTable) -> None:
        """Checks that an acoustic model has these columns.

        Raises:
            AsrError: its tokens are not the names of these columns.
        """
        if tuple(self.column_names()) != tokens.tokens:
            raise AsrError(
                f"{tokens.name}: the tokens are not those of the tied states; use both from the same training."
            )

    def to_json(self) -> dict[str, Any]:
        """Converts to JSON values, for `from_json`."""
        return {"phones": list(self.phones), "entry": self.entry.tolist(), "loop": self.loop.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TiedStates:
        """The inverse of `to_json`.

        Raises:
            AsrError: a table is missing or does not fit the phones, or phones share a column.
        """
        try:
            tied = cls(
                tuple(values["phones"]),
                np.array(values["entry"], dtype=np.int64),
                np.array(values["loop"], dtype=np.int64),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise AsrError(f"tied states: they cannot be read ({error}); build the graph again.") from error
        shape = (len(tied.phones), len(tied.phones))
        if tied.entry.shape != shape or tied.loop.shape != shape or min(tied.entry.min(), tied.loop.min()) < 0:
            raise AsrError(f"tied states: the tables must be {shape[0]} by {shape[1]} columns of the network.")
        owner = tied.phone_of_column
        everyone = np.arange(len(tied.phones))
        if (owner[tied.entry] != everyone).any() or (owner[tied.loop] != everyone).any():
            raise AsrError("tied states: two phones share a column; a column must belong to one phone.")
        return tied


def compose_biphones(
    states: TiedStates,
    phones: Sequence[str],
    graph: GraphArrays,
    compiled: bool = True,
    *,
    states_at_a_time: int = 1 << 17,
) -> GraphArrays:
    """Composes H and C with a graph of phones; the result reads one column per frame.

    A state of the result is a state of the graph together with the loop column of the phone that led there. The column
    determines the phone, and contexts with the same column share states. The first phone has silence as its context.

    Args:
        states: the columns.
        phones: the phones of the graph's labels 0, 1, ...
        graph: labels are phones; no input epsilons.
        compiled: whether a compiled loop fills the arcs, if numba is installed; the result is the same.
        states_at_a_time: number of states whose arcs are looked at together.

    Raises:
        AsrError: the tied states lack a phone.
    """
    missing = [phone for phone in phones if phone not in states.phones]
    if missing:
        raise AsrError(
            f"the acoustic model's tied states lack the phone {missing[0]!r}; use the lexicon of its training."
        )
    graph = graph.best_first().breadth_first()  # the result keeps this order, for the search
    phone_of_label = np.array([states.phones.index(phone) for phone in phones], dtype=np.int32)
    graph = replace(graph, label=phone_of_label[graph.label])
    entered = _entered(states, graph, states_at_a_time)
    # Node 0 is the start, with silence as its context (column 0); the others follow. Each of these has a loop, which
    # comes first as it has the score 0, the best one.
    state, column = (
        np.append(first, rest) for first, rest in zip((0, 0), np.divmod(entered, states.num_columns), strict=True)
    )
    begin = offsets(np.diff(graph.arc_begin)[state] + (np.arange(len(state)) > 0))
    num_words = np.diff(graph.word_begin[graph.arc_begin])[state].sum()
    composed = GraphArrays(
        arc_begin=begin,
        dst_state=np.empty(begin[-1], dtype=np.int32),
        label=np.empty(begin[-1], dtype=np.int32),
        score=np.empty(begin[-1], dtype=np.float32),
        word_begin=np.empty(begin[-1] + 1, dtype=np.int64),
        word_id=np.empty(num_words, dtype=np.int32),
        final_score=graph.final_score[state],
    )
    nodes = _Nodes(state, column, offsets(np.bincount(state[1:], minlength=graph.num_states)) + 1)
    fill = (jit(fill_arcs) if compiled else None) or _fill_arrays
    fill(Arcs.of(graph), nodes, _Columns(states.entry, states.loop, states.phone_of_column), Arcs.of(composed))
    return composed


class _Nodes(NamedTuple):
    """The states of the result; the start, and then pairs of state and column, sorted.

    Attributes:
        state: (K,) int64, the state of the graph.
        column: (K,) int64, the loop column.
        begin: (S + 1,) int64, the first node of each state after the start.
    """

    state: IntArray
    column: IntArray
    begin: IntArray


class _Columns(NamedTuple):
    """The tables of `TiedStates`, and the phone of each column."""

    entry: IntArray
    loop: IntArray
    phone: IntArray


def fill_arcs(graph: Arcs, nodes: _Nodes, columns: _Columns, composed: Arcs) -> None:
    """Fills the arcs of all nodes, in a compiled loop."""
    place = word = 0
    for node in range(len(nodes.state)):
        if node > 0:
            composed.dst_state[place], composed.label[place] = node, nodes.column[node]
            composed.score[place], composed.word_begin[place] = 0.0, word
            place += 1
        state, before = nodes.state[node], columns.phone[nodes.column[node]]
        for arc in range(graph.arc_begin[state], graph.arc_begin[state + 1]):
            target, after = graph.dst_state[arc], graph.label[arc]
            wanted = columns.loop[before, after]
            low, high = nodes.begin[target], nodes.begin[target + 1]
            while high - low > 1:  # the node with this column, by binary search; most states have one node
                middle = (low + high) // 2
                if nodes.column[middle] <= wanted:
                    low = middle
                else:
                    high = middle
            composed.dst_state[place], composed.label[place] = low, columns.entry[before, after]
            composed.score[place], composed.word_begin[place] = graph.score[arc], word
            place += 1
            for position in range(graph.word_begin[arc], graph.word_begin[arc + 1]):
                composed.word_id[word] = graph.word_id[position]
                word += 1
    composed.word_begin[place] = word


def _fill_arrays(graph: Arcs, nodes: _Nodes, columns: _Columns, composed: Arcs) -> None:
    """The same in operations on whole arrays."""
    counts = np.diff(composed.arc_begin)
    node = np.repeat(np.arange(len(nodes.state)), counts)
    has_loop = np.arange(len(counts)) > 0
    arc = np.arange(len(node)) + (graph.arc_begin[nodes.state] - composed.arc_begin[:-1] - has_loop)[node]
    loops = composed.arc_begin[:-1][has_loop]
    is_loop = np.zeros(len(node), dtype=bool)
    is_loop[loops] = True
    composed.dst_state[loops], composed.label[loops] = np.flatnonzero(has_loop), nodes.column[has_loop]
    composed.score[loops] = 0.0
    arc = arc[~is_loop]
    before, after = columns.phone[nodes.column[node[~is_loop]]], graph.label[arc]
    num_columns = len(columns.phone)
    wanted = graph.dst_state[arc].astype(np.int64) * num_columns + columns.loop[before, after]
    entered = nodes.state[1:] * num_columns + nodes.column[1:]
    composed.dst_state[~is_loop] = np.searchsorted(entered, wanted) + 1
    composed.label[~is_loop], composed.score[~is_loop] = columns.entry[before, after], graph.score[arc]
    words = Words(graph.word_begin, graph.word_id).take(arc)
    num_words = np.zeros(len(node), dtype=np.int64)
    num_words[~is_loop] = words.counts
    composed.word_begin[:], composed.word_id[:] = offsets(num_words), words.word_id


def _entered(states: TiedStates, graph: GraphArrays, states_at_a_time: int) -> IntArray:
    """The pairs of state and loop column in which arcs end, as `state * num_columns + column`, distinct and sorted."""
    num_phones = len(states.phones)
    # The phones that lead to each state; for the start, silence.
    arrival = np.zeros(graph.num_arcs + 1, dtype=np.int64)
    np.multiply(graph.dst_state, num_phones, out=arrival[:-1], dtype=np.int64)
    arrival[:-1] += graph.label
    arrival_state, arrival_phone = np.divmod(distinct(arrival), num_phones)
    begin = offsets(np.bincount(arrival_state, minlength=graph.num_states))
    found = []
    # In blocks, because the system takes longer to provide the memory for large arrays than it takes to fill them.
    for first in range(0, graph.num_states, states_at_a_time):
        block = slice(first, first + states_at_a_time)
        num_arcs = np.diff(graph.arc_begin[block.start : block.stop + 1])
        src_state = np.repeat(np.arange(len(num_arcs)), num_arcs)
        # Each arc after each phone that may precede it.
        position, arc = expand(begin[block][src_state], np.diff(begin[block.start : block.stop + 1])[src_state])
        arc += graph.arc_begin[first]
        column = states.loop[arrival_phone[position], graph.label[arc]]
        found.append(distinct(graph.dst_state[arc].astype(np.int64) * states.num_columns + column))
    return distinct(np.concatenate(found))


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
