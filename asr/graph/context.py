"""C and H for left biphones: which column a phone reads behind another, composed with a graph of phones.

A phone's first frame reads one column, its further frames, if any, another (the topology of lattice-free MMI, Povey et
al. 2016). The columns of different contexts may be tied (`TiedStates`).

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
from asr.graph.fst import GraphArrays, Words, expand
from asr.text.documents import parse_json
from asr.text.normalize import read_text
from asr.text.symbols import BLANK, TokenTable

BIPHONE_TOPOLOGY = "chain-biphone"
TIED_STATES = "tied_states"  # the field of a graph's or a checkpoint's description
ENTRY, LOOP = 0, 1


@dataclass(frozen=True)
class TiedStates:
    """Which column each phone reads behind each other phone.

    Columns other than 0 belong to one phone each; column 0, the blank of other models, is silence.

    Attributes:
        phones: silence first.
        entry: (P, P) int64, [phone before, phone]: the column of the phone's first frame.
        loop: (P, P) int64, of its further frames.
    """

    phones: tuple[str, ...]
    entry: npt.NDArray[np.int64]
    loop: npt.NDArray[np.int64]

    @property
    def num_columns(self) -> int:
        """C."""
        return int(max(self.entry.max(), self.loop.max())) + 1

    def column_names(self) -> list[str]:
        """A name for each column, such as `AA_1_3` for the fourth column of the first frame of AA; column 0 first."""
        names = [BLANK] * self.num_columns
        for phone_idx, phone in enumerate(self.phones):
            for state, table in ((ENTRY, self.entry), (LOOP, self.loop)):
                for leaf, column in enumerate(np.unique(table[:, phone_idx]).tolist()):
                    if column:
                        names[column] = f"{phone}_{state + 1}_{leaf}"
        return names

    def phone_of_column(self) -> npt.NDArray[np.int64]:
        """The phone that a column belongs to, (C,)."""
        phone = np.zeros(self.num_columns, dtype=np.int64)
        everyone = np.broadcast_to(np.arange(len(self.phones)), self.entry.shape)
        phone[self.entry] = everyone
        phone[self.loop] = everyone
        return phone

    @classmethod
    def from_file(cls, path: Path) -> TiedStates:
        """Reads the JSON that training wrote.

        Raises:
            AsrError: the file cannot be read or does not hold tied states.
        """
        try:
            return cls.from_json(parse_json(read_text(path, "tied states")))
        except ValueError as error:
            raise AsrError(f"{path}: no tied states can be read there ({error}).") from error

    def phones_of_runs(self, runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Phones of a path: (phone, first frame, frame after the last) each.

        Args:
            runs: of equal columns other than 0: (column, first frame, frame after the last) each. An entry column in
                two frames running is a phone of one frame, twice.
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
        """What each column is made of in other tied states of the same phones.

        Args:
            other: with C' columns.
            count: (P, P), how often a phone [phone before, phone] was seen.

        Returns:
            (C, C'), rows that sum to 1: the share of the column's occurrences that the other column covers.
        """
        share = np.zeros((self.num_columns, other.num_columns))
        for own_table, other_table in ((self.entry, other.entry), (self.loop, other.loop)):
            # A context that was never seen counts a little, so that no column is made of nothing.
            np.add.at(share, (own_table, other_table), count + 1e-3)
        normalized: npt.NDArray[np.float64] = share / share.sum(1, keepdims=True)
        return normalized

    def require_tokens(self, tokens: TokenTable) -> None:
        """Refuses an acoustic model with other columns.

        Raises:
            AsrError: the names of the columns are others.
        """
        if tuple(self.column_names()) != tokens.tokens:
            raise AsrError(f"{tokens.name}: the tokens are not those of the tied states; take those of one training.")

    def to_json(self) -> dict[str, Any]:
        """JSON values for `from_json`."""
        return {"phones": list(self.phones), "entry": self.entry.tolist(), "loop": self.loop.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TiedStates:
        """From `to_json`.

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
    """H and C composed with a graph of phones: a graph that reads one column a frame.

    A state of the result is a state of the graph together with the loop column of the phone that led there, which says
    the phone as well: contexts whose columns are tied share their states. In front of the first phone stands silence.

    Args:
        states: the columns.
        phones: of the graph's labels 0, 1, ...
        graph: labels are phones; no input epsilons.

    Raises:
        AsrError: the tied states lack a phone.
    """
    missing = [phone for phone in phones if phone not in states.phones]
    if missing:
        raise AsrError(f"The acoustic model's tied states lack the phone {missing[0]!r}; take its own lexicon.")
    label = np.array([states.phones.index(phone) for phone in phones], dtype=np.int64)[graph.label]
    num_phones, num_columns, num_states = len(states.phones), states.num_columns, graph.num_states
    src_state = graph.src_state().astype(np.int64)
    # Which phones lead to each state; silence to the start.
    arrival = np.unique(np.append(graph.dst_state.astype(np.int64) * num_phones + label, 0))
    arrival_state, arrival_phone = np.divmod(arrival, num_phones)
    arrival_begin = np.searchsorted(arrival_state, np.arange(num_states + 1))
    # Each arc behind each phone that may come before it.
    position, arc = expand(arrival_begin[src_state], np.diff(arrival_begin)[src_state])
    loop_column = states.loop[arrival_phone[position], label[arc]]
    node = np.unique(graph.dst_state[arc].astype(np.int64) * num_columns + loop_column)
    # Node 0 is the start; the others follow.
    node_state, node_column = np.divmod(node, num_columns)
    node_phone = states.phone_of_column()[node_column]
    node_begin = np.searchsorted(node_state, np.arange(num_states + 1))

    position, arc = expand(node_begin[src_state], np.diff(node_begin)[src_state])
    from_start = np.flatnonzero(src_state == 0)
    src = np.concatenate((position + 1, np.zeros(len(from_start), dtype=np.int64)))
    before = np.concatenate((node_phone[position], np.zeros(len(from_start), dtype=np.int64)))
    arc = np.concatenate((arc, from_start))
    target = graph.dst_state[arc].astype(np.int64) * num_columns + states.loop[before, label[arc]]
    dst = np.searchsorted(node, target) + 1
    own = np.arange(1, len(node) + 1)
    unscored = graph.num_arcs  # stands for an arc without score and words
    arcs = np.concatenate((arc, np.full(len(node), unscored)))
    words = Words(np.append(graph.word_begin, graph.word_begin[-1]), graph.word_id).take(arcs)
    return GraphArrays.from_arcs(
        np.concatenate((src, own)),
        np.concatenate((dst, own)),
        np.concatenate((states.entry[before, label[arc]], node_column)),
        np.append(graph.score, np.float32(0.0))[arcs],
        words,
        np.concatenate((graph.final_score[:1], graph.final_score[node_state])),
    )
