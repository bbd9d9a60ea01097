"""A lattice as links with at most one word each, the form in which other programs store lattices.

In a `Lattice`, an arc reads a frame and has any number of words. When it is written, all its words except the last get
separate links before it that read no frame. When a file is read, links that read no frame are merged with the next link
that reads one.

Shapes: S states, A arcs, W words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from asr.decoding.lattice import Lattice
from asr.errors import AsrError
from asr.text.symbols import EPSILON_ID

NO_TOKEN = -1
NO_ARC = -1

MAX_LINKS = 1_000_000
"""A small file may describe more than fit into memory: a long silence, or many paths over links that read no frame."""


@dataclass(frozen=True)
class Link:
    """An arc with at most one word.

    Args:
        src_state, dst_state: source and destination state.
        word_id: the word; `EPSILON_ID` for none.
        token_id: the acoustic token of its frame; `NO_TOKEN` if it reads no frame.
        am_score, graph_score, lm_score: natural logs, unscaled.
        graph_arc: the arc of the decoding graph; `NO_ARC` if unknown.
    """

    src_state: int
    dst_state: int
    word_id: int
    token_id: int
    am_score: float = 0.0
    graph_score: float = 0.0
    lm_score: float = 0.0
    graph_arc: int = NO_ARC


@dataclass
class LatticeLinks:
    """A lattice of one utterance. States are ordered by frame, the start is state 0, and no link leads backward.

    Args:
        frame: number of frames read before each state.
        links: sorted by source state.
        final: final state -> its graph and language model score.
    """

    frame: list[int]
    links: list[Link] = field(default_factory=list)
    final: dict[int, tuple[float, float]] = field(default_factory=dict)


def frame_links(
    src_state: int,
    dst_state: int,
    word_id: int,
    tokens: Sequence[int],
    scores: tuple[float, float, float],
    num_states: int,
    graph_arc: int = NO_ARC,
) -> list[Link]:
    """A link that reads any number of frames as links that read one; the first has the word, scores and graph arc.

    Args:
        src_state, dst_state, word_id, graph_arc: as those of `Link`.
        tokens: the acoustic token of each frame; if there are none, one link reads nothing.
        scores: acoustic, graph and language model score.
        num_states: the first unused state; the states between the frames are numbered from here.
    """
    if len(tokens) < 2:
        return [Link(src_state, dst_state, word_id, tokens[0] if tokens else NO_TOKEN, *scores, graph_arc)]
    states = [*range(num_states, num_states + len(tokens) - 1), dst_state]
    following = zip(states, states[1:], tokens[1:], strict=False)
    return [
        Link(src_state, num_states, word_id, tokens[0], *scores, graph_arc),
        *(Link(src, dst, EPSILON_ID, token) for src, dst, token in following),
    ]


def links_of(lattice: Lattice) -> LatticeLinks:
    """Converts a lattice of one utterance to links with at most one word each."""
    src_state, dst_state = lattice.src_state().tolist(), lattice.dst_state.tolist()
    token_id, graph_arc = lattice.token_id.tolist(), lattice.graph_arc.tolist()
    scores = list(zip(lattice.am_score.tolist(), lattice.graph_score.tolist(), lattice.lm_score.tolist(), strict=True))
    word_begin, word_id = lattice.word_begin.tolist(), lattice.word_id.tolist()
    frame = lattice.frame.tolist()
    links: list[Link] = []
    for arc, state in enumerate(src_state):
        words = word_id[word_begin[arc] : word_begin[arc + 1]] or [EPSILON_ID]
        for word in words[:-1]:
            frame.append(frame[state])
            links.append(Link(state, len(frame) - 1, word, NO_TOKEN))
            state = len(frame) - 1
        links.append(Link(state, dst_state[arc], words[-1], token_id[arc], *scores[arc], graph_arc[arc]))
    may_end = (lattice.final_graph_score > -torch.inf).nonzero().squeeze(1)
    finals = zip(
        may_end.tolist(),
        lattice.final_graph_score[may_end].tolist(),
        lattice.final_lm_score[may_end].tolist(),
        strict=True,
    )
    return _sorted(frame, links, {state: (graph_score, lm_score) for state, graph_score, lm_score in finals})


def _sorted(frame: Sequence[int], links: Sequence[Link], final: dict[int, tuple[float, float]]) -> LatticeLinks:
    """Orders states by frame; in each frame, the lattice's states come before those added for words."""
    order = sorted(range(len(frame)), key=lambda state: (frame[state], state))
    number = [0] * len(order)
    for new, old in enumerate(order):
        number[old] = new
    renumbered = [replace(link, src_state=number[link.src_state], dst_state=number[link.dst_state]) for link in links]
    renumbered.sort(key=lambda link: link.src_state)
    return LatticeLinks(
        [frame[state] for state in order], renumbered, {number[state]: scores for state, scores in final.items()}
    )


@dataclass(frozen=True)
class _Way:
    """A path of links of which only the last reads a frame, merged into one link."""

    link: Link
    words: tuple[int, ...]


