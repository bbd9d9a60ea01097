"""C and H for left biphones: the columns of each phone after each other phone, composed with a graph of phones.

A phone reads one column in its first frame and another in any further frames (the topology of lattice-free MMI, Povey
et al. 2016). Different contexts may share columns (`TiedStates`).

Shapes: P phones, silence first; C columns of the acoustic model; S states and A arcs of the graph of phones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.graph.fst import GraphArrays, Words, distinct, expand, offsets
from asr.text.documents import parse_json
from asr.text.normalize import read_text
from asr.text.symbols import BLANK, TokenTable

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

    def phone_of_column(self) -> npt.NDArray[np.int64]:
        """The phone that each column belongs to, (C,)."""
        phone = np.zeros(self.num_columns, dtype=np.int64)
        everyone = np.broadcast_to(np.arange(len(self.phones)), self.entry.shape)
        phone[self.entry] = everyone
        phone[self.loop] = everyone
        return phone

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
        owner = self.phone_of_column()
        entries = set(self.entry.flatten().tolist())
        phones: list[tuple[int, int, int]] = []
        for column, first, after in runs:
            phone = int(owner[column])
            if column in entries:
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
        owner = tied.phone_of_column()
        everyone = np.arange(len(tied.phones))
        if (owner[tied.entry] != everyone).any() or (owner[tied.loop] != everyone).any():
            raise AsrError("tied states: two phones share a column; a column must belong to one phone.")
        return tied


def compose_biphones(states: TiedStates, phones: Sequence[str], graph: GraphArrays) -> GraphArrays:
    """Composes H and C with a graph of phones; the result reads one column per frame.

    A state of the result is a state of the graph together with the loop column of the phone that led there. The column
    determines the phone, and contexts with the same column share states. The first phone has silence as its context.

    Args:
        states: the columns.
        phones: the phones of the graph's labels 0, 1, ...
        graph: labels are phones; no input epsilons.

    Raises:
        AsrError: the tied states lack a phone.
    """
    missing = [phone for phone in phones if phone not in states.phones]
    if missing:
        raise AsrError(
            f"the acoustic model's tied states lack the phone {missing[0]!r}; use the lexicon of its training."
        )
    graph = graph.best_first()  # the result keeps this order, for the search
    label = np.array([states.phones.index(phone) for phone in phones], dtype=np.int64)[graph.label]
    num_phones, num_columns, num_states = len(states.phones), states.num_columns, graph.num_states
    src_state = graph.src_state()
    # The phones that lead to each state; for the start, silence.
    arrival = distinct(np.append(graph.dst_state.astype(np.int64) * num_phones + label, 0))
    arrival_state, arrival_phone = np.divmod(arrival, num_phones)
    num_arrivals = np.bincount(arrival_state, minlength=num_states)
    # Each arc after each phone that may precede it.
    position, arc = expand(offsets(num_arrivals)[src_state], num_arrivals[src_state])
    loop_column = states.loop[arrival_phone[position], label[arc]]
    entered = distinct(graph.dst_state[arc].astype(np.int64) * num_columns + loop_column)
    # Node 0 is the start, with silence as its context (column 0); the others follow. Each of these has a loop, which
    # comes first as it has the score 0, the best one.
    state, column = (
        np.append(first, rest) for first, rest in zip((0, 0), np.divmod(entered, num_columns), strict=True)
    )
    phone = states.phone_of_column()[column]
    has_loop = np.arange(len(state)) > 0
    begin = offsets(np.diff(graph.arc_begin)[state] + has_loop)
    node = np.repeat(np.arange(len(state)), np.diff(begin))
    arc = np.arange(len(node)) + (graph.arc_begin[state] - begin[:-1] - has_loop)[node]
    loops = begin[:-1][has_loop]
    arc[loops] = graph.num_arcs  # the arc without score and words that is appended here
    label, score = np.append(label, 0), np.append(graph.score, np.float32(0.0))
    words = Words(np.append(graph.word_begin, graph.word_begin[-1]), graph.word_id).take(arc)
    before, after = phone[node], label[arc]
    target = np.append(graph.dst_state, 0)[arc].astype(np.int64) * num_columns + states.loop[before, after]
    dst_state, read = np.searchsorted(entered, target) + 1, states.entry[before, after]
    dst_state[loops], read[loops] = np.flatnonzero(has_loop), column[has_loop]
    return GraphArrays(
        begin,
        dst_state.astype(np.int32),
        read.astype(np.int32),
        score[arc],
        words.begin,
        words.word_id,
        graph.final_score[state],
    )
