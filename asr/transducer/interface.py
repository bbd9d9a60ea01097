"""The interface of a transducer's decoder: scales, beams and limits."""

from __future__ import annotations

from dataclasses import dataclass

from asr.fusion.interface import FusionConfig


@dataclass(frozen=True)
class TransducerDecodingConfig(FusionConfig):
    """Scales and beams, and as for `asr.fusion.interface.FusionConfig`; the internal scores are without the blank.

    Args:
        max_symbols_per_frame: the most tokens in one frame. Durations of 0 count as the same frame.

    Raises:
        AsrError: a value is out of range.
    """

    max_symbols_per_frame: int = 5

    WHOLE_NUMBERS = ("beam_size", "max_symbols_per_frame")
