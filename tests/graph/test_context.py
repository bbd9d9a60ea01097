"""Biphones composed with a graph of phones, against every path written out frame by frame."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from asr.errors import AsrError
from asr.graph.context import TiedStates, compose_biphones
from asr.graph.fst import GraphArrays, Words
from asr.graph.topology import compose_topology, topology_named
from asr.text.symbols import TokenTable

PHONES = ("SIL", "a", "b")


def tied_states() -> TiedStates:
    # Behind `a` its own columns; behind silence and `b` tied ones, but for the first frame of `b`.
    entry = np.array([[0, 1, 4], [0, 2, 5], [0, 1, 6]])
    loop = np.array([[0, 3, 7], [0, 8, 7], [0, 3, 7]])
    return TiedStates(PHONES, entry, loop)


def random_graph(seed: int, num_states: int = 4, num_arcs: int = 9) -> GraphArrays:
    rng = np.random.default_rng(seed)
    final = np.where(rng.random(num_states) < 0.6, rng.normal(size=num_states), -np.inf)
    final[-1] = 0.5
    return GraphArrays.from_arcs(
        rng.integers(num_states, size=num_arcs),
        rng.integers(num_states, size=num_arcs),
        rng.integers(3, size=num_arcs),
        rng.normal(size=num_arcs),
        Words.single(rng.integers(0, 4, size=num_arcs)),
        final,
    )


def best_of_every_path(graph: GraphArrays, phones: list[str], states: TiedStates, score: np.ndarray) -> float:
    """Tries every phone for every number of frames, remembering the one before."""
    number = [states.phones.index(phone) for phone in phones]

    def best(state: int, before: int, frame: int) -> float:
        total = float(graph.final_score[state]) if frame == len(score) else -np.inf
        for arc in range(graph.arc_begin[state], graph.arc_begin[state + 1]):
            phone = number[graph.label[arc]]
            so_far = float(graph.score[arc])
            for end in range(frame + 1, len(score) + 1):
                table = states.entry if end == frame + 1 else states.loop
                so_far += score[end - 1, table[before, phone]]
                total = max(total, so_far + best(int(graph.dst_state[arc]), phone, end))
        return total

    return best(0, 0, 0)


def best_path(graph: GraphArrays, score: np.ndarray) -> float:
    total = np.full(graph.num_states, -np.inf)
    total[0] = 0.0
    for frame in score:
        following = np.full(graph.num_states, -np.inf)
        np.maximum.at(following, graph.dst_state, total[graph.src_state()] + graph.score + frame[graph.label])
        total = following
    return float((total + graph.final_score).max())


@pytest.mark.parametrize("seed", range(12))
def test_the_composition_equals_every_path_written_out(seed: int) -> None:
    graph, states = random_graph(seed), tied_states()
    phones = ["b", "SIL", "a"]
    score = np.random.default_rng(seed + 100).normal(size=(4, states.num_columns))
    expected = best_of_every_path(graph, phones, states, score)
    assert best_path(compose_biphones(states, phones, graph), score) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_the_compiled_loop_equals_operations_on_arrays(seed: int) -> None:
    phones, graph = ["b", "SIL", "a"], random_graph(seed)
    compiled, arrays = (compose_biphones(tied_states(), phones, graph, each) for each in (True, False))
    for name in (field.name for field in fields(GraphArrays)):
        ours, expected = getattr(compiled, name), getattr(arrays, name)
        assert ours.dtype == expected.dtype
        np.testing.assert_array_equal(ours, expected, err_msg=name)


def test_blocks_of_states_do_not_change_the_composition() -> None:
    whole = compose_biphones(tied_states(), PHONES, random_graph(3))
    blocks = compose_biphones(tied_states(), PHONES, random_graph(3), states_at_a_time=2)
    np.testing.assert_array_equal(blocks.dst_state, whole.dst_state)
    np.testing.assert_array_equal(blocks.label, whole.label)


def test_contexts_whose_columns_are_tied_share_a_state() -> None:
    # SIL and b lead to state 1; a follows, whose loop columns behind the two are one.
    graph = GraphArrays.from_arcs(
        np.array([0, 0, 1]), np.array([1, 1, 2]), np.array([0, 2, 1]), np.zeros(3), Words.empty(3),
        np.array([-np.inf, -np.inf, 0.0]),
    )  # fmt: skip
    composed = compose_biphones(tied_states(), PHONES, graph)
    assert composed.num_states == 1 + 2 + 1
    assert composed.num_arcs == 2 + 2 + 3  # two entries, two arcs to a, three self-loops


def test_words_stay_on_the_arc_that_enters_a_phone() -> None:
    graph = GraphArrays.from_arcs(
        np.array([0]),
        np.array([1]),
        np.array([1]),
        np.array([-1.5]),
        Words.single(np.array([7])),
        np.array([-np.inf, 0]),
    )
    composed = compose_biphones(tied_states(), PHONES, graph)
    entering = int(np.flatnonzero(composed.words.counts)[0])
    assert composed.label[entering] == 1 and composed.score[entering] == np.float32(-1.5)
    assert composed.word_id.tolist() == [7]


def test_tied_states_survive_json_and_name_their_columns() -> None:
    states = TiedStates.from_json(tied_states().to_json())
    assert states.column_names() == ["<blk>", "a_1_0", "a_1_1", "a_2_0", "b_1_0", "b_1_1", "b_1_2", "b_2_0", "a_2_1"]
    states.require_tokens(TokenTable(states.column_names()))
    with pytest.raises(AsrError, match="tokens"):
        states.require_tokens(TokenTable(["a", "b"]))


def test_phones_that_share_a_column_are_refused() -> None:
    values = tied_states().to_json()
    values["entry"][1][2] = 1
    with pytest.raises(AsrError, match="share"):
        TiedStates.from_json(values)


def test_a_phone_without_columns_is_refused() -> None:
    with pytest.raises(AsrError, match="'x'"):
        compose_biphones(tied_states(), ["a", "x"], random_graph(0))


def test_runs_of_columns_become_phones() -> None:
    # a in frames 2 to 4, b in frame 5, b again in 6 and 7, then after silence a in frame 10.
    runs = [(1, 2, 3), (3, 3, 5), (5, 5, 6), (6, 6, 7), (7, 7, 8), (1, 10, 11)]
    assert tied_states().phones_of_runs(runs) == [(1, 2, 5), (2, 5, 6), (2, 6, 8), (1, 10, 11)]
    # One column twice: the phone was said twice, a frame each time.
    assert tied_states().phones_of_runs([(6, 4, 6)]) == [(2, 4, 5), (2, 5, 6)]


def test_states_tied_anew_share_what_their_contexts_had() -> None:
    # Two phones: behind silence "a" read columns 1 and 3, behind itself 2 and 3; now one column and two.
    before = TiedStates(("SIL", "a"), np.array([[0, 1], [0, 2]]), np.array([[0, 3], [0, 3]]))
    after = TiedStates(("SIL", "a"), np.array([[0, 1], [0, 1]]), np.array([[0, 2], [0, 3]]))
    share = after.tied_from(before, np.array([[5.0, 30.0], [7.0, 10.0]]))
    np.testing.assert_allclose(share, [[1, 0, 0, 0], [0, 0.75, 0.25, 0], [0, 0, 0, 1], [0, 0, 0, 1]], atol=1e-4)
    np.testing.assert_allclose(before.tied_from(before, np.zeros((2, 2))), np.eye(4))


def test_the_best_arcs_of_a_state_come_first() -> None:
    graph = GraphArrays.from_arcs(
        np.array([1, 0, 1, 1]), np.array([0, 1, 2, 0]), np.array([0, 1, 2, 1]), np.array([-2.0, -5.0, -0.5, -2.0]),
        Words(np.array([0, 1, 1, 3, 3]), np.array([7, 8, 9], dtype=np.int32)), np.array([0.0, 0.0, 0.0]),
    ).best_first()  # fmt: skip
    assert graph.arc_begin.tolist() == [0, 1, 4, 4]
    assert graph.score.tolist() == [-5.0, -0.5, -2.0, -2.0]
    assert graph.label.tolist() == [1, 2, 0, 1]  # equal scores keep their order
    assert graph.word_id.tolist() == [8, 9, 7]
    assert graph.word_begin.tolist() == [0, 0, 2, 3, 3]


@pytest.mark.parametrize("topology", ["biphones", "ctc"])
def test_arcs_of_frames_are_sorted_too(topology: str) -> None:
    graph = random_graph(0)
    graph = replace(graph, score=-np.abs(graph.score))
    composed = (
        compose_biphones(tied_states(), PHONES, graph)
        if topology == "biphones"
        else compose_topology(topology_named("ctc"), np.array([[1], [2], [3]], dtype=np.int32), graph)
    )
    same_state = composed.src_state()[1:] == composed.src_state()[:-1]
    assert same_state.any()
    assert (np.diff(composed.score)[same_state] <= 0).all()
