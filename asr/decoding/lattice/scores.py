"""Best scores to and from every state of a lattice, pruning, and the best path.

Shapes: N utterances, S states, A arcs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.decoding.lattice.kernel import spread_backward, spread_forward
from asr.decoding.lattice.lattice import Lattice
from asr.decoding.options import DecodingOptions
from asr.lm.compiled_loop import compiled_loop


def best_from_start(lattice: Lattice, arc_total: Tensor) -> Tensor:
    """The best score of any way from the start to each state, (S,) float64; arc_total (A,) float64."""
    score = torch.full((lattice.num_states,), -torch.inf, dtype=torch.float64, device=arc_total.device)
    score[lattice.start_state] = 0.0
    if (loop := _loop_for(spread_forward, score)) is not None:
        loop(*_arrays(lattice, arc_total, score))
        return score
    src_state = lattice.src_state()
    begin = lattice.arc_frame_begin()
    for first, last in itertools.pairwise(begin):
        extended = score.index_select(0, src_state[first:last]) + arc_total[first:last]
        score.scatter_reduce_(0, lattice.dst_state[first:last], extended, "amax", include_self=True)
    return score


def best_to_end(lattice: Lattice, arc_total: Tensor, final_total: Tensor) -> Tensor:
    """The best score of any way from each state to an end, (S,) float64; arc_total (A,), final_total (S,) float64."""
    score = final_total.clone()
    if (loop := _loop_for(spread_backward, score)) is not None:
        loop(*_arrays(lattice, arc_total, score))
        return score
    src_state = lattice.src_state()
    begin = lattice.arc_frame_begin()
    for first, last in reversed(list(itertools.pairwise(begin))):
        extended = score.index_select(0, lattice.dst_state[first:last]) + arc_total[first:last]
        score.scatter_reduce_(0, src_state[first:last], extended, "amax", include_self=True)
    return score


def _loop_for(function: Callable[..., None], score: Tensor) -> Callable[..., None] | None:
    """numba's loop, where it is installed and the lattice is on a CPU; the results are the same."""
    return compiled_loop(function, reorders_sums=False) if score.device.type == "cpu" else None


def _arrays(lattice: Lattice, arc_total: Tensor, score: Tensor) -> list[NDArray[Any]]:
    return [part.numpy() for part in (lattice.arc_begin, lattice.dst_state, arc_total, score)]


def prune(lattice: Lattice, options: DecodingOptions, beam: float) -> Lattice:
    """Drops arcs whose best path is more than `beam` worse than the utterance's best, and states left unused."""
    arc_total = lattice.arc_total(options)
    forward = best_from_start(lattice, arc_total)
    backward = best_to_end(lattice, arc_total, lattice.final_total(options))
    limit = backward[lattice.start_state] - beam
    # Rounding must not cost the best path its arcs.
    limit = limit - 1e-6 * limit.abs().clamp(min=1.0)
    through = forward + backward
    kept_state = (through >= limit[lattice.utt_idx]) & (through > -torch.inf)
    kept_state[lattice.start_state] = True
    src_state = lattice.src_state()
    arc_through = forward[src_state] + arc_total + backward[lattice.dst_state]
    kept_arc = (arc_through >= limit[lattice.utt_idx[src_state]]) & (arc_through > -torch.inf)
    return lattice.select(kept_state, kept_arc)


def best_path(lattice: Lattice, options: DecodingOptions) -> tuple[Tensor, int] | None:
    """The arcs (L,) of the best path of a lattice of one utterance and its last state; None where none ends."""
    arc_total = lattice.arc_total(options)
    backward = best_to_end(lattice, arc_total, lattice.final_total(options)).cpu()
    state = int(lattice.start_state[0])
    if float(backward[state]) == -torch.inf:
        return None
    follow = (arc_total.cpu() + backward[lattice.dst_state.cpu()]).numpy()
    final_total = lattice.final_total(options).cpu().numpy()
    arc_begin, dst_state = lattice.arc_begin.cpu().numpy(), lattice.dst_state.cpu().numpy()
    path: list[int] = []
    while True:
        first, last = int(arc_begin[state]), int(arc_begin[state + 1])
        if first == last or final_total[state] >= follow[first:last].max():
            return torch.tensor(path, dtype=torch.int64, device=arc_total.device), state
        path.append(first + int(follow[first:last].argmax()))
        state = int(dst_state[path[-1]])
