"""Selection of extended hypotheses, by hand."""

from __future__ import annotations

import numpy as np

from asr.fusion.beam import Extended, Fusion, Growing
from asr.fusion.interface import FloatArray, FusionConfig, IntArray
from asr.fusion.scores import NO_WORD, Extension, TextScores


class Guesses(TextScores):
    """A guess for each token, and nothing else.

    Args:
        guess: (C,) of each token.
    """

    def __init__(self, *guess: float) -> None:
        self._guess = np.array(guess)

    def extended(self, place: IntArray, entry: IntArray) -> Extension:
        return Extension(place, np.full(len(entry), NO_WORD), np.zeros(len(entry)), self._guess[entry])

    def finished(self, place: IntArray) -> tuple[IntArray, FloatArray]:
        return np.full(len(place), NO_WORD), np.zeros(len(place))


def extended(am_score: list[float], others: list[float]) -> Extended:
    """Three tokens after the empty text of one utterance, with a beam of one."""
    fusion = Fusion(Guesses(-5.0, -5.0, 0.0), FusionConfig(beam_size=1), None)
    zeros = np.zeros(3, dtype=np.int64)
    totals = np.zeros(len(others), dtype=np.int64), np.array(others)
    return fusion.extend(Growing(zeros, zeros, zeros, np.zeros(3)), np.arange(3), np.array(am_score), None, [totals])


def test_guesses_count_until_words_are_finished() -> None:
    found = extended([-1.0, -1.5, -2.0], [])
    assert (found.kept.tolist(), found.guess.tolist(), found.bonus.tolist()) == ([2], [0.0], [0.0])
    assert (found.lost.tolist(), found.lost_total.tolist()) == ([0], [-6.0])


def test_hypotheses_that_have_a_place_already_count() -> None:
    assert extended([-1.0, -1.5, -2.0], [-2.1]).kept.tolist() == [2]
    assert extended([-1.0, -1.5, -2.0], [-1.9]).kept.tolist() == []


def test_the_best_of_each_utterance_are_kept_in_their_order() -> None:
    fusion = Fusion(Guesses(0.0), FusionConfig(search_beam=2.0), None)
    utt, total = np.array([0, 0, 1, 0, 1, 0]), np.array([-3.0, -1.0, -7.0, -2.0, -9.0, -3.5])
    assert fusion.best(utt, total, 9).tolist() == [0, 1, 2, 3, 4]  # a score may be as far below as the beam
    assert fusion.best(utt, total, 2).tolist() == [1, 2, 3, 4]
