"""Traces back the best paths of all streams in one launch, with one lane per stream.

Shapes: N streams, R backpointers, T blocks of backpointers, B lanes of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
