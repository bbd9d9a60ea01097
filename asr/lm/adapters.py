"""Language models behind other numbers: contexts numbered densely, words of another vocabulary.

Shapes: Q queries, N streams.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from asr.errors import AsrError
from asr.lm.context_table import ContextTable
from asr.lm.contract import ExpandingLM, LanguageModel, LoopLM, LoopTables
from asr.text.vocabulary import SPECIAL_WORDS, UNK_ID, Vocabulary

_LOGGER = logging.getLogger(__name__)
_FEWEST_TO_FORGET = 1 << 16


@runtime_checkable
class ForgetfulLM(Protocol):
    """A language model that may forget histories, but none that the search still holds."""

    def mark_live(self, context_idx: Tensor) -> None:
        """Declares live the contexts (K,), and those that `score` returns from now on."""


def mark_live(lm: LanguageModel, context_idx: Tensor) -> None:
    """Tells a model that may forget which of its contexts (K,) are still held; others have nothing to be told."""
    if isinstance(lm, ForgetfulLM):
        lm.mark_live(context_idx)


class NumberedLM:
    """Gives the contexts of a model small numbers in the order of their coming, so that they fit 32 bits.

    Args:
        lm: a model with contexts of up to 63 bits.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm
        self._table = ContextTable(lm.start(0).device)
        self._forget_at = _FEWEST_TO_FORGET

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._lm.vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>`, (num_streams,)."""
        return self._table.index_of(self._lm.start(num_streams))

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | history) and the next context, (Q,) each."""
        log_prob, next_idx = self._lm.score(self._table.key_of(context_idx), word_id)
        return log_prob, self._table.index_of(next_idx)

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | history), (Q,)."""
        return self._lm.final(self._table.key_of(context_idx))

    def mark_live(self, context_idx: Tensor) -> None:
        """Passes on which contexts (K,) the search still holds; the numbers of others are given again, now and then."""
        mark_live(self._lm, self._table.key_of(context_idx))
        if context_idx.numel() == 0:
            self._table = ContextTable(context_idx.device)
        elif len(self._table) >= self._forget_at:
            self._table.keep(context_idx)
            self._forget_at = max(_FEWEST_TO_FORGET, 2 * len(self._table))


class MappedLM:
    """A model asked with the word ids of another vocabulary; words it does not have share its `<unk>` evenly.

    Each gets log P(<unk> | history) less the logarithm of their number, so that what the model gives to all words
    together stays one; as history each is `<unk>`.

    Args:
        lm: the model.
        vocabulary: the word ids to answer for.

    `num_unlisted_words` says how many words of the vocabulary the model lacks; a warning is logged for them.

    Raises:
        AsrError: the model has none of the words.
    """

    def __init__(self, lm: LanguageModel, vocabulary: Vocabulary) -> None:
        self._lm = lm
        self._vocabulary = vocabulary
        self._word_map = vocabulary.map_to(lm.vocabulary).to(lm.start(0).device)
        self.num_unlisted_words = num_unlisted_words(lm.vocabulary, vocabulary)
        if self.num_unlisted_words:
            _LOGGER.warning(
                "The language model lacks %d of %d words; they share the probability of its <unk>.",
                self.num_unlisted_words,
                len(vocabulary) - len(SPECIAL_WORDS),
            )
        self._of_loop: tuple[Any, Any] = (None, None)
        self._expand = lm.expand if isinstance(lm, ExpandingLM) else None  # a Protocol takes its time to check
        self._share: Tensor | None = None
        if self.num_unlisted_words > 1:
            self._share = self._word_map.eq(UNK_ID).float() * -math.log(self.num_unlisted_words)
            self._share[: len(SPECIAL_WORDS)] = 0.0

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>`, (num_streams,)."""
        return self._lm.start(num_streams)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | history) and the next context, (Q,) each."""
        log_prob, next_idx = self._lm.score(context_idx, self._word_map[word_id])
        return log_prob if self._share is None else log_prob + self._share[word_id], next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | history), (Q,)."""
        return self._lm.final(context_idx)

    def for_loop(self) -> LoopTables | None:
        """As of the model itself, where its words stand in its list and what is added to their scores being mapped."""
        tables = self._lm.for_loop() if isinstance(self._lm, LoopLM) else None
        if tables is None:
            return None
        word_map, added, model = tables
        share = added if self._share is None else self._share.numpy()
        if self._of_loop[0] is not word_map:
            self._of_loop = word_map, word_map[self._word_map.numpy()]
        return self._of_loop[1], share, model

    def expand(self, context_idx: Tensor, held: Tensor) -> None:
        """Passes on which contexts (K,) a loop will ask, and (H,) holds; see `ExpandingLM`."""
        if self._expand is not None:
            self._expand(context_idx, held)

    def mark_live(self, context_idx: Tensor) -> None:
        """Passes on which contexts (K,) the search still holds."""
        mark_live(self._lm, context_idx)


def num_unlisted_words(model: Vocabulary, words: Vocabulary) -> int:
    """How many of the words a language model with the vocabulary `model` lacks.

    Raises:
        AsrError: it lacks all of them.
    """
    ordinary = words.map_to(model)[len(SPECIAL_WORDS) :]
    num_unlisted = int(ordinary.eq(UNK_ID).sum())
    if 0 < len(ordinary) == num_unlisted:
        raise AsrError(
            f"The language model ({model.words[-1]!r}, ...) has none of the {num_unlisted} words asked for "
            f"({words.words[-1]!r}, ...); check that both are of one language and case."
        )
    return num_unlisted