def lattice_from_links(
    num_states: int,
    start: int,
    links: Sequence[Link],
    final: dict[int, tuple[float, float]],
    name: str,
    max_links: int = MAX_LINKS,
) -> Lattice:
    """Builds the lattice of one utterance.

    Args:
        num_states: S.
        start: the start state.
        links: in any order.
        final: final state -> its graph and language model score.
        name: name of the file, for error messages.
        max_links: maximum number of paths of links that read no frame.

    Raises:
        AsrError: there is a cycle, no reachable final state, a state reached by paths with different numbers of frames,
            a word after the last frame, or more than `max_links` of these paths.
    """
    out: list[list[Link]] = [[] for _ in range(num_states)]
    for link in links:
        out[link.src_state].append(link)
    order = _topological(out, start, name)
    ways: dict[int, list[_Way]] = {}
    ends = dict(final)
    num_ways = 0
    for state in reversed(order):
        ways[state] = []
        for link in out[state]:
            words = (link.word_id,) if link.word_id != EPSILON_ID else ()
            if link.token_id != NO_TOKEN:
                ways[state].append(_Way(link, words))
                continue
            num_ways += len(ways[link.dst_state])
            if num_ways > max_links:
                raise AsrError(f"{name}: links that read no frame form more than {max_links} paths; prune the lattice.")
            ways[state] += [_Way(_after(link, way.link), words + way.words) for way in ways[link.dst_state]]
            if link.dst_state in ends:
                if words:
                    raise AsrError(f"{name}: there is a word after the last frame, which is not supported.")
                graph_score, lm_score = ends[link.dst_state]
                reached = (graph_score + link.graph_score + link.am_score, lm_score + link.lm_score)
                ends[state] = max(ends.get(state, reached), reached, key=sum)
    frame = {start: 0}
    for state in order:
        for way in ways[state] if state in frame else ():
            after = frame[state] + 1
            if frame.setdefault(way.link.dst_state, after) != after:
                raise AsrError(
                    f"{name}: state {way.link.dst_state} is reached after {frame[way.link.dst_state]} frames and after "
                    f"{after}; all paths to a state must have the same number of frames."
                )
    states = sorted(frame, key=lambda state: frame[state])
    if not any(state in ends for state in states):
        raise AsrError(f"{name}: no final state can be reached.")
    return _assembled(states, frame, ways, ends)


def _after(first: Link, second: Link) -> Link:
    """Merges a link that reads no frame with the one after it."""
    return replace(
        second,
        src_state=first.src_state,
        am_score=first.am_score + second.am_score,
        graph_score=first.graph_score + second.graph_score,
        lm_score=first.lm_score + second.lm_score,
    )


def _topological(out: list[list[Link]], start: int, name: str) -> list[int]:
    """The states that can be reached, in topological order."""
    order: list[int] = []
    mark: dict[int, int] = {}  # 1 entered, 2 left
    stack = [(start, 0)]
    while stack:
        state, position = stack.pop()
        if position == 0:
            if mark.get(state) == 2:
                continue
            mark[state] = 1
        if position < len(out[state]):
            stack.append((state, position + 1))
            dst_state = out[state][position].dst_state
            if mark.get(dst_state) == 1:
                raise AsrError(f"{name}: the lattice has a cycle through state {dst_state}.")
            if dst_state not in mark:
                stack.append((dst_state, 0))
        else:
            mark[state] = 2
            order.append(state)
    return order[::-1]


def _assembled(
    states: list[int], frame: dict[int, int], ways: dict[int, list[_Way]], ends: dict[int, tuple[float, float]]
) -> Lattice:
    number = {state: position for position, state in enumerate(states)}
    arcs = [way for state in states for way in ways[state]]
    counts = torch.tensor([len(ways[state]) for state in states])
    num_words = torch.tensor([len(way.words) for way in arcs], dtype=torch.int64)
    no_end = (-torch.inf, 0.0)
    final = [ends.get(state, no_end) for state in states]

    def of_links(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(way.link, name) for way in arcs], dtype=dtype)

    return Lattice(
        frame=torch.tensor([frame[state] for state in states]),
        utt_idx=torch.zeros(len(states), dtype=torch.int64),
        start_state=torch.zeros(1, dtype=torch.int64),
        arc_begin=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        dst_state=torch.tensor([number[way.link.dst_state] for way in arcs], dtype=torch.int64),
        graph_arc=of_links("graph_arc", torch.int64),
        token_id=of_links("token_id", torch.int32),
        am_score=of_links("am_score", torch.float32),
        graph_score=of_links("graph_score", torch.float32),
        lm_score=of_links("lm_score", torch.float32),
        word_begin=torch.cat([num_words.new_zeros(1), num_words.cumsum(0)]),
        word_id=torch.tensor([word for way in arcs for word in way.words], dtype=torch.int64),
        final_graph_score=torch.tensor([score for score, _ in final], dtype=torch.float32),
        final_lm_score=torch.tensor([score for _, score in final], dtype=torch.float32),
    )
