"""The interface of a transducer's decoder: scales, beams and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asr.ctc.interface import require_number
from asr.errors import AsrError


@dataclass(frozen=True)
class TransducerDecodingConfig:
    """Scales and beams. A hypothesis' score, higher is better, is

        score = am_score + lm_scale * lm_score - internal_lm_scale * internal score
                + word_insertion_penalty * number of words + spelling_penalty * number of unlisted words

    with natural logs throughout. Without words and language models of words, tokens take the place of words.

    Args:
        beam_size: number of hypotheses that survive a frame.
        search_beam: a hypothesis is pruned if its score is this far below the best one of its frame.
        max_symbols_per_frame: the most tokens in one frame. Durations of 0 count as the same frame.
        token_min_log_prob: tokens with a lower log-probability are not followed.
        lm_scale: weight of the language model.
        internal_lm_scale: weight of the network's internal language model, which is subtracted: the scores of the joint
            network for an encoder output of zeros, without the blank (Variani et al., Hybrid autoregressive transducer,
            ICASSP 2020; Meng et al., Internal language model estimation for domain-adaptive end-to-end speech
            recognition, SLT 2021). 0 subtracts nothing, with which language models tend to delete words; None is 0.2
            with a language model, else 0.
        word_insertion_penalty: added for each word; negative values give fewer words.
        spelling_penalty: added for each word that is not listed; -inf allows listed words only. Such words have the
            language model's score of `<unk>`, if there is a language model.

    Raises:
        AsrError: a value is out of range.
    """

    beam_size: int = 8
    search_beam: float = 16.0
    max_symbols_per_frame: int = 5
    token_min_log_prob: float = -8.0
    lm_scale: float = 0.35
    internal_lm_scale: float | None = None
    word_insertion_penalty: float = 0.0
    spelling_penalty: float = -5.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (name == "internal_lm_scale" and value is None):
                require_number(f"decoding: {name}", value)
        for name in ("beam_size", "max_symbols_per_frame"):
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
