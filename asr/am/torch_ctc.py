"""CTC by torch's own kernel: on every stack and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class TorchCtc(nn.Module):
    """Minus the log-likelihood of the tokens, summed over all CTC alignments."""

    def prepare(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Nothing to learn from transcripts."""

    def forward(self, log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
        """log_prob (N, T, C), num_frames (N,), tokens (N, U), num_tokens (N,) -> (N,)."""
        log_prob = log_prob.float().transpose(0, 1)
        return F.ctc_loss(log_prob, tokens, num_frames, num_tokens, reduction="none", zero_infinity=True)
