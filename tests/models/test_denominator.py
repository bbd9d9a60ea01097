"""The phone model of the denominator on sequences that can be counted by hand; statistics for decision trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from asr.graph.context import ENTRY, LOOP, TiedStates
from asr.models.chain_corpus import Alignment
from asr.models.chain_preparation import (
    context_statistics,
    denominator_graph,
    phone_histories,
    pronunciation_scores,
)
from asr.models.interface import UtteranceCmvn
from asr.models.lfmmi import LfMmi
from asr.text.lexicon import Lexicon

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


def test_the_longer_histories_that_tell_most_are_kept() -> None:
    """What follows 1 2 depends on the phone before; the rarer one, 3, tells more: 2 log(7 / 2) against 5 log(7 / 5)."""
    sequences = [[1, 2, 1]] * 5 + [[3, 1, 2, 3]] * 2
    kept = [{history for history in phone_histories(sequences, num) if len(history) == 3} for num in range(3)]
    assert kept == [set(), {(3, 1, 2)}, {(3, 1, 2), (0, 1, 2)}]
    histories = phone_histories(sequences, 1)
    assert (histories[(3, 1, 2)], histories[(1, 2)]) == ({3: 2}, {1: 5})


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


class TwoUtterances:
    """Stands for a prepared corpus."""

    num_features = 6

    def features(self, utterance: int, condition: int) -> Any:
        """50 and 41 frames."""
        assert condition == 0
        return np.random.default_rng(utterance).normal(size=((50, 41)[utterance], 6)).astype(np.float16)


def test_statistics_for_trees_are_those_of_each_frame_between_its_neighbors() -> None:
    """The first phone begins in the third output; the last one of the second utterance would begin after its end."""
    utterances = [([0, 1, 2, 1], [0.07, 0.13, 0.19, 0.4], 0.0), ([2, 2, 0], [0.0, 0.2, 0.7], 0.0)]
    alignment, corpus = Alignment.from_lists(("SIL", "A", "B"), utterances), TwoUtterances()
    found = context_statistics(corpus, alignment, [0, 1])  # type: ignore[arg-type]
    count, total, square = np.zeros((2, 3, 3)), np.zeros((2, 3, 3, 39)), np.zeros((2, 3, 3, 39))
    for number, (phones, starts, _) in enumerate(utterances):
        features = torch.from_numpy(corpus.features(number, 0).astype(np.float32))
        normal = UtteranceCmvn()(features[None], torch.tensor([len(features)]))[0].numpy()
        num_outputs = len(normal) // 3
        cepstra = np.zeros((num_outputs, 13))
        for output in range(num_outputs):
            energies = sum(normal[3 * output + i] for i in range(3)) / 3
            for c in range(13):
                cosines = np.array([np.cos(np.pi / 6 * (k + 0.5) * c) for k in range(6)])
                cepstra[output, c] = np.sqrt(2 / 6) * energies @ cosines
        first = [min(round(start / 0.03), num_outputs - 1) for start in starts]
        for output in range(first[0], num_outputs):
            place = max(i for i, begin in enumerate(first) if begin <= output)
            state = ENTRY if output in first else LOOP
            context = state, phones[place - 1] if place else 0, phones[place]
            neighbors = [cepstra[min(max(output + step, 0), num_outputs - 1)] for step in (-1, 0, 1)]
            count[context] += 1
            total[context] += np.concatenate(neighbors)
            square[context] += np.concatenate(neighbors) ** 2
    assert np.array_equal(found.count, count) and count.sum() == 14 + 13
    np.testing.assert_allclose(found.total, total, atol=1e-4)
    np.testing.assert_allclose(found.square, square, atol=1e-4)


def test_pronunciations_are_scored_by_counts_which_those_of_all_words_smooth() -> None:
    """Of four W, three are A and one is B; that counts like two more of any word. C is no phone of the first text."""
    lexicon = Lexicon({"W": [("A",), ("B",)], "V": [("B", "A")], "RARE": [("A", "A"), ("B", "B")]})
    said = [("W", [3]), ("W V", [0, 1, 0, 2, 1, 0]), ("V W W", [2, 1, 2, 0, 1]), ("W", [0, 1]), ("W", [2])]
    corpus: Any = SimpleNamespace(utterances=[SimpleNamespace(text=text) for text, _ in said])
    alignment = Alignment.from_lists(("SIL", "A", "B", "C"), [(phones, [0.0] * len(phones), 0.0) for _, phones in said])
    scores = pronunciation_scores(corpus, alignment, range(4), lexicon)
    share = np.array([3 + 2 * 4 / 6, 1 + 2 * 2 / 6])
    assert scores.keys() == {"W", "RARE"}
    np.testing.assert_allclose(scores["W"], np.log(share / share[0]))
    np.testing.assert_allclose(scores["RARE"], [0.0, np.log(0.5)])
