"""The beams of a frame as the kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from asr.decoding.options import DecodingOptions

# More than the rounding of a difference of two scores can be.
_SLACK = 0.01
# Without a language model several candidates may recombine into one.
_RECOMBINED = 8
NO_LIMIT = 0x7FFFFFFF


class FrameLimits:
    """What survives a frame.

    Args:
        options: beams.
        has_lm: whether a language model takes part.
        device: where the search runs.
        block: candidates of a program; on a GPU at least its threads, 128.
    """

    def __init__(self, options: DecodingOptions, has_lm: bool, device: torch.device, block: int = 256) -> None:
        self.beam = options.search_beam
        self.word_beam = options.word_beam if has_lm and options.word_beam is not None else float("inf")
        self.min_active = options.min_active_states
        self.max_active = options.max_active_states
        self.enough_inside = _RECOMBINED * options.min_active_states
        self.has_lm = has_lm
        self.block = block
        self.selection_block = 2 * block

        def scalar(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float32, device=device)

        self.reach_score, self.lowest_score = scalar(-options.search_beam - _SLACK), scalar(-torch.inf)
