"""Epsilon removal keeps every (labels, words) pair's best score."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.text.symbols import TokenTable, Vocabulary
from tests.reference.graph_search import word_sequence_scores
from tests.reference.toy_graph import graph_of_arcs

TOKENS, WORDS = TokenTable(["x", "y"]), Vocabulary(["X", "Y"])
Arcs = list[list[tuple[int, int, float, list[int]]]]


def graph_with(arcs: Arcs, final: list[float]) -> DecodingGraph:
    return graph_of_arcs(arcs, final, TOKENS, WORDS)


@st.composite
def graphs(draw: st.DrawFn) -> DecodingGraph:
    """Any graph of up to 5 states whose epsilons lead to higher states; words on epsilons too, but not into an end."""
    num_states = draw(st.integers(2, 5))
    score = st.sampled_from([-2.0, -1.0, -0.5, 0.0])
    final = [draw(st.one_of(score, st.just(float("-inf")))) for _ in range(num_states - 1)] + [0.0]
    arcs: Arcs = []
    for state in range(num_states):
        out: list[tuple[int, int, float, list[int]]] = []
        for _ in range(draw(st.integers(0, 3))):
            token = draw(st.integers(0, 2))
            words = draw(st.lists(st.integers(4, 5), max_size=2))
            out.append((draw(st.integers(0, num_states - 1)), token, draw(score), words))
        for _ in range(draw(st.integers(0, 2)) if state < num_states - 1 else 0):
            words = draw(st.lists(st.integers(4, 5), max_size=1)) if state > 0 else []
            out.append((draw(st.integers(state + 1, num_states - 1)), -1, draw(score), words))
        arcs.append(out)
    return graph_with(arcs, final)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 9))
def test_every_word_sequence_keeps_its_score(graph: DecodingGraph, seed: int) -> None:
    for num_frames in range(3):
        log_prob = torch.randn(num_frames, 3, generator=torch.Generator().manual_seed(seed))
        try:
            removed = graph.remove_epsilons()
        except AsrError as error:  # words written before anything is read have nowhere to go
            assert "without any input" in str(error) or "is empty" in str(error)
            return
        assert not removed.has_epsilons
        expected, found = word_sequence_scores(graph, log_prob), word_sequence_scores(removed, log_prob)
        assert found.keys() == expected.keys()
        for words, score in expected.items():
            assert found[words] == pytest.approx(score, abs=1e-5)


def test_word_on_an_epsilon_joins_the_arc_before_it() -> None:
    arcs: Arcs = [[(1, 1, -1.0, [4])], [(2, -1, -0.5, [5]), (3, -1, -0.25, [])], [(3, 2, 0.0, [])], []]
    removed = graph_with(arcs, [float("-inf")] * 3 + [0.0]).remove_epsilons()
    assert removed.num_states == 3 and removed.num_arcs == 3
    begin = removed.word_begin.tolist()
    lists = sorted(removed.word_id[begin[arc] : begin[arc + 1]].tolist() for arc in range(3))
    assert lists == [[], [4], [4, 5]]


def test_of_equal_arcs_the_best_stays() -> None:
    arcs: Arcs = [[(1, 1, -1.0, [])], [(2, -1, -0.5, []), (3, -1, -0.1, [])], [(3, -1, -0.2, [])], [(3, 2, 0.0, [])]]
    removed = graph_with(arcs, [float("-inf")] * 3 + [0.0]).remove_epsilons()
    assert removed.num_arcs == 2
    assert float(removed.score[0]) == pytest.approx(-1.1)


def test_of_arcs_between_several_pairs_of_states_the_best_of_each_stays() -> None:
    arcs: Arcs = [
        [(1, 1, -1.0, []), (1, 1, -2.0, []), (1, 2, -3.0, []), (2, 1, -0.5, [4]), (2, 1, -0.25, [4])],
        [(3, -1, 0.0, [])],
        [(2, 1, -4.0, [4, 5]), (2, 1, -5.0, [4, 4]), (2, 1, -6.0, [4, 5]), (3, -1, 0.0, [])],
        [],
    ]
    removed = graph_with(arcs, [float("-inf")] * 3 + [0.0]).remove_epsilons()
    # Nothing but the epsilon leaves state 1, so arcs lead past it; those to state 2 may stay there or go on to 3.
    assert sorted(removed.score.tolist()) == [-5.0, -5.0, -4.0, -4.0, -3.0, -1.0, -0.25, -0.25]


def test_a_cycle_of_epsilons_is_refused() -> None:
    arcs: Arcs = [[(1, 1, 0.0, [])], [(2, -1, 0.0, [])], [(1, -1, 0.0, [])]]
    with pytest.raises(AsrError, match="cycle"):
        graph_with(arcs, [float("-inf"), 0.0, 0.0]).remove_epsilons()


def test_a_graph_without_path_is_refused() -> None:
    arcs: Arcs = [[(1, -1, 0.0, [])], [], []]
    with pytest.raises(AsrError, match="is empty"):
        graph_with(arcs, [float("-inf"), float("-inf"), 0.0]).remove_epsilons()
