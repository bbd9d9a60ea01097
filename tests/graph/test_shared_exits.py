"""Graphs whose token states share arcs have the same paths as those in which each has its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from asr.graph.fst import GraphArrays, Words
from asr.graph.topology import compose_topology, topology_named

_ALL = -1
_NONE = 10**9


def random_graph(seed: int, num_states: int, num_arcs: int, num_phones: int) -> GraphArrays:
    rng = np.random.default_rng(seed)
    final = np.where(rng.random(num_states) < 0.5, rng.normal(size=num_states), -np.inf)
    final[-1] = 0.5
    src = np.concatenate([[0], rng.integers(num_states, size=num_arcs - 1)])
    return GraphArrays.from_arcs(
        src,
        rng.integers(num_states, size=num_arcs),
        rng.integers(num_phones, size=num_arcs),
        rng.normal(size=num_arcs).astype(np.float32),
        Words.single(rng.integers(0, 4, size=num_arcs)),
        final.astype(np.float32),
    )


def paths_of(graph: GraphArrays, num_frames: int) -> Counter[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """How many complete paths read each sequence of tokens with each score and each words."""

    def from_state(state: int, left: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], float]]:
        if left == 0:
            if graph.final_score[state] > -np.inf:
                yield (), (), float(graph.final_score[state])
            return
        for arc in range(graph.arc_begin[state], graph.arc_begin[state + 1]):
            words = tuple(graph.word_id[graph.word_begin[arc] : graph.word_begin[arc + 1]].tolist())
            for tokens, more, score in from_state(int(graph.dst_state[arc]), left - 1):
                yield (int(graph.label[arc]), *tokens), words + more, score + float(graph.score[arc])

    return Counter((tokens, words, round(score, 4)) for tokens, words, score in from_state(0, num_frames))


@pytest.mark.parametrize("seed", range(12))
def test_every_sequence_has_the_same_paths(seed: int) -> None:
    num_states, num_phones = (1, 5) if seed < 4 else (3, 4)
    graph = random_graph(seed, num_states, 8, num_phones)
    token_id = np.arange(1, num_phones + 1, dtype=np.int32)[:, None]
    topology = topology_named("ctc")
    own, shared = (compose_topology(topology, token_id, graph, most) for most in (_NONE, _ALL))
    assert shared.num_states != own.num_states or shared.num_arcs != own.num_arcs
    for num_frames in range(5):
        assert paths_of(shared, num_frames) == paths_of(own, num_frames)
    same_state = shared.src_state()[1:] == shared.src_state()[:-1]
    assert (np.diff(shared.score)[same_state] <= 0).all()


def test_only_topologies_with_blanks_share() -> None:
    graph, token_id = random_graph(0, 3, 8, 4), np.arange(1, 5, dtype=np.int32)[:, None]
    for name in ("ctc-modified", "hmm-1"):
        own, shared = (compose_topology(topology_named(name), token_id, graph, most) for most in (_NONE, _ALL))
        assert own.num_arcs == shared.num_arcs
        assert own.dst_state.tolist() == shared.dst_state.tolist()


def test_many_phones_have_few_arcs() -> None:
    """Of 400 phones, 200 lead back to the state where all begin, as words of one piece do."""
    num_phones = 400
    label = np.concatenate([np.arange(num_phones), np.arange(num_phones // 2)])
    none = np.zeros(len(label))
    src = np.concatenate([np.zeros(num_phones), np.ones(num_phones // 2)]).astype(np.int64)
    dst = np.concatenate([np.arange(num_phones) % 2, np.zeros(num_phones // 2)]).astype(np.int64)
    graph = GraphArrays.from_arcs(src, dst, label, none, Words.empty(len(label)), np.zeros(2))
    token_id = np.arange(1, num_phones + 1, dtype=np.int32)[:, None]
    own, shared = (compose_topology(topology_named("ctc"), token_id, graph, most) for most in (_NONE, 10_000))
    assert own.num_arcs > 100_000
    assert shared.num_arcs < 40_000
    assert shared.num_states - own.num_states < 50
