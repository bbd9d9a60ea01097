"""Recombination and pruning of candidates in plain torch: grouping by hash, radix selection, beams.

Shapes: K candidates, N streams.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

# torch 1.13.1 warns at each start; the form used here has stayed as it was.
warnings.filterwarnings("ignore", message=r"scatter_reduce\(\) is in beta")

HASH_MULTIPLIERS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x2545F4914F6CDD1D)
"""Odd 63-bit hash multipliers; the compiled backends use them, too."""

NOT_REACHED = torch.iinfo(torch.int64).max
"""The value of unused entries of `recombine`'s table."""

_MAGNITUDE_MASK = 0x7FFFFFFF
_POSITION_MASK = 0xFFFFFFFF
_INFINITE_BITS = 0x7F800000

# The magnitude of a float32 has 31 bits; each round of the radix selection determines some: (shift, width).
_RADIX_ROUNDS = ((20, 11), (10, 10), (0, 10))


def magnitude_bits(score: Tensor) -> Tensor:
    """Integers that order scores of at most 0: the better the score, the smaller the integer; (K,) int64."""
    return score.view(torch.int32).to(torch.int64) & _MAGNITUDE_MASK


def group(key: Tensor, second_key: Tensor | None = None) -> Tensor:
    """For each key the position of one that equals it, the same for all that are equal; (K,) int64.

    A hash table without chains: all keys write their positions and read back what is left there. Where that is the
    position of another key, they have collided and try again with another multiplier. At least one key is done in each
    round, so the loop ends.

    Args:
        key: (K,) int64.
        second_key: (K,) int64, a second part of the key, or None.
    """
    num_slots = 1 << max(4, (8 * len(key)).bit_length())
    table = torch.empty(num_slots, dtype=torch.int64, device=key.device)
    pending = torch.arange(len(key), device=key.device)
    representative = pending
    for round_idx in range(len(key) + 1):
        multiplier = HASH_MULTIPLIERS[round_idx % len(HASH_MULTIPLIERS)] + 2 * (round_idx // len(HASH_MULTIPLIERS))
        pending_key = key if round_idx == 0 else key.index_select(0, pending)
        slot = pending_key * multiplier
        if second_key is not None:
            pending_second = second_key if round_idx == 0 else second_key.index_select(0, pending)
            slot ^= slot >> 32
            slot += pending_second
            slot *= multiplier
        slot ^= slot >> 32
        slot *= multiplier
        slot = (slot >> 24) & (num_slots - 1)
        table.scatter_(0, slot, pending)
        found = table.index_select(0, slot)
        differs = key.index_select(0, found) != pending_key
        if second_key is not None:
            differs |= second_key.index_select(0, found) != pending_second
        representative = found if round_idx == 0 else representative.index_copy_(0, pending, found)
        collided = differs.nonzero().squeeze(1)
        if not len(collided):
            break
        pending = pending.index_select(0, collided)
    return representative


def recombine(key: Tensor, score: Tensor, second_key: Tensor | None = None, table: Tensor | None = None) -> Tensor:
    """Finds, for each candidate, the best one with the same key; the first of equal scores.

    Args:
        key: (K,) int64.
        score: (K,) float32, at most 0.
        second_key: (K,) int64, a second part of the key, or None.
        table: one entry for each possible key, all `NOT_REACHED` before and after; None for keys of any size.

    Returns:
        The position of each candidate's winner, (K,) int64; a candidate has won if this is its own position.
    """
    packed = magnitude_bits(score)
    packed <<= 32
    packed += torch.arange(len(key), device=key.device)
    if table is None:
        slot = group(key, second_key)
        best = torch.full_like(key, NOT_REACHED)
    else:
        slot, best = key, table
    best.scatter_reduce_(0, slot, packed, "amin")
    winner = best.index_select(0, slot)
    winner &= _POSITION_MASK
    if table is not None:
        table.index_fill_(0, slot, NOT_REACHED)
    return winner


def best_of_group(key: Tensor, score: Tensor, num_kept: int) -> Tensor:
    """Marks the `num_kept` best candidates of each key, the first ones of equal scores; (K,) bool.

    Args:
        key: (K,) int64.
        score: (K,) float32, at most 0.
        num_kept: how many are marked.
    """
    representative = group(key)
    order = torch.sort((representative << 32) + magnitude_bits(score), stable=True).indices
    owner = representative.index_select(0, order)
    position = torch.arange(len(key), device=key.device)
    starts = torch.ones_like(owner, dtype=torch.bool)
    starts[1:] = owner[1:] != owner[:-1]
    rank = position - torch.where(starts, position, torch.zeros_like(position)).cummax(0).values
    return torch.empty_like(starts).index_copy_(0, order, rank < num_kept)


def kth_best_score(score: Tensor, stream: Tensor, num_streams: int, k: int) -> Tensor:
    """The k-th best score of each stream, by radix selection; -inf for streams with fewer scores.

    Args:
        score: (K,) float32, at most 0.
        stream: (K,) int64 in [0, num_streams).
        num_streams: N.
        k: at least 1.

    Returns:
        (N,) float32.
    """
    bits = magnitude_bits(score)
    wanted = torch.full((num_streams, 1), k, dtype=torch.int64, device=score.device)
    prefix = torch.zeros(num_streams, dtype=torch.int64, device=score.device)
    candidate: Tensor | None = None
    enough = torch.ones(num_streams, dtype=torch.bool, device=score.device)
    for shift, width in _RADIX_ROUNDS:
        num_buckets = 1 << width
        bucket = stream * num_buckets + ((bits >> shift) & (num_buckets - 1))
        if candidate is not None:
            bucket = torch.where(candidate, bucket, num_streams * num_buckets)
        histogram = torch.bincount(bucket, minlength=num_streams * num_buckets + 1)[:-1].view(num_streams, num_buckets)
        cumulative = histogram.cumsum(1)
        reached = cumulative >= wanted
        enough &= reached[:, -1]
        chosen = reached.to(torch.int8).argmax(1, keepdim=True)
        wanted = wanted - (cumulative - histogram).gather(1, chosen)
        prefix = (prefix << width) + chosen.squeeze(1)
        candidate = (bits >> shift) == prefix.index_select(0, stream)
    prefix = torch.where(enough, prefix, _INFINITE_BITS)
    return -(prefix.to(torch.int32).view(torch.float32))


def prune_tokens(
    score: Tensor, stream: Tensor, num_streams: int, beam: float, min_active: int, max_active: int | None
) -> Tensor:
    """The positions of the candidates that survive, ascending; (K',) int64.

    Args:
        score: (K,) float32 relative to the best of the stream, at most 0; -inf never survives.
        stream: (K,) int64.
        num_streams: N.
        beam: candidates whose score is this far below the best are pruned.
        min_active: minimum number of candidates of each stream that survive, even outside the beam.
        max_active: maximum number of candidates of each stream, except for ties; None for no limit.
    """
    kept = score >= -beam if beam < torch.inf else score > -torch.inf
    position = kept.nonzero().squeeze(1)
    if num_streams == 1:
        too_few, most = len(position) < min(min_active, len(score)), len(position)
    else:
        count = torch.bincount(stream.index_select(0, position), minlength=num_streams)
        available = torch.bincount(stream, minlength=num_streams).clamp(max=min_active)
        too_few, most = bool((count < available).any()), int(count.max()) if num_streams else 0
    if too_few:
        threshold = kth_best_score(score, stream, num_streams, min_active).clamp(max=-beam)
        kept = (score >= threshold.index_select(0, stream)) & (score > -torch.inf)
        position = kept.nonzero().squeeze(1)
    if max_active is not None and most > max_active:
        score, stream = score.index_select(0, position), stream.index_select(0, position)
        threshold = kth_best_score(score, stream, num_streams, max_active)
        position = position.masked_select(score >= threshold.index_select(0, stream))
    return position
