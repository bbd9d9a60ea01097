"""Pieces that several kernels share: numbers for each stream, gathered from tiles in which streams stand in order.

All lanes of a tile that belong to one stream are reduced first, so that a stream costs a tile one atomic operation.

Shapes: B lanes of a tile, N streams.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095041)
"""`ordered` of minus infinity."""
_NO_STREAM = tl.constexpr(2147483647)


@triton.jit
def ordered(score: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order; atomic operations know integers best."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key: tl.tensor) -> tl.tensor:
    """The way back from `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def raise_to_max(best: tl.tensor, stream: tl.tensor, key: tl.tensor, is_valid: tl.tensor) -> None:
    """best (N,) int32 is raised to the largest key (B,) int32 of each stream (B,) ascending."""
    own = tl.min(tl.where(is_valid, stream, _NO_STREAM), 0)
    last = tl.max(tl.where(is_valid, stream, -1), 0)
    while own <= last:
        tl.atomic_max(best + own, tl.max(tl.where(is_valid & (stream == own), key, LOWEST), 0))
        own += 1


@triton.jit
def add_count(count: tl.tensor, stream: tl.tensor, is_counted: tl.tensor) -> None:
    """count (N,) int32 grows by the counted lanes (B,) of each stream (B,) ascending."""
    own = tl.min(tl.where(is_counted, stream, _NO_STREAM), 0)
    last = tl.max(tl.where(is_counted, stream, -1), 0)
    while own <= last:
        tl.atomic_add(count + own, tl.sum((is_counted & (stream == own)).to(tl.int32), 0))
        own += 1


@triton.jit
def mark_range(
    range_begin: tl.tensor,
    range_end: tl.tensor,
    stream: tl.tensor,
    before: tl.tensor,
    position: tl.tensor,
    total: tl.tensor,
) -> None:
    """Notes where each stream begins and ends among all positions.

    Args:
        range_begin, range_end: (N,) int32, 0 for a stream that does not occur.
        stream: (B,) of each position, ascending; before (B,) of the position before it, -1 at the first.
        position: (B,).
        total: how many there are.
    """
    is_valid = position < total
    differs = is_valid & (stream != before)
    tl.store(range_begin + stream, position.to(tl.int32), mask=differs)
    tl.store(range_end + before, position.to(tl.int32), mask=differs & (before >= 0))
    tl.store(range_end + stream, total.to(tl.int32), mask=position == total - 1)
