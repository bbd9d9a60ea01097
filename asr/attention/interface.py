"""The interface of an attention model's decoder: scales, beams and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asr.errors import AsrError
from asr.fusion.interface import FusionConfig, Total


@dataclass(frozen=True)
class AttentionDecodingConfig(FusionConfig):
    """Scales and beams, and as for `asr.fusion.interface.FusionConfig`; internal scores include the end of the text.

    Args:
        length_penalty: finished texts are compared by their scores divided by this power of the number of their tokens,
            the end included (Wu et al., Google's neural machine translation system, 2016, without its constant 5). 0
            compares the scores themselves, with which short texts win.
        no_speech_threshold: a text is dropped as invented for silence if the network finds it more probable than this
            that nobody speaks, and the text itself improbable (below -1 for each token), as in Whisper (Radford et al.,
            Robust speech recognition via large-scale weak supervision, ICML 2023). Only networks with a token for
            silence tell. 1 drops none.
        max_tokens_per_second: the most tokens of a text, for each second of its audio; it ends texts that repeat
            themselves.

    Raises:
        AsrError: a value is out of range.
    """

    length_penalty: float = 1.0
    no_speech_threshold: float = 0.6
    max_tokens_per_second: float = 25.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.length_penalty < math.inf:
            raise AsrError(f"decoding: length_penalty is {self.length_penalty}; it must be 0 or more.")
        if not 0.0 <= self.no_speech_threshold <= 1.0:
            raise AsrError(f"decoding: no_speech_threshold is {self.no_speech_threshold}; it must be from 0 to 1.")
        if not self.max_tokens_per_second > 0.0:
            raise AsrError(f"decoding: max_tokens_per_second is {self.max_tokens_per_second}; it must be above 0.")

    def rank(self, total: Total, num_tokens: int) -> Total:
        return total / (num_tokens + 1) ** float(self.length_penalty)
