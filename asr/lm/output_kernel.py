"""What output layers do most when they score on a CPU, as loops compiled by numba where it is installed.

The tensor forms in `HuffmanOutput` and `HashedMaxEnt` give the same but for rounding, on any device, and carry
gradients; these loops keep a query's sums in registers instead of writing every product to memory.

Shapes: Q queries, H hidden, V words or nodes, R history lengths, W the MaxEnt table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor


@functools.cache
def compiled_loops() -> tuple[Callable[..., None], Callable[..., None]] | None:
    """`add_path_log_prob` and `add_slices` compiled, or None where numba is missing."""
    try:
        import numba
    except ImportError:
        return None
    # Sums may be reordered: only so does the compiler use vector instructions for them.
    compiled = numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
    return compiled(add_path_log_prob), compiled(add_slices)


def loops_for(tensor: Tensor) -> tuple[Callable[..., None], Callable[..., None]] | None:
    """The compiled loops if they serve for float32 tensors where this one lies and nobody asks for a gradient."""
    if tensor.device.type != "cpu" or tensor.requires_grad:
        return None
    return compiled_loops()


def add_path_log_prob(
    hidden: Any, places: Any, word_id: Any, path_begin: Any, path_node: Any, path_sign: Any,
    rows: Any, bias: Any, weight: Any, log_prob: Any,
) -> None:  # fmt: skip
    """Adds log P of each word by the decisions on its path: hidden (Q, H), places (Q, R), word_id, log_prob (Q,),
    rows (V, H), bias (V,), weight (W,); a word's path is path_begin[word] .. path_begin[word + 1] - 1."""
    size, num_places = hidden.shape[1], places.shape[1]
    for query in range(len(word_id)):
        word = word_id[query]
        # Of the product of all 1 + exp(-+logit) one logarithm is taken, before it overflows more than one.
        total, product = 0.0, 1.0
        for at in range(path_begin[word], path_begin[word + 1]):
            node = path_node[at]
            logit = bias[node]
            for i in range(size):
                logit += hidden[query, i] * rows[node, i]
            for i in range(num_places):
                logit += weight[places[query, i] + node]
            against = -path_sign[at] * logit
            if against > 30.0:
                total += against
            else:
                product *= 1.0 + math.exp(against)
            if product > 1e250:
                total += math.log(product)
                product = 1.0
        log_prob[query] -= total + math.log(product)


def add_slices(scores: Any, weight: Any, places: Any, begin: int) -> None:
    """scores (Q, K) += weight of the words begin .. begin + K - 1 after the histories at places (Q, R)."""
    for query in range(scores.shape[0]):
        for i in range(places.shape[1]):
            first = places[query, i] + begin
            for column in range(scores.shape[1]):
                scores[query, column] += weight[first + column]
