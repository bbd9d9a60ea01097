"""The exact cut-off: the worst score that survives in each stream, by radix selection, one program a stream.

A program counts how many scores of its stream have each value of their highest eight bits, takes the bucket in which
the wanted one lies, and counts the next bits inside it: four rounds settle them all.

Shapes: A candidates, N streams, B lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NUM_BUCKETS = tl.constexpr(256)


@triton.jit
def _count_buckets(
    score: tl.tensor, begin: tl.tensor, end: tl.tensor, prefix: tl.tensor, shift: tl.tensor, B: tl.constexpr
) -> tl.tensor:
    """How many scores with these highest bits have each value of the eight bits behind them, (256,) int32."""
    histogram = tl.zeros([_NUM_BUCKETS], tl.int32)
    first = begin
    while first < end:
        position = first + tl.arange(0, B)
        is_valid = position < end
        bits = tl.load(score + position, mask=is_valid, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        is_counted = is_valid & (((bits >> 8) >> shift) == prefix)
        histogram += tl.histogram(tl.where(is_counted, (bits >> shift) & 0xFF, 0), _NUM_BUCKETS)
        # Lanes that do not count stood in the first bucket.
        num_others = B - tl.sum(is_counted.to(tl.int32), 0)
        histogram -= tl.where(tl.arange(0, _NUM_BUCKETS) == 0, num_others, 0)
        first += B
    return histogram


@triton.jit
def _kth_best(score: tl.tensor, begin: tl.tensor, end: tl.tensor, k: tl.tensor, B: tl.constexpr) -> tl.tensor:
    """The k-th best of scores of at most 0, of which there are at least k; their magnitudes are ordered as integers."""
    prefix = begin * 0
    wanted = k
    shift = begin * 0 + 24
    while shift >= 0:
        cumulative = tl.cumsum(_count_buckets(score, begin, end, prefix, shift, B), 0)
        is_before = cumulative < wanted
        prefix = (prefix << 8) + tl.sum(is_before.to(tl.int32), 0)
        wanted -= tl.max(tl.where(is_before, cumulative, 0), 0)
        shift -= 8
    return -prefix.to(tl.float32, bitcast=True)


@triton.jit
def cut_off(
    score: tl.tensor,
    range_begin: tl.tensor,
    range_end: tl.tensor,
    num_inside: tl.tensor,
    threshold: tl.tensor,
    beam: tl.tensor,
    min_active: tl.tensor,
    max_active: tl.tensor,
    B: tl.constexpr,
) -> None:
    """threshold (N,) float32: the worst score that survives, -inf where all that are possible do.

    Args:
        score: (A,) float32, at most 0, -inf where impossible.
        range_begin, range_end: (N,) int32, where each stream stands in it.
        num_inside: (N,) int32, how many are inside the beam.
        beam: what is worse by more than this goes.
        min_active: so many survive outside the beam too.
        max_active: so many at most, ties excepted.
    """
    stream = tl.program_id(0)
    begin = tl.load(range_begin + stream)
    end = tl.load(range_end + stream)
    inside = tl.load(num_inside + stream)
    is_too_few = inside < min_active
    wanted = tl.where(is_too_few, min_active, max_active).to(tl.int32)
    worst = -beam
    if is_too_few | (inside > max_active):
        kth = float("-inf")
        if end - begin >= wanted:
            kth = _kth_best(score, begin, end, wanted, B)
        worst = tl.where(is_too_few, tl.minimum(worst, kth), tl.maximum(worst, kth))
    tl.store(threshold + stream, worst)
