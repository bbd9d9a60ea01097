"""The best score of each state of a lattice, over all frames in one launch, with one program per utterance.

Shapes: N utterances, T frames, S states, A arcs, B lanes of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asr.decoding.lattice import stable_order

_LANES = 128


@triton.jit(do_not_specialize=["num_frames"])
def raise_scores(
    begin: tl.tensor,
    order: tl.tensor,
    arc_begin: tl.tensor,
    other: tl.tensor,
    arc_total: tl.tensor,
    score: tl.tensor,
    num_frames: tl.tensor,
    IS_BACKWARD: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """Raises score (S,) float64 to the best over each state's arcs, frame by frame.

    Args:
        begin: (N * T + 1,) int64, where the states of each utterance and frame begin in order (S,) int64.
        arc_begin: (S + 1,) int64, where the arcs of each state begin.
        other: (A,) int64, the state at the other end of each arc; arc_total (A,) float64.
        num_frames: T.
        IS_BACKWARD: whether the last frame comes first.
    """
    first = tl.program_id(0).to(tl.int64) * num_frames
    step = 0
    while step < num_frames:
        frame = step
        if IS_BACKWARD:
            frame = num_frames - 1 - step
        at = tl.load(begin + first + frame)
        end = tl.load(begin + first + frame + 1)
        while at < end:
            lane = at + tl.arange(0, B)
            state = tl.load(order + lane, mask=lane < end, other=0)
            arc = tl.load(arc_begin + state, mask=lane < end, other=0)
            arc_end = tl.load(arc_begin + state + 1, mask=lane < end, other=0)
            best = tl.load(score + state, mask=lane < end, other=0.0)
            while tl.max(arc_end - arc, 0) > 0:
                is_arc = arc < arc_end
                there = tl.load(other + arc, mask=is_arc, other=0)
                through = tl.load(score + there, mask=is_arc, other=float("-inf"))
                through += tl.load(arc_total + arc, mask=is_arc, other=0.0)
                best = tl.maximum(best, through)
                arc += 1
            tl.store(score + state, best, mask=lane < end)
            at += B
        # All lanes see the scores of a frame before they read them from the next one.
        tl.debug_barrier()
        step += 1


def raised(
    score: Tensor, states: tuple[Tensor, Tensor, int, int], arcs: tuple[Tensor, Tensor, Tensor], is_backward: bool
) -> Tensor:
    """Raises score (S,) float64 in place to the best over each state's arcs, and returns it.

    Args:
        score: the scores before.
        states: utterance and frame of each state (S,), and the numbers of utterances N and frames T.
        arcs: for each arc (A,) the state whose score it raises, the state at its other end, and its score, float64.
        is_backward: whether arcs lead from later frames to earlier ones.
    """
    utt_idx, frame, num_utts, num_frames = states
    own, other, arc_total = arcs
    order, begin = stable_order(utt_idx * num_frames + frame, num_utts * num_frames)
    arc, arc_begin = stable_order(own, len(score))
    with torch.cuda.device_of(score):
        raise_scores[(num_utts,)](
            *(begin, order, arc_begin, other.index_select(0, arc), arc_total.index_select(0, arc), score, num_frames),
            IS_BACKWARD=is_backward,
            B=_LANES,
        )
    return score
