"""Networks of letters with a symbol between words: what that asks of a graph, and of the frames that it reads.

Lexicons spell a word with the boundary at its end. Networks write it as often as they like, before the first word too,
and leave it out behind the last one: the graph reads any number of boundaries wherever one may stand, and one more
frame in which it costs nothing ends an utterance.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from asr.graph.fst import GraphArrays, Words


def add_boundary_loops(graph: GraphArrays, boundary: int) -> GraphArrays:
    """Lets the graph read any number of boundary labels at its start and behind each boundary; no epsilons in it."""
    after = graph.label == boundary
    states = np.unique(np.concatenate([[0], graph.dst_state[after]]))
    loops = np.zeros(len(states))
    words = Words.concatenate([graph.words, Words.empty(len(states))])
    return GraphArrays.from_arcs(
        np.concatenate([graph.src_state(), states]),
        np.concatenate([graph.dst_state, states]),
        np.concatenate([graph.label, np.full(len(states), boundary)]),
        np.concatenate([graph.score, loops]),
        words,
        graph.final_score,
    )


def with_last_boundary(log_prob: Tensor, num_frames: Tensor, boundary: int | None) -> tuple[Tensor, Tensor]:
    """One more frame for each utterance, in which nothing but the boundary can be read, at no cost.

    Args:
        log_prob: (N, T, C) natural logs.
        num_frames: (N,) int64.
        boundary: its column; None adds no frame.

    Returns:
        log_prob (N, T + 1, C) and num_frames + 1.
    """
    if boundary is None:
        return log_prob, num_frames
    log_prob = torch.nn.functional.pad(log_prob, (0, 0, 0, 1), value=-math.inf)
    row = torch.arange(len(num_frames), device=log_prob.device)
    last = num_frames.to(log_prob.device)
    log_prob[row, last] = -math.inf
    log_prob[row, last, boundary] = 0.0
    return log_prob, num_frames + 1
