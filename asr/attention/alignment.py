"""Times of tokens from the attention of a decoder.

Each frame belongs to one token, tokens follow one another, and the sum of the frames' weights for their tokens is as
large as possible: dynamic time warping over cross-attention weights, as in Whisper (Radford et al., Robust speech
recognition via large-scale weak supervision, 2022, and its implementation).

Shapes: H heads, U tokens, T frames.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asr.fusion.interface import FloatArray, IntArray


def token_spans(weight: Tensor) -> tuple[IntArray, IntArray]:
    """The first frame of each token and the one after its last, (U,) each.

    Args:
        weight: (H, U + 1, T), of each head, for each token and the end of the text.
    """
    num_tokens, num_frames = weight.shape[1] - 1, weight.shape[2]
    if num_tokens >= num_frames:
        return evenly(num_tokens, num_frames)
    # Frames to which all tokens attend alike, such as the first, say nothing.
    mean, deviation = weight.mean(1, keepdim=True), weight.std(1, keepdim=True, unbiased=False)
    fit = ((weight - mean) / (deviation + torch.finfo(weight.dtype).eps)).mean(0)
    begin = best_path(fit.double().cpu().numpy())
    return begin[:-1], begin[1:]


def best_path(fit: FloatArray) -> IntArray:
    """The first frame of each row, (R,), given how well rows and frames fit, (R, T); each row has a frame or more."""
    num_rows, num_frames = fit.shape
    total = np.full(num_rows, -np.inf)
    total[0] = fit[0, 0]
    moves = np.zeros((num_frames, num_rows), dtype=bool)
    for frame in range(1, num_frames):
        from_before = np.concatenate([[-np.inf], total[:-1]])
        moves[frame] = from_before > total
        total = np.maximum(total, from_before) + fit[:, frame]
    begin = np.zeros(num_rows, dtype=np.int64)
    row = num_rows - 1
    for frame in range(num_frames - 1, 0, -1):
        if moves[frame, row]:
            begin[row] = frame
            row -= 1
    return begin


def evenly(num_tokens: int, num_frames: int) -> tuple[IntArray, IntArray]:
    """Spans of equal length, for lack of better ones."""
    bound = np.arange(num_tokens + 1) * num_frames // max(1, num_tokens)
    return bound[:-1], bound[1:]
