"""Walks back over all frames of a search in one launch: best paths, ancestors, and losses of backpointers.

Shapes: K tokens, N streams, R backpointers, L losing arcs, T blocks of backpointers, B lanes of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asr.decoding.lattice import stable_order

# Few lanes: each waits for its own chain of loads, and programs can wait in parallel.
_LANES = 128


@triton.jit(do_not_specialize=["num_streams", "num_blocks"])
def trace_back(
    backpointer: tl.tensor,
    num_streams: tl.tensor,
    previous: tl.tensor,
    arc: tl.tensor,
    num_blocks: tl.tensor,
    table: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Fills table (T, N) int64, initially -1, from its last row up with the arcs that lead to backpointer (N,)."""
    stream = tl.program_id(0) * B + tl.arange(0, B)
    own = tl.load(backpointer + stream, mask=stream < num_streams, other=-1)
    row = num_blocks - 1
    while (row >= 0) & (tl.max(own, 0) >= 0):
        goes_on = own >= 0
        tl.store(table + row * num_streams + stream, tl.load(arc + own, mask=goes_on, other=-1), mask=goes_on)
        own = tl.load(previous + own, mask=goes_on, other=-1)
        row -= 1


def arcs_of_paths(backpointer: Tensor, previous: Tensor, arc: Tensor, num_blocks: int) -> Tensor:
    """The arcs (T, N) of the paths that end at backpointer (N,), -1 before they begin.

    Args:
        previous, arc: (R,) int64.
        num_blocks: T, the maximum number of arcs of a path.
    """
    table = torch.full((num_blocks, len(backpointer)), -1, dtype=torch.int64, device=arc.device)
    if num_blocks and len(backpointer):
        with torch.cuda.device_of(arc):
            trace_back[(triton.cdiv(len(backpointer), _LANES),)](
                backpointer.contiguous(), len(backpointer), previous, arc, num_blocks, table, B=_LANES
            )
    return table


@triton.jit(do_not_specialize=["num_living"])
def mark_ancestors(
    living: tl.tensor, num_living: tl.tensor, previous: tl.tensor, kept: tl.tensor, B: tl.constexpr
) -> None:
    """Sets kept (R,) int32 to 1 at living (K,), of which -1 is none, and at all their ancestors.

    A lane stops where another one was before it. If it does not see this yet, it only repeats the other's work.
    """
    position = tl.program_id(0) * B + tl.arange(0, B)
    own = tl.load(living + position, mask=position < num_living, other=-1)
    while tl.max(own, 0) >= 0:
        is_new = (own >= 0) & (tl.load(kept + own, mask=own >= 0, other=1) == 0)
        tl.store(kept + own, 1, mask=is_new)
        own = tl.where(is_new, tl.load(previous + own, mask=is_new, other=-1), -1)


def ancestors(living: Tensor, previous: Tensor) -> Tensor:
    """Which backpointers are living (K,), of which -1 is none, or ancestors of these, (R,) bool."""
    kept = torch.zeros(len(previous), dtype=torch.int32, device=previous.device)
    if len(living):
        with torch.cuda.device_of(previous):
            mark_ancestors[(triton.cdiv(len(living), _LANES),)](
                living.contiguous(), len(living), previous, kept, B=_LANES
            )
    return kept > 0


@triton.jit(do_not_specialize=["num_blocks"])
def lower_losses(
    begin: tl.tensor,
    order: tl.tensor,
    previous: tl.tensor,
    losing_begin: tl.tensor,
    losing_order: tl.tensor,
    src: tl.tensor,
    dst: tl.tensor,
    score_gap: tl.tensor,
    loss: tl.tensor,
    loss_bits: tl.tensor,
    num_blocks: tl.tensor,
    B: tl.constexpr,
) -> None:
    """Lowers loss (R,) float32 to the least of all paths from a backpointer to a living one; a program per stream.

    Args:
        begin: (N * T + 1,) int64, where each stream's blocks begin in order (R,) int64.
        previous: (R,) int64, -1 at a start.
        losing_begin, losing_order: the same for the blocks that losing arcs lead to, (N * T + 1,) and (L,).
        src, dst: (L,) int64, src -1 at a start; score_gap (L,) float32.
        loss, loss_bits: the same memory, as float32 and int32. Losses are not negative, so that their bits are ordered.
    """
    first = tl.program_id(0).to(tl.int64) * num_blocks
    block = num_blocks - 1
    while block >= 0:
        at = tl.load(losing_begin + first + block)
        end = tl.load(losing_begin + first + block + 1)
        while at < end:
            lane = at + tl.arange(0, B)
            arc = tl.load(losing_order + lane, mask=lane < end, other=0)
            before = tl.load(src + arc, mask=lane < end, other=-1)
            won = tl.load(dst + arc, mask=before >= 0, other=0)
            lost = tl.load(loss + won, mask=before >= 0, other=0.0) + tl.load(
                score_gap + arc, mask=before >= 0, other=0.0
            )
            tl.atomic_min(loss_bits + before, lost.to(tl.int32, bitcast=True), mask=before >= 0, sem="relaxed")
            at += B
        at = tl.load(begin + first + block)
        end = tl.load(begin + first + block + 1)
        while at < end:
            lane = at + tl.arange(0, B)
            own = tl.load(order + lane, mask=lane < end, other=0)
            before = tl.load(previous + own, mask=lane < end, other=-1)
            lost = tl.load(loss + own, mask=before >= 0, other=0.0)
            tl.atomic_min(loss_bits + before, lost.to(tl.int32, bitcast=True), mask=before >= 0, sem="relaxed")
            at += B
        # All lanes see the losses of a block before they read those of the block before it.
        tl.debug_barrier()
        block -= 1


def losses(
    loss: Tensor,
    block: Tensor,
    utt_idx: Tensor,
    previous: Tensor,
    losing: tuple[Tensor, Tensor, Tensor],
    size: tuple[int, int],
) -> None:
    """Lowers loss (R,) float32, 0 at living backpointers and infinite elsewhere, as `LatticeRecords.collect` needs it.

    Args:
        loss: changed in place.
        block, utt_idx, previous: (R,) of the backpointers; each has a predecessor in an earlier block, or -1.
        losing: src, dst and score_gap (L,) of the losing arcs.
        size: the number of streams N and of blocks T.
    """
    num_utts, num_blocks = size
    src, dst, score_gap = losing
    place = utt_idx * num_blocks + block
    order, begin = stable_order(place, num_utts * num_blocks)
    losing_order, losing_begin = stable_order(place.index_select(0, dst), num_utts * num_blocks)
    with torch.cuda.device_of(loss):
        lower_losses[(num_utts,)](
            *(begin, order, previous, losing_begin, losing_order, src, dst, score_gap),
            *(loss, loss.view(torch.int32), num_blocks),
            B=_LANES,
        )
