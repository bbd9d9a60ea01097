"""Best token of each frame, with repeats and blanks taken out."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy_tokens(log_prob: Tensor, num_frames: Tensor) -> list[list[int]]:
    """log_prob (N, T, C), num_frames (N,) -> the token ids of each utterance."""
    best = log_prob.argmax(dim=-1)
    sequences: list[list[int]] = []
    for frames, count in zip(best, num_frames.tolist(), strict=True):
        merged = torch.unique_consecutive(frames[:count])
        sequences.append(merged[merged != 0].tolist())
    return sequences
