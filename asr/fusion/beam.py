"""What each step of a beam search does with language models: extended hypotheses are scored, and the best ones stay.

Shapes: M hypotheses of all utterances, Q extensions of hypotheses by a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.ctc.prefix_beam import ask, ask_final
from asr.fusion.interface import FloatArray, FusionConfig, IntArray
from asr.fusion.scores import NO_WORD, TextScores
from asr.lm.interface import LanguageModel

CANDIDATES = 2
"""Of each utterance's extensions, so many times the beam size are scored by the language model."""


class Growing(NamedTuple):
    """Hypotheses that may be extended; each (M,).

    Attributes:
        utt: the utterance.
        place: as for `asr.fusion.scores.Extension`.
        context: the language model's.
        bonus: all that is added to the acoustic score for good.
    """

    utt: IntArray
    place: IntArray
    context: IntArray
    bonus: FloatArray


class Extended(NamedTuple):
    """The extensions that survive.

    Attributes:
        kept: which of the given extensions they are, in their order.
        place, context, bonus: as for `Growing`.
        lm_score: what the language model adds, unscaled.
        guess: as for `asr.fusion.scores.Extension`.
        lost, lost_total: which others the language model has scored, and their totals.
    """

    kept: IntArray
    place: IntArray
    context: IntArray
    bonus: FloatArray
    lm_score: FloatArray
    guess: FloatArray
    lost: IntArray
    lost_total: FloatArray


class Fusion:
    """Scores and selects hypotheses.

    Args:
        scores: what texts gain.
        config: scales and beams.
        lm: the language model, or None.
    """

    def __init__(self, scores: TextScores, config: FusionConfig, lm: LanguageModel | None) -> None:
        self._scores, self._config, self._lm = scores, config, lm

    def start(self, num_utts: int) -> IntArray:
        """The language model's contexts before the first word."""
        context: IntArray = np.zeros(num_utts, dtype=np.int64)
        return context if self._lm is None else self._lm.start(num_utts).cpu().numpy()

    def extend(
        self,
        base: Growing,
        entry: IntArray,
        am_score: FloatArray,
        gain: FloatArray | None = None,
        others: Sequence[tuple[IntArray, FloatArray]] = (),
    ) -> Extended:
        """Extends hypotheses by tokens, and keeps the best of each utterance.

        Args:
            base: the hypothesis of each extension, (Q,) each.
            entry: (Q,) tokens, entries of `CTCTokens.table`.
            am_score: (Q,) the network's scores of the extended hypotheses.
            gain: (Q,) added for good, or None.
            others: utterances and totals of hypotheses that have a place in the beam already.
        """
        place, word, own_gain, guess = self._scores.extended(base.place, entry)
        bonus = base.bonus + own_gain + (0.0 if gain is None else gain)
        size = int(self._config.beam_size)
        kept = self.best(base.utt, am_score + bonus + guess, CANDIDATES * size, others)
        lm_score, context = self._asked(base.context[kept], word[kept])
        bonus = bonus[kept] + self._scaled(lm_score)
        total = am_score[kept] + bonus + guess[kept]
        best = self.best(base.utt[kept], total, size, others)
        is_lost = np.ones(len(kept), dtype=bool)
        is_lost[best] = False
        lost = kept[is_lost], total[is_lost]
        kept, context, bonus, lm_score = kept[best], context[best], bonus[best], lm_score[best]
        return Extended(kept, place[kept], context, bonus, lm_score, guess[kept], *lost)

    def finish(self, place: IntArray, context: IntArray) -> tuple[FloatArray, FloatArray]:
        """Ends texts (Q,) -> what the language model adds, unscaled, and all that is added."""
        word, gain = self._scores.finished(place)
        lm_score, context = self._asked(context, word)
        if self._lm is not None and len(place):
            lm_score = lm_score + ask_final(self._lm, torch.from_numpy(context))
        return lm_score, gain + self._scaled(lm_score)

    def retain(self, context: IntArray) -> None:
        """Lets the language model forget all contexts but some."""
        if self._lm is not None:
            self._lm.retain(torch.from_numpy(context))

    def best(
        self, utt: IntArray, total: FloatArray, num: int, others: Sequence[tuple[IntArray, FloatArray]] = ()
    ) -> IntArray:
        """Of some hypotheses (M,), the places of the `num` best ones of each utterance that are within the beam.

        Others count, too: utterances and totals of hypotheses that were kept before.
        """
        all_utts = np.concatenate([utt, *(each for each, _ in others)])
        all_totals = np.concatenate([total, *(each for _, each in others)])
        order = np.lexsort((-all_totals, all_utts))
        utts, totals = all_utts[order], all_totals[order]
        first = np.searchsorted(utts, utts)  # of the same utterance
        is_kept = (totals >= totals[first] - self._config.search_beam) & (totals > -np.inf)
        kept = order[is_kept & (np.arange(len(order)) - first < num)]
        return np.sort(kept[kept < len(utt)])

    def _asked(self, context: IntArray, word: IntArray) -> tuple[FloatArray, IntArray]:
        """The language model's scores (Q,) and next contexts (Q,); 0 and the same context where it is not asked."""
        score, context = np.zeros(len(word)), context.copy()
        asked = np.flatnonzero(word != NO_WORD)
        if self._lm is not None and len(asked):
            found = ask(self._lm, torch.from_numpy(context[asked]), torch.from_numpy(word[asked]))
            score[asked], context[asked] = found
        return score, context

    def _scaled(self, lm_score: FloatArray) -> FloatArray:
        # 0 times -inf would be NaN.
        return self._config.lm_scale * lm_score if self._config.lm_scale else np.zeros_like(lm_score)


def on_host(values: Tensor) -> FloatArray:
    """Numbers on any device as an array."""
    found: FloatArray = values.cpu().numpy().astype(np.float64)
    return found
