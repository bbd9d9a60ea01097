"""Adapts graphs and log-probabilities to letter-based networks with a word boundary symbol.

Lexicons spell a word with one boundary at its end. Networks may output several in a row, also before the first word,
and may omit the last one. The graph therefore reads any number of boundaries wherever one is allowed, and each
utterance gets an additional last frame that can only be read as a boundary, at no cost.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from asr.graph.fst import GraphArrays, Words


def add_boundary_loops(graph: GraphArrays, boundary: int) -> GraphArrays:
    """Lets a graph without epsilons read any number of boundaries at its start and after each boundary."""
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
    """Appends a frame to each utterance in which only the boundary can be read, at no cost.

    Args:
        log_prob: (N, T, C) natural logs.
        num_frames: (N,) int64.
        boundary: column of the boundary; None adds no frame.

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
