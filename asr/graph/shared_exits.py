"""Graphs of CTC networks with thousands of tokens: token states that share the arcs after them.

A token is read in one frame or several, so that each graph state needs a copy for every phone that leads to it, with
the phone's loop and all arcs of the state. Words of 5,000 pieces begin with 3,700 of them, and end with 4,500: one
state, that between words, would have 41 million arcs.

Shapes: S states of a graph of phones, Q pairs of a phone and the state that it leads to, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asr.graph.fst import GraphArrays, IntArray


@dataclass(frozen=True)
class SharedExits:
    """States that pairs (p, s) share, to which the last frame of p leads.

    If no arc of s has p, that is the copy of s after a blank: whatever may follow there may follow p. If one has, a
    blank must come first, but only before this arc. These phones are divided into groups: the state of a group has the
    arcs of s with all other phones, and each pair itself those of its own group except p. So every sequence of tokens
    still has one path. With n phones in sqrt(n) groups, the pairs of s have 2 sqrt(n) times its arcs, instead of n.

    Attributes:
        exit: (Q,) int64, the state to which the last frame of each pair leads; -1 for pairs that share none.
        number: (G,) int64, the states of groups.
        state: (G,) int64, the graph states that they belong to.
        origin: the states of groups, and the pairs whose groups have arcs.
        arcs: the arcs of the graph that leave each of them.
    """

    exit: IntArray
    number: IntArray
    state: IntArray
    origin: list[int]
    arcs: list[IntArray]

    @classmethod
    def build(
        cls,
        graph: GraphArrays,
        is_shared: npt.NDArray[np.bool_],
        pairs: tuple[IntArray, IntArray, IntArray],
        copy_number: IntArray,
        first_number: int,
    ) -> SharedExits:
        """Divides the phones of each state.

        Args:
            graph: labels are phones.
            is_shared: (S,), the states whose pairs share.
            pairs: the graph state, the phone and the number (Q,) of each, sorted by state.
            copy_number: (S,) the number of the copy of each state after a blank.
            first_number: the first number that is free for groups.
        """
        pair_state, phone, pair_number = pairs
        exit_of = np.full(len(phone), -1, dtype=np.int64)
        states: list[int] = []
        origin: list[int] = []
        arcs: list[IntArray] = []
        for state in np.flatnonzero(is_shared).tolist():
            own = np.arange(*np.searchsorted(pair_state, (state, state + 1)))
            leaving = np.arange(graph.arc_begin[state], graph.arc_begin[state + 1])
            label = graph.label[leaving]
            exit_of[own] = copy_number[state]
            repeated = np.intersect1d(phone[own], label)
            num_groups = math.ceil(math.sqrt(len(repeated)))
            group_of = {one: place * num_groups // len(repeated) for place, one in enumerate(repeated.tolist())}
            group = np.array([group_of.get(one, -1) for one in label.tolist()])
            first = first_number + len(states)
            states += [state] * num_groups
            origin += range(first, first + num_groups)
            arcs += [leaving[group != number] for number in range(num_groups)]
            inside = [np.flatnonzero(group == number) for number in range(num_groups)]
            for pair in own.tolist():
                number = group_of.get(int(phone[pair]), -1)
                if number >= 0:
                    exit_of[pair] = first + number
                    origin.append(int(pair_number[pair]))
                    arcs.append(leaving[inside[number][label[inside[number]] != phone[pair]]])
        number_of = first_number + np.arange(len(states))
        return cls(exit_of, number_of, np.array(states, dtype=np.int64), origin, arcs)

    def leaving(self) -> tuple[IntArray, IntArray, IntArray]:
        """`origin` as an array, all arcs one after the other, and the position of each one's origin."""
        owner = np.repeat(np.arange(len(self.arcs)), [len(each) for each in self.arcs])
        none = [np.zeros(0, dtype=np.int64)]
        return np.array(self.origin, dtype=np.int64), np.concatenate([*none, *self.arcs]), owner
