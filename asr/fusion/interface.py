"""What the decoders of transducers and of attention models have in common: scales, beams and hypotheses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from asr.ctc.interface import require_number
from asr.errors import AsrError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Total = TypeVar("Total", float, FloatArray)
LEAST_LOG_WEIGHT = -8.0
"""Hypotheses with less weight when they leave the beam do not count, natural log."""


class Pruned(NamedTuple):
    """Hypotheses that left the beam, as nodes of a tree of tokens.

    Attributes:
        parent, entry: what each node extends, a node or -1, and by which token, an entry of `CTCTokens.table`.
        node: (M,) the node that each hypothesis is at.
        next_entry: (M,) a token that it has besides, or -1.
        log_weight: (M,) its weight at that time, relative to a finished hypothesis, natural log.
    """

    parent: Sequence[int]
    entry: Sequence[int]
    node: Sequence[int]
    next_entry: Sequence[int]
    log_weight: Sequence[float]


class Finished(NamedTuple):
    """A sequence of tokens that an utterance may be.

    Attributes:
        entries: its tokens, entries of `CTCTokens.table`.
        begin, end: the first frame of each token, and the one after its last.
        am_score: of the network, natural log.
        lm_score: language model score, unscaled.
        total: the scaled sum, with all that texts gain.
        pruned: finds the others that left the beam, if the search has kept them.
    """

    entries: IntArray
    begin: IntArray
    end: IntArray
    am_score: float
    lm_score: float
    total: float
    pruned: Callable[[], Pruned] | None = None


@dataclass(frozen=True)
class FusionConfig:
    """Scales and beams. A hypothesis' score, higher is better, is

        score = am_score + lm_scale * lm_score - internal_lm_scale * internal score
                + word_insertion_penalty * number of words + spelling_penalty * number of unlisted words

    with natural logs throughout. Without words and language models of words, tokens take the place of words.

    Args:
        beam_size: number of hypotheses that survive a step.
        search_beam: a hypothesis is pruned if its score is more than this below the best one of its step.
        token_min_log_prob: tokens with a lower log-probability are not followed.
        lm_scale: weight of the language model.
        internal_lm_scale: weight of the network's internal language model, which is subtracted: its scores of tokens
            for an encoder output of zeros (Variani et al., Hybrid autoregressive transducer, ICASSP 2020; Meng et al.,
            Internal language model estimation for domain-adaptive end-to-end speech recognition, SLT 2021). 0 subtracts
            nothing, with which language models tend to delete words; None is 0.2 with a language model, else 0.
        word_insertion_penalty: added for each word; negative values give fewer words.
        spelling_penalty: added for each word that is not listed; -inf allows listed words only. Such words have the
            language model's score of `<unk>`, if there is a language model.
        plain_words: whether the listed words are found in any letter case and with any punctuation, as in `Hello,` for
            `hello`. None is True if all of them are in one letter case and have no punctuation, unlike the tokens.

    Raises:
        AsrError: a value is out of range.
    """

    beam_size: int = 8
    search_beam: float = 16.0
    token_min_log_prob: float = -8.0
    lm_scale: float = 0.35
    internal_lm_scale: float | None = None
    word_insertion_penalty: float = 0.0
    spelling_penalty: float = -5.0
    plain_words: bool | None = None

    WHOLE_NUMBERS: ClassVar[Sequence[str]] = ("beam_size",)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and name != "plain_words":
                require_number(f"decoding: {name}", value)
        if self.plain_words not in (None, True, False):
            raise AsrError(f"decoding: plain_words is {self.plain_words!r}; it must be True, False or None.")
        for name in self.WHOLE_NUMBERS:
            value = getattr(self, name)
            if not 1 <= value < 2**31 or value % 1 != 0:
                raise AsrError(f"decoding: {name} is {value}; it must be a whole number of 1 or more, below 2^31.")
        for name in ("lm_scale", "internal_lm_scale"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise AsrError(f"decoding: {name} is {value}; it must be 0 or more.")
        if not self.search_beam > 0.0:
            raise AsrError(f"decoding: search_beam is {self.search_beam}; it must be greater than 0.")
        if not self.token_min_log_prob < 0.0:
            raise AsrError(f"decoding: token_min_log_prob is {self.token_min_log_prob}; it must be below 0.")
        if not math.isfinite(self.word_insertion_penalty):
            raise AsrError(f"decoding: word_insertion_penalty is {self.word_insertion_penalty}; it must be finite.")
        if self.spelling_penalty == math.inf:
            raise AsrError("decoding: spelling_penalty is inf; it must be a number, or -inf for listed words only.")

    def rank(self, total: Total, num_tokens: int) -> Total:
        """What texts with some total and number of tokens are compared by."""
        return total
