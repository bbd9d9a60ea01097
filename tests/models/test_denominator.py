"""The phone model of the denominator on sequences that can be counted by hand."""

from __future__ import annotations

import numpy as np
import torch

from asr.graph.context import TiedStates
from asr.models.chain_preparation import denominator_graph, phone_histories
from asr.models.lfmmi import LfMmi

SEQUENCES = [[0, 1, 2, 1, 0], [0, 1, 2, 2, 0], [0, 2, 1, 2, 0]]


def states() -> TiedStates:
    entry = np.array([[0, 1, 2], [0, 3, 4], [0, 5, 6]])
    loop = np.array([[0, 7, 8], [0, 7, 8], [0, 7, 9]])
    return TiedStates(("SIL", "A", "B"), entry, loop)


def test_counts_of_two_phones() -> None:
    histories = phone_histories(SEQUENCES, num_long=0)
    # A B was followed by A once, by B once and by silence once.
    assert histories[(1, 2)] == {1: 1, 2: 1, 0: 1}
    assert histories[(0, 1)] == {2: 2}
    assert set(map(len, histories)) == {2}


def test_a_longer_history_takes_its_counts_with_it() -> None:
    histories = phone_histories(SEQUENCES, num_long=1)
    (long,) = [history for history in histories if len(history) == 3]
    before = phone_histories(SEQUENCES, num_long=0)
    total = sum(sum(counts.values()) for counts in histories.values())
    assert total == sum(sum(counts.values()) for counts in before.values()) == sum(map(len, SEQUENCES))
    assert sum(histories[long].values()) + sum(histories.get(long[1:], {}).values()) == sum(before[long[1:]].values())


def test_arcs_out_of_a_state_sum_to_one() -> None:
    for num_long in (0, 2, 10):
        graph = denominator_graph(phone_histories(SEQUENCES, num_long), states())
        leaving = graph.stay + np.bincount(graph.source, weights=graph.probability, minlength=graph.num_states)
        ends = np.setdiff1d(np.arange(graph.num_states), graph.source)  # nothing ever followed these
        np.testing.assert_allclose(np.delete(leaving, ends), 1.0, rtol=1e-6)
        assert abs(graph.initial.sum() - 1.0) < 1e-5
        assert (np.diff(graph.begin) >= 0).all() and graph.begin[-1] == len(graph.source)


def test_what_was_seen_is_possible_and_what_was_not_is_not() -> None:
    graph = denominator_graph(phone_histories(SEQUENCES, 2), states())
    table = states()

    def value(phones: list[int]) -> float:
        columns = [int(table.entry[before, phone]) for before, phone in zip([0, *phones], phones)]  # noqa: B905
        score = torch.full((1, len(phones), 10), -100.0)
        score[0, torch.arange(len(phones)), torch.tensor(columns)] = 0.0
        return float(LfMmi(graph, leak=0.0).denominator(score)[0])

    assert value([1, 2, 1]) > -20.0
    assert value([1, 1, 1]) < -40.0
