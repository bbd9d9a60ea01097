"""What a training objective must offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Objective(Protocol):
    """A loss for each utterance from frame log-probabilities and token sequences."""

    def prepare(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Sees the training transcripts once before the first step; most objectives need nothing of them."""

    def __call__(self, log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
        """The loss of each utterance, (N,) float32, lower is better; 0 where no alignment is possible.

        Args:
            log_prob: (N, T, C) natural log, blank at 0.
            num_frames: (N,) int64.
            tokens: (N, U) int64, padded with 0.
            num_tokens: (N,) int64.
        """
        ...
