"""A first guess of the alignment, which gets training past CTC's all-blank plateau.

A network that starts with CTC first learns to say blank everywhere and needs a thousand steps and more to leave that.
As GMM systems do in their flat start, the first steps here take every utterance's tokens as spread evenly over its
speech, silence being blank, and train on frame cross-entropy; CTC then finds the real alignment within few steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# The label of frames that are no training examples.
IGNORED = -100


def even_alignment(
    features: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor, max_frames: int, threshold: float = 0.35
) -> Tensor:
    """A token id for each output frame, blank in silence, -100 in padding; (N, T') int64.

    Speech is where the mean of the log filterbanks lies above `threshold` of the way from the utterance's quiet frames
    (5 % quantile) to its loud ones (95 %).

    Args:
        features: (N, T, F) log filterbanks.
        num_frames: (N,) output frames, of T'.
        tokens: (N, U) padded with 0.
        num_tokens: (N,).
        max_frames: T'.
        threshold: see above.
    """
    level = F.adaptive_avg_pool1d(features.float().mean(-1)[:, None], max_frames)[:, 0]  # (N, T')
    alignment = torch.full(level.shape, IGNORED, dtype=torch.int64, device=features.device)
    for i, (frames, count) in enumerate(zip(num_frames.tolist(), num_tokens.tolist(), strict=True)):
        own = level[i, :frames]
        if not frames or not count:
            continue
        quiet, loud = own.quantile(0.05), own.quantile(0.95)
        speech = (own > quiet + threshold * (loud - quiet)).nonzero()[:, 0]
        alignment[i, :frames] = 0
        position = torch.arange(len(speech), device=features.device) * count // max(1, len(speech))
        alignment[i, speech] = tokens[i, position]
    return alignment


def frame_cross_entropy(log_prob: Tensor, alignment: Tensor, log_prior: Tensor | None = None) -> Tensor:
    """Mean over real frames of minus their token's log-probability, ().

    Args:
        log_prob: (N, T', C).
        alignment: (N, T') int64.
        log_prior: (C,) how frequent each token's frames are. With it `log_prob` learns posterior over prior, but for a
            constant: what a search takes from hybrid systems, so that frequent tokens are not counted twice.
    """
    if log_prior is not None:
        log_prob = (log_prob + log_prior).log_softmax(-1)
    return F.nll_loss(log_prob.flatten(0, 1), alignment.flatten(), ignore_index=IGNORED)
