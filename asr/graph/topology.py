"""H, how frames spell the symbols of a lexicon: the topology of phones, and word boundaries of letter-based networks.

A topology says which states and frames a phone has; it is composed with a graph of phones.

A token is read in one frame or several, so that each graph state needs a copy for every phone that leads to it, with
the phone's loop and all arcs of the state. Words of 5,000 pieces begin with 3,700 of them, and end with 4,500: one
state, that between words, would have 41 million arcs. Such states share their arcs (`SharedExits`).

Lexicons spell a word with one boundary at its end. Networks may output several in a row, also before the first word,
and may omit the last one. The graph therefore reads any number of boundaries wherever one is allowed, and each
utterance gets an additional last frame that can only be read as a boundary, at no cost.

Shapes: N utterances, T frames, C tokens, P phones, S states, Q pairs of a phone and the state that it leads to, G
groups of phones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.graph.fst import GraphArrays, IntArray, Words, expand
from asr.text.symbols import BLANK_ID, TokenTable

# Above this many arcs after the copies of one state, they share them; a graph of letters or 500 pieces has fewer.
_MOST_EXITS = 2_000_000


@dataclass(frozen=True)
class Topology:
    """A left-to-right model of a phone, in which each state has a token and a self-loop.

    Attributes:
        name: its name in options.
        states_per_phone: number of states; each has its own token.
        has_blank: whether blanks may occur between phones, at the start and at the end.
        repeat_needs_blank: whether a blank must separate two equal consecutive phones.
    """

    name: str
    states_per_phone: int
    has_blank: bool
    repeat_needs_blank: bool

    def token_ids(self, phones: Sequence[str], tokens: TokenTable) -> npt.NDArray[np.int32]:
        """The tokens of each phone's states, (P, states_per_phone).

        With several states per phone, the tokens of `AA` are `AA_1`, `AA_2`, ...

        Raises:
            AsrError: the token table lacks one of them.
        """
        if self.states_per_phone == 1:
            names = [[phone] for phone in phones]
        else:
            names = [[f"{phone}_{state}" for state in range(1, self.states_per_phone + 1)] for phone in phones]
        missing = [name for row in names for name in row if name not in tokens]
        if missing:
            raise AsrError(
                f"{tokens.name}: tokens that the lexicon or the topology needs are missing ({' '.join(missing[:5])}"
                f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}); give the acoustic model's tokens "
                "(--tokens) and the lexicon that it was trained with."
            )
        return np.array([tokens.ids_of(row) for row in names], dtype=np.int32)


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("ctc", 1, has_blank=True, repeat_needs_blank=True),
        Topology("ctc-modified", 1, has_blank=True, repeat_needs_blank=False),
        Topology("hmm-1", 1, has_blank=False, repeat_needs_blank=False),
        Topology("hmm-2", 2, has_blank=False, repeat_needs_blank=False),
        Topology("hmm-3", 3, has_blank=False, repeat_needs_blank=False),
    )
}


def topology_named(name: str) -> Topology:
    """The topology with the given name.

    Raises:
        AsrError: there is no such topology.
    """
    try:
        return TOPOLOGIES[name]
    except KeyError:
        raise AsrError(f"there is no topology {name!r}; choose one of {', '.join(TOPOLOGIES)}.") from None


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


def compose_topology(
    topology: Topology, token_id: npt.NDArray[np.int32], graph: GraphArrays, most_exits: int = _MOST_EXITS
) -> GraphArrays:
    """Composes H with a graph of phones; each arc of the result reads one token, in one frame.

    A state of the result is a state of the graph together with what was read last: nothing or a blank, or state k of
    the phone p on an arc to that state. A pair (p, graph state) exists only if there is such an arc.

    Args:
        topology: H.
        token_id: (P, states_per_phone), the token of each phone's states.
        graph: labels are phones 0..P-1; no input epsilons.
        most_exits: pairs with a graph state share its arcs (`SharedExits`) if there would be more than this.
    """
    # The result keeps this order, for the search; unscored arcs come first.
    graph = graph.best_first().breadth_first()
    num_phones, per_phone = token_id.shape
    key, entered = np.unique(graph.dst_state.astype(np.int64) * num_phones + graph.label, return_inverse=True)
    pair_state, phone = np.divmod(key, num_phones)
    num_pairs, num_states = len(key), graph.num_states
    # The copy of state s after a blank is numbered before the pairs with s; without blanks, only the start has a copy.
    has_copy = np.ones(num_states, dtype=bool) if topology.has_blank else np.arange(num_states) == 0
    copies_before = np.cumsum(has_copy) - has_copy
    pair_number = copies_before[pair_state] + has_copy[pair_state] + np.arange(num_pairs) * per_phone
    first_pair = np.searchsorted(pair_state, np.arange(num_states))
    copy_number = copies_before + first_pair * per_phone
    copied = np.flatnonzero(has_copy)
    last = pair_number + per_phone - 1
    counts = np.diff(graph.arc_begin)
    is_shared = np.zeros(num_states, dtype=bool)
    if topology.has_blank and topology.repeat_needs_blank and per_phone == 1:
        is_shared = np.bincount(pair_state, minlength=num_states) * counts > most_exits
    num_before = len(copied) + num_pairs * per_phone
    shared = SharedExits.build(graph, is_shared, (pair_state, phone, pair_number), copy_number, num_before)
    own = np.flatnonzero(shared.exit < 0)
    sharing = np.flatnonzero(shared.exit >= 0)

    blocks: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]] = []
    unscored = graph.num_arcs  # index of an arc without score and words, appended below

    def add_plain(src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64], token: npt.NDArray[np.int32]) -> None:
        blocks.append((src, dst, token, np.full(len(src), unscored)))

    for state in range(per_phone):
        add_plain(pair_number + state, pair_number + state, token_id[phone, state])
        if state > 0:
            add_plain(pair_number + state - 1, pair_number + state, token_id[phone, state])
    add_plain(last[sharing], shared.exit[sharing], token_id[phone[sharing], 0])
    if topology.has_blank:
        for src, dst in (
            (copy_number, copy_number),
            (last[own], copy_number[pair_state[own]]),
            (shared.number, copy_number[shared.state]),
        ):
            add_plain(src, dst, np.full(len(src), BLANK_ID, dtype=np.int32))
    after_copies = (copy_number[copied], *expand(graph.arc_begin[copied], counts[copied]))
    arc, owner = expand(graph.arc_begin[pair_state[own]], counts[pair_state[own]])
    if topology.repeat_needs_blank:
        differs = graph.label[arc] != phone[own][owner]
        arc, owner = arc[differs], owner[differs]
    for origin, arcs, owners in (after_copies, (last[own], arc, owner), shared.leaving()):
        blocks.append((origin[owners], pair_number[entered[arcs]], token_id[graph.label[arcs], 0], arcs))
        # The first frame of a phone may be its last one.
        ends = np.flatnonzero(shared.exit[entered[arcs]] >= 0)
        ending, target = arcs[ends], shared.exit[entered[arcs[ends]]]
        blocks.append((origin[owners[ends]], target, token_id[graph.label[ending], 0], ending))

    src, dst, token, arc = (np.concatenate([block[column] for block in blocks]) for column in range(4))
    final_score = np.full(num_before + len(shared.number), -np.inf, dtype=np.float32)
    final_score[copy_number[copied]] = graph.final_score[copied]
    final_score[last[own]] = graph.final_score[pair_state[own]]
    final_score[shared.number] = graph.final_score[shared.state]
    score = np.append(graph.score, np.float32(0.0))[arc]
    words = Words(np.append(graph.word_begin, graph.word_begin[-1]), graph.word_id).take(arc)
    composed = GraphArrays.from_arcs(src, dst, token, score, words, final_score)
    return composed.best_first() if len(sharing) else composed


def add_boundary_loops(graph: GraphArrays, boundary: int) -> GraphArrays:
    """Lets a graph without epsilons read any number of boundaries at its start and after each boundary."""
    after = graph.label == boundary
    states = np.unique(np.concatenate([[0], graph.dst_state[after]]))
    loops = np.zeros(len(states))
    words = Words.concatenate([graph.words, Words.empty(len(states))])
    return GraphArrays.from_arcs(
        np.concatenate([graph.src_state(), states]),
        np.concatenate([graph.dst_state, states]),
        np.concatenate([graph.label, np.full(len(states), boundary)]),
        np.concatenate([graph.score, loops]),
        words,
        graph.final_score,
    )


def with_last_boundary(log_prob: Tensor, num_frames: Tensor, boundary: int | None) -> tuple[Tensor, Tensor]:
    """Appends a frame to each utterance in which only the boundary can be read, at no cost.

    Args:
        log_prob: (N, T, C) natural logs.
        num_frames: (N,) int64.
        boundary: column of the boundary; None adds no frame.

    Returns:
        log_prob (N, T + 1, C) and num_frames + 1.
    """
    if boundary is None:
        return log_prob, num_frames
    log_prob = torch.nn.functional.pad(log_prob, (0, 0, 0, 1), value=-math.inf)
    row = torch.arange(len(num_frames), device=log_prob.device)
    last = num_frames.to(log_prob.device)
    log_prob[row, last] = -math.inf
    log_prob[row, last, boundary] = 0.0
    return log_prob, num_frames + 1
