"""Where a frame's tokens are cut off: beam, and exactly so many at least and at most.

Shapes: K tokens, N utterances.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.decoding.search.token_step import magnitude_bits

_RADIX_SHIFTS = ((20, 11), (10, 10), (0, 10))
_INFINITE_BITS = 0x7F800000


def best_score(score: Tensor, utt_idx: Tensor, num_utts: int) -> Tensor:
    """The best score of each utterance, (N,), -inf where it has no token."""
    best = torch.full((num_utts,), -torch.inf, device=score.device)
    if num_utts == 1:
        return score.amax(0, keepdim=True) if len(score) else best
    return best.scatter_reduce_(0, utt_idx, score, "amax", include_self=True)


def kth_best_score(score: Tensor, utt_idx: Tensor, num_utts: int, k: int) -> Tensor:
    """The k-th best score of each utterance, by radix selection; -inf where it has fewer.

    Args:
        score: (K,) float32, at most 0.
        utt_idx: (K,) int64 in [0, num_utts).
        num_utts: N.
        k: at least 1.

    Returns:
        (N,) float32.
    """
    bits = magnitude_bits(score)
    wanted = torch.full((num_utts, 1), k, dtype=torch.int64, device=score.device)
    prefix = torch.zeros(num_utts, dtype=torch.int64, device=score.device)
    candidate: Tensor | None = None
    enough = torch.ones(num_utts, dtype=torch.bool, device=score.device)
    for shift, width in _RADIX_SHIFTS:
        num_buckets = 1 << width
        bucket = utt_idx * num_buckets + ((bits >> shift) & (num_buckets - 1))
        if candidate is not None:
            bucket = torch.where(candidate, bucket, num_utts * num_buckets)
        histogram = torch.bincount(bucket, minlength=num_utts * num_buckets + 1)[:-1].view(num_utts, num_buckets)
        cumulative = histogram.cumsum(1)
        reached = cumulative >= wanted
        enough &= reached[:, -1]
        chosen = reached.to(torch.int8).argmax(1, keepdim=True)
        wanted = wanted - (cumulative - histogram).gather(1, chosen)
        prefix = (prefix << width) + chosen.squeeze(1)
        candidate = (bits >> shift) == prefix.index_select(0, utt_idx)
    prefix = torch.where(enough, prefix, _INFINITE_BITS)
    return -(prefix.to(torch.int32).view(torch.float32))


def survivors(
    score: Tensor, utt_idx: Tensor, num_utts: int, beam: float, min_active: int, max_active: int | None
) -> Tensor:
    """The tokens that survive a frame, in their order; (K',) int64 positions.

    Args:
        score: (K,) float32 relative to the best of the utterance, at most 0; -inf never survives.
        utt_idx: (K,) int64.
        num_utts: N.
        beam: below the best.
        min_active: so many survive outside the beam too.
        max_active: so many at most, ties excepted; None for no limit.
    """
    kept = score >= -beam if beam < torch.inf else score > -torch.inf
    position = kept.nonzero().squeeze(1)
    if num_utts == 1:
        too_few, most = len(position) < min(min_active, len(score)), len(position)
    else:
        count = torch.bincount(utt_idx.index_select(0, position), minlength=num_utts)
        available = torch.bincount(utt_idx, minlength=num_utts).clamp(max=min_active)
        too_few, most = bool((count < available).any()), int(count.max()) if num_utts else 0
    if too_few:
        threshold = kth_best_score(score, utt_idx, num_utts, min_active).clamp(max=-beam)
        kept = (score >= threshold.index_select(0, utt_idx)) & (score > -torch.inf)
        position = kept.nonzero().squeeze(1)
    if max_active is not None and most > max_active:
        score, utt_idx = score.index_select(0, position), utt_idx.index_select(0, position)
        threshold = kth_best_score(score, utt_idx, num_utts, max_active)
        position = position.masked_select(score >= threshold.index_select(0, utt_idx))
    return position
