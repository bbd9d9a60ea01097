"""The normaliser of scores over the whole vocabulary: log of the sum of exp(row . hidden + bias + MaxEnt).

Shapes: Q queries, H hidden, M history words, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from asr.lm.compiled_loop import loop_for
from asr.lm.rnn import log_z_float32, log_z_int8
from asr.lm.rnn.maxent import HashedMaxEnt, add_score_range
from asr.text.vocabulary import BOS_ID, EPSILON_ID

Precision = Literal["float32", "int8"]
LogZ = Callable[[Tensor, Tensor], Tensor]
"""hidden (Q, H), history (Q, M) -> log Z (Q,)."""

# Sums over the vocabulary are made in blocks that stay in a CPU's cache.
_QUERIES_AT_ONCE = 256
_WORDS_AT_ONCE = 4096
# The compiled loops want the word vectors in tiles, words along rows; to lay them out so costs this many queries.
_QUERIES_WORTH_TILES = 512


def log_z_of(rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None, precision: Precision, num_queries: int) -> LogZ:
    """log Z over all words that can be predicted, for about `num_queries` queries in one or more calls.

    rows (V, H), bias (V,); they and the MaxEnt weights stay as they are meanwhile. Not differentiable. "float32" is
    exact; "int8" scores words that carry little of the sum roughly: faster for many queries where the processor
    multiplies 8-bit integers, slower elsewhere.
    """
    rows, bias = rows.detach(), bias.detach().clone()
    bias[[EPSILON_ID, BOS_ID]] = -torch.inf
    loop = _loop_for(rows, precision, num_queries)
    if precision == "int8":
        return _without_gradient(log_z_int8.Int8LogZ(rows, bias, maxent, loop))
    if loop is not None:
        return _without_gradient(log_z_float32.Float32LogZ(rows, bias, maxent, loop))
    return _without_gradient(functools.partial(log_z_by_tensors, rows=rows, bias=bias, maxent=maxent))


def _loop_for(rows: Tensor, precision: Precision, num_queries: int) -> Callable[..., None] | None:
    if precision == "float32":
        return loop_for(log_z_float32.add_exponentials, rows) if num_queries >= _QUERIES_WORTH_TILES else None
    loop = loop_for(log_z_int8.add_exponentials, rows)
    if loop is None:
        return None
    from asr.lm.rnn.register_block import has_instruction

    return loop if has_instruction("avx512vnni") else None


def _without_gradient(log_z: LogZ) -> LogZ:
    def call(hidden: Tensor, history: Tensor) -> Tensor:
        with torch.no_grad():
            return log_z(hidden.detach(), history)

    return call


def log_z_by_tensors(
    hidden: Tensor, history: Tensor, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None
) -> Tensor:
    """log Z (Q,) on any device, of words whose bias (V,) is not -inf."""
    log_z = hidden.new_full((len(hidden),), -torch.inf)
    for begin in range(0, len(hidden), _QUERIES_AT_ONCE):
        part = slice(begin, begin + _QUERIES_AT_ONCE)
        places = None if maxent is None else maxent.places(history[part])
        for first in range(0, len(rows), _WORDS_AT_ONCE):
            words = slice(first, min(first + _WORDS_AT_ONCE, len(rows)))
            scores = F.linear(hidden[part], rows[words], bias[words])
            if places is not None and maxent is not None:
                add_score_range(scores, maxent.weight.detach(), places, first)
            log_z[part] = torch.logaddexp(log_z[part], scores.logsumexp(dim=1))
    return log_z
