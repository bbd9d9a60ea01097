"""Checks of frame log-probabilities before a search, and blank skipping.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from asr.errors import AsrError

# In the place of -inf in sums; many of them together are still finite in float32.
_LOW = -1e20


def check_chunks(streams: Sequence[int], num_frames: Tensor) -> None:
    """Checks that each of some streams gets one chunk; num_frames (N,).

    Raises:
        AsrError: a stream is named twice, or there are more or fewer chunks than streams.
    """
    if len(set(streams)) != len(streams) or len(streams) != len(num_frames):
        raise AsrError(f"streams {list(streams)} with {len(num_frames)} chunks: give each stream one chunk.")


def whole(log_prob: Tensor, num_frames: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, T, C) that take no gradient, and the number of their frames (N,); all of them if None."""
    if num_frames is None:
        num_frames = torch.full(log_prob.shape[:1], log_prob.shape[1] if log_prob.dim() > 1 else 0, dtype=torch.int64)
    return log_prob.detach(), num_frames


def check_log_prob(log_prob: Tensor, num_frames: Tensor, num_tokens: int) -> None:
    """Checks that log-probabilities can be searched.

    Args:
        log_prob: (N, T, C).
        num_frames: (N,).
        num_tokens: the graph's C.

    Raises:
        AsrError: wrong number of dimensions or columns, frame counts that do not fit, NaN or +inf in a used frame.
    """
    if log_prob.dim() != 3 or num_frames.shape != log_prob.shape[:1]:
        raise AsrError(
            f"log-probabilities of shape {tuple(log_prob.shape)} with frame counts of shape "
            f"{tuple(num_frames.shape)}: give (utterances, frames, tokens) and (utterances,)."
        )
    if log_prob.shape[2] != num_tokens:
        raise AsrError(
            f"the log-probabilities have {log_prob.shape[2]} columns but the graph was built for {num_tokens} tokens; "
            "use the graph that belongs to this acoustic model."
        )
    if not len(num_frames):
        return
    # Read together, so that a GPU is waited for once.
    facts = torch.stack([num_frames.min(), num_frames.max(), _are_finite(log_prob).to(num_frames)])
    low, high, are_finite = facts.tolist()
    if low < 0 or high > log_prob.shape[1]:
        raise AsrError(
            f"frame counts run from {low} to {high} but the log-probabilities have {log_prob.shape[1]} frames."
        )
    if not are_finite:
        _refuse_numbers(log_prob, num_frames)


def check_numbers(log_prob: Tensor, num_frames: Tensor) -> None:
    """Checks that there is neither NaN nor +inf in frames that are used; -inf is a probability of 0.

    Args:
        log_prob: (N, T, C).
        num_frames: (N,).

    Raises:
        AsrError: there is; the sentence says where.
    """
    if not bool(_are_finite(log_prob)):
        _refuse_numbers(log_prob, num_frames)


def _are_finite(log_prob: Tensor) -> Tensor:
    """Whether there is neither NaN nor +inf anywhere, in one pass: either would make the sum one."""
    return torch.isfinite(log_prob.clamp(min=_LOW).sum())


def _refuse_numbers(log_prob: Tensor, num_frames: Tensor) -> None:
    """Raises AsrError if what is not finite is in frames that are used."""
    bad = torch.isnan(log_prob) | (log_prob == torch.inf)
    used = torch.arange(log_prob.shape[1], device=log_prob.device) < num_frames.to(log_prob.device).unsqueeze(1)
    where = (bad.any(2) & used).nonzero()
    if len(where):
        utt_idx, frame = where[0].tolist()
        raise AsrError(
            f"utterance {utt_idx}, frame {frame}: the acoustic model gave NaN or infinity instead of a "
            "log-probability; check its input and its weights."
        )


def skip_blanks(
    log_prob: Tensor, num_frames: Tensor, threshold: float, after_blank: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keeps only the first frame of each run of frames whose blank (token 0) is more probable than `threshold`.

    Args:
        log_prob: (N, T, C).
        num_frames: (N,) int64.
        threshold: a probability.
        after_blank: (N,) bool, whether the frame before the first was such a frame; None for no.

    Returns:
        log_prob (N, T', C), num_frames (N,), frame (N, T') int64, the original frame of each kept one, and after_blank
        (N,) bool for the next chunk.
    """
    num_utts, max_frames, num_tokens = log_prob.shape
    used = torch.arange(max_frames, device=log_prob.device) < num_frames.unsqueeze(1)
    if after_blank is None:
        after_blank = torch.zeros(num_utts, dtype=torch.bool, device=log_prob.device)
    blank = log_prob[:, :, 0] > math.log(threshold)
    with_before = torch.cat([after_blank.unsqueeze(1), blank], dim=1)
    kept = used & ~(blank & with_before[:, :-1])
    num_kept = kept.sum(1)
    # A stable sort brings the kept frames to the front in their order.
    longest = int(num_kept.max()) if num_utts else 0
    frame = torch.sort((~kept).to(torch.int8), dim=1, stable=True).indices[:, :longest]
    short = log_prob.gather(1, frame.unsqueeze(2).expand(-1, -1, num_tokens))
    return short, num_kept, frame, with_before.gather(1, num_frames.unsqueeze(1)).squeeze(1)
