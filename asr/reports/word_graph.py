"""The words of a lattice, simplified for drawing: equal words at about the same time are merged.

A lattice has a state for each frame and history, thousands per sentence. A drawing should show which words were
possible, when, how probable each was, and which word could follow which.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.decoding.lattice import Lattice
from asr.decoding.mbr import PartPosteriors
from asr.decoding.settings import DecodingOptions
from asr.text.symbols import Vocabulary

START, END = -1, -2
# Equal words that begin up to this many frames apart are merged.
_FRAMES_APART = 5


class GraphWord(NamedTuple):
    """A word of a `WordGraph` with its times in seconds and its posterior probability."""

    text: str
    start: float
    end: float
    probability: float


class Follows(NamedTuple):
    """Word `dst` follows word `src`, with the joint probability; `START` and `END` are the ends of the utterance."""

    src: int
    dst: int
    probability: float


@dataclass(frozen=True)
class WordGraph:
    """The words of a lattice, ordered by time, and which word follows which."""

    words: tuple[GraphWord, ...]
    links: tuple[Follows, ...]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WordGraph:
        """The inverse of `dataclasses.asdict`.

        Raises:
            KeyError, TypeError, ValueError: the value is not a word graph.
        """
        words = tuple(GraphWord(str(text), float(a), float(b), float(p)) for text, a, b, p in value["words"])
        links = tuple(Follows(int(src), int(dst), float(p)) for src, dst, p in value["links"])
        if any(not END <= end < len(words) for link in links for end in link[:2]):
            raise ValueError("a word follows one that does not exist")
        return cls(words, links)


def word_graph(
    lattice: Lattice,
    vocabulary: Vocabulary,
    options: DecodingOptions,
    frame_seconds: float,
    original_frame: Tensor | None = None,
    least_probability: float = 0.01,
) -> WordGraph:
    """Reduces a lattice to a word graph.

    Args:
        lattice: a lattice of one utterance.
        vocabulary: vocabulary of its decoding graph.
        options: scales of scores; as for confidences, probabilities are tempered by the acoustic scale.
        frame_seconds: duration of a frame.
        original_frame: (T,) int64, the original frame of each frame of the lattice; None if no frames were skipped.
        least_probability: less probable words and links are left out.
    """
    posterior = PartPosteriors(lattice, options).at(1.0 / options.am_scale).posterior
    frame = lattice.frame
    if original_frame is not None and len(original_frame):
        frame = original_frame[frame.clamp(max=len(original_frame) - 1)]
    at = frame[lattice.src_state()].tolist()
    begin = lattice.word_begin.tolist()
    mass = posterior.tolist()
    events = [
        (mass[arc], arc, number)
        for arc, (first, last) in enumerate(itertools.pairwise(begin))
        for number in range(first, last)
    ]
    word_id = lattice.word_id.tolist()
    # The most probable occurrence of each word absorbs those near it.
    events.sort(key=lambda event: -event[0])
    clusters: dict[int, list[int]] = defaultdict(list)
    center, cluster_of = list[int](), dict[int, int]()
    for _, arc, number in events:
        near = (one for one in clusters[word_id[number]] if abs(center[one] - at[arc]) <= _FRAMES_APART)
        found = next(near, None)
        if found is None:
            found = len(center)
            center.append(at[arc])
            clusters[word_id[number]].append(found)
        cluster_of[number] = found
    flow = _flow(lattice, mass, begin, cluster_of)
    probability, follower = defaultdict[int, float](float), defaultdict[int, float](float)
    last_frame = float(frame.max()) if len(frame) else 0.0
    for (src, dst), share in flow.items():
        probability[dst] += share
        follower[src] += share * (center[dst] if dst >= 0 else last_frame)
    text = {cluster: vocabulary.words[one] for one, members in clusters.items() for cluster in members}
    kept = sorted((one for one in text if probability[one] >= least_probability), key=lambda one: (center[one], one))
    place = {one: index for index, one in enumerate(kept)} | {START: START, END: END}
    words = tuple(
        GraphWord(
            text[one],
            round(center[one] * frame_seconds, 3),
            round(max(follower[one] / probability[one], center[one] + 1) * frame_seconds, 3),
            round(min(1.0, probability[one]), 4),
        )
        for one in kept
    )
    links = tuple(
        Follows(place[src], place[dst], round(min(1.0, share), 4))
        for (src, dst), share in sorted(flow.items())
        if src in place and dst in place and share >= least_probability
    )
    return WordGraph(words, links)


def _flow(
    lattice: Lattice, mass: list[float], begin: list[int], cluster_of: Mapping[int, int]
) -> dict[tuple[int, int], float]:
    """The joint probability of each pair of consecutive words; exact, as continuations depend only on the state."""
    here: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    here[int(lattice.start_state[0])][START] = 1.0
    flow: dict[tuple[int, int], float] = defaultdict(float)
    arc_begin, dst_state = lattice.arc_begin.tolist(), lattice.dst_state.tolist()
    may_end = (lattice.final_graph_score > -torch.inf).tolist()
    for state in range(lattice.num_states):
        tokens = here.pop(state, None)
        total = sum(tokens.values()) if tokens else 0.0
        if not tokens or total <= 0.0:
            continue
        left = total
        for arc in range(arc_begin[state], arc_begin[state + 1]):
            share = mass[arc] / total
            left -= mass[arc]
            numbers = range(begin[arc], begin[arc + 1])
            for last, amount in tokens.items():
                for number in numbers:
                    flow[last, cluster_of[number]] += amount * share
                    last = cluster_of[number]
                here[dst_state[arc]][last] += amount * share
        if may_end[state] and left > 0.0:
            for last, amount in tokens.items():
                flow[last, END] += amount * left / total
    return dict(flow)
