"""Recombines: of all candidates with equal stream, state and history the best one stays, of equals the first.

A hash table without stored keys: a slot holds the position of some candidate, whose key is the slot's. Who finds a slot
empty takes it by compare-and-swap, who finds another key goes on to the next one. Which of several equal candidates
takes a slot is left to chance, but not which one wins it: that is the smallest (score, position), packed into 64 bits.

Shapes: A candidates, of which the first `num_candidates` are there, N streams, B lanes of a tile, M slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asr.decoding.gpu.by_stream import add_count, mark_range

EMPTY = tl.constexpr(-1)
UNBEATEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def enter(
    stream: tl.tensor,
    state: tl.tensor,
    context_idx: tl.tensor,
    score: tl.tensor,
    num_candidates: tl.tensor,
    capacity: tl.tensor,
    owner: tl.tensor,
    best: tl.tensor,
    slot: tl.tensor,
    last_slot: tl.tensor,
    HAS_CONTEXT: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Gives each candidate its slot.

    Args:
        stream, state, context_idx, score: (A,); context_idx is not read unless HAS_CONTEXT.
        num_candidates: (1,), and capacity, A: what is behind it is left out.
        owner: (M,) int32, EMPTY, and best (M,) int64, UNBEATEN; filled.
        slot: (A,) int32, written.
        last_slot: M - 1; M is a power of 2.
        B: at least the threads of a program.
    """
    total = tl.minimum(tl.load(num_candidates), capacity)
    first = tl.program_id(0) * B
    if first >= total:
        return
    # Lanes behind the last candidate do what the last one does: it changes nothing.
    position = tl.minimum(first + tl.arange(0, B), total - 1).to(tl.int32)
    own_stream, own_state = tl.load(stream + position), tl.load(state + position)
    mixed = own_state.to(tl.int64) * 0x1E3779B97F4A7C15 + own_stream.to(tl.int64) * 0x3F58476D1CE4E5B9
    if HAS_CONTEXT:
        own_context = tl.load(context_idx + position)
        mixed ^= own_context * 0x14D049BB133111EB
    mixed ^= mixed >> 31
    mixed *= 0x2545F4914F6CDD1D
    own_slot = ((mixed >> 24) & last_slot).to(tl.int32)
    is_pending = tl.full([B], 1, tl.int1)
    while tl.max(is_pending.to(tl.int32), 0) > 0:
        # A settled lane finds its slot taken, and leaves it so.
        holder = tl.atomic_cas(owner + own_slot, tl.full([B], EMPTY, tl.int32), position)
        other = tl.where(holder < 0, position, holder)
        is_equal = (tl.load(stream + other) == own_stream) & (tl.load(state + other) == own_state)
        if HAS_CONTEXT:
            is_equal &= tl.load(context_idx + other) == own_context
        is_pending = is_pending & (is_equal == 0)
        own_slot = tl.where(is_pending, (own_slot + 1) & last_slot, own_slot).to(tl.int32)
    bits = tl.load(score + position).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_min(best + own_slot, (bits.to(tl.int64) << 32) | position.to(tl.int64))
    tl.store(slot + position, own_slot)


@triton.jit
def settle(
    stream: tl.tensor,
    score: tl.tensor,
    num_candidates: tl.tensor,
    capacity: tl.tensor,
    best: tl.tensor,
    slot: tl.tensor,
    winner: tl.tensor,
    value: tl.tensor,
    num_inside: tl.tensor,
    range_begin: tl.tensor,
    range_end: tl.tensor,
    beam: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Who wins, and how many winners of each stream are inside the beam.

    Args:
        stream, score: (A,); num_candidates (1,), capacity A.
        best, slot: as `enter` left them.
        winner: (A,) int32, the position of the winner, written.
        value: (A,) float32, written: the scores of winners, -inf for all others.
        num_inside, range_begin, range_end: (N,) int32, all 0, filled.
    """
    total = tl.minimum(tl.load(num_candidates), capacity)
    first = tl.program_id(0) * B
    if first >= total:
        return
    position = first + tl.arange(0, B)
    is_valid = position < total
    own = tl.load(stream + position, mask=is_valid, other=0).to(tl.int32)
    before = tl.load(stream + position - 1, mask=is_valid & (position > 0), other=-1).to(tl.int32)
    mark_range(range_begin, range_end, own, before, position, total)
    own_slot = tl.load(slot + position, mask=is_valid, other=0)
    own_winner = (tl.load(best + own_slot, mask=is_valid, other=0) & 0xFFFFFFFF).to(tl.int32)
    own_value = tl.load(score + position, mask=is_valid, other=float("-inf"))
    own_value = tl.where(own_winner == position, own_value, float("-inf"))
    tl.store(winner + position, own_winner, mask=is_valid)
    tl.store(value + position, own_value, mask=is_valid)
    add_count(num_inside, own, is_valid & (own_value >= -beam) & (own_value > float("-inf")))


@triton.jit
def leave(
    num_candidates: tl.tensor, capacity: tl.tensor, owner: tl.tensor, best: tl.tensor, slot: tl.tensor, B: tl.constexpr
) -> None:
    """Empties the slots that were taken."""
    total = tl.minimum(tl.load(num_candidates), capacity)
    first = tl.program_id(0) * B
    if first >= total:
        return
    position = first + tl.arange(0, B)
    is_valid = position < total
    own_slot = tl.load(slot + position, mask=is_valid, other=0)
    tl.store(owner + own_slot, tl.full([B], EMPTY, tl.int32), mask=is_valid)
    tl.store(best + own_slot, tl.full([B], UNBEATEN, tl.int64), mask=is_valid)
