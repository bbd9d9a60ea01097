"""The normaliser of scores over the whole vocabulary: log of the sum of exp(row . hidden + bias + MaxEnt).

Shapes: Q queries, H hidden, M history words, R history lengths, V vocabulary, P tiles of it, W the MaxEnt table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr.lm.compiled_loop import loop_for
from asr.lm.rnn.maxent import HashedMaxEnt, add_score_range
from asr.lm.rnn.tile_kernel import COLUMNS, ROWS, add_products, as_float32, exponential
from asr.lm.threads import in_threads
from asr.text.vocabulary import BOS_ID, EPSILON_ID

Precision = Literal["float32", "bfloat16"]

# Sums over the vocabulary are made in blocks that stay in a CPU's cache.
_QUERIES_AT_ONCE = 256
_WORDS_AT_ONCE = 4096
TILE = 12 * COLUMNS
_MUCH = 1e18  # of exponentials: far from float32's end, and far from where the smaller ones would be lost
# The compiled loop wants the word vectors in tiles, words along rows; to lay them out so costs this many queries.
_QUERIES_WORTH_TILES = 512


def exact_log_z(
    hidden: Tensor, history: Tensor, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None,
    precision: Precision = "float32",
) -> Tensor:  # fmt: skip
    """log of the sum of exp(row . hidden + bias + MaxEnt) over all words that can be predicted, (Q,).

    hidden (Q, H), history (Q, M), rows (V, H), bias (V,). Not differentiable. With "bfloat16" rows and hidden are
    rounded to it and MaxEnt weights to float16, all else stays float32: twice as fast for many queries where the
    processor multiplies bfloat16, slower elsewhere.
    """
    with torch.no_grad():
        hidden, rows, bias = hidden.detach(), rows.detach(), bias.detach()
        loop = _loop_for(hidden, precision) if len(hidden) >= _QUERIES_WORTH_TILES else None
        if loop is None:
            return log_z_by_tensors(hidden, history, rows, bias, maxent, precision)
        return log_z_by_loop(hidden, history, rows, bias, maxent, loop, precision)


def _loop_for(hidden: Tensor, precision: Precision) -> Callable[..., None] | None:
    loop = loop_for(add_exponentials, hidden)
    if loop is not None and precision == "bfloat16":
        from asr.lm.rnn.register_block import has_instruction

        return loop if has_instruction("avx512bf16") else None
    return loop


def log_z_by_tensors(
    hidden: Tensor, history: Tensor, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None,
    precision: Precision = "float32",
) -> Tensor:  # fmt: skip
    """`exact_log_z` on any device."""
    log_z = hidden.new_full((len(hidden),), -torch.inf)
    weight = None if maxent is None else maxent.weight.detach()
    if precision == "bfloat16":
        hidden, rows = hidden.bfloat16().float(), rows.bfloat16().float()
        weight = None if weight is None else weight.half().float()
    never_predicted = torch.tensor([EPSILON_ID, BOS_ID], device=hidden.device)
    for begin in range(0, len(hidden), _QUERIES_AT_ONCE):
        part = slice(begin, begin + _QUERIES_AT_ONCE)
        places = None if maxent is None else maxent.places(history[part])
        for first in range(0, len(rows), _WORDS_AT_ONCE):
            words = slice(first, min(first + _WORDS_AT_ONCE, len(rows)))
            scores = F.linear(hidden[part], rows[words], bias[words])
            if places is not None and weight is not None:
                add_score_range(scores, weight, places, words.start)
            if first == 0:
                scores.index_fill_(1, never_predicted, -torch.inf)
            log_z[part] = torch.logaddexp(log_z[part], scores.logsumexp(dim=1))
    return log_z


def log_z_by_loop(
    hidden: Tensor, history: Tensor, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None,
    loop: Callable[..., None], precision: Precision = "float32",
) -> Tensor:  # fmt: skip
    """`exact_log_z` by the compiled loop: scores never leave the nearest cache."""
    num_queries, num_words = len(hidden), len(rows)
    places, weight = history.new_zeros(num_queries, 0), hidden.new_zeros(0)
    order = torch.arange(num_queries)
    if maxent is not None:
        # A tile may reach beyond the last word.
        places, weight = maxent.places(history), F.pad(maxent.weight.detach(), (0, TILE))
        # Histories that end alike one after the other: the second finds its features in the cache.
        for column in places[:, :2].t().flip(0):
            order = order[column[order].argsort(stable=True)]
    if precision == "bfloat16":
        hidden, rows, weight = _bfloat16_pairs(hidden), _bfloat16_pairs(rows), weight.half().view(torch.int16)
    padding = -num_words % TILE
    bias = F.pad(bias, (0, padding), value=-torch.inf)
    bias[[EPSILON_ID, BOS_ID]] = -torch.inf
    tiles = F.pad(rows, (0, 0, 0, padding)).view(-1, TILE, rows.shape[1]).transpose(1, 2).contiguous()
    hidden = F.pad(hidden[order], (0, 0, 0, -num_queries % ROWS))
    places = torch.cat((places[order], places.new_zeros(-num_queries % ROWS, places.shape[1])))
    top = bias.new_empty(len(hidden))
    total = torch.zeros(len(hidden), dtype=torch.float64)

    def work(begin: int, end: int) -> None:
        part = slice(ROWS * begin, ROWS * end)
        arrays = (
            hidden[part], places[part], tiles, bias.view(-1, TILE), weight, bias.new_empty(ROWS, TILE),
            top[part], total[part],
        )  # fmt: skip
        loop(*(array.numpy() for array in arrays))

    in_threads(work, len(hidden) // ROWS, rows_at_least=8)
    log_z = bias.new_empty(num_queries)
    log_z[order] = (top + total.log()).float()[:num_queries]
    return log_z


def _bfloat16_pairs(numbers: Tensor) -> Tensor:
    """(N, H) -> (N, H / 2) int32, each two numbers side by side, a zero after an odd last one."""
    return F.pad(numbers, (0, numbers.shape[1] % 2)).bfloat16().contiguous().view(torch.int32)


def add_exponentials(
    hidden: Any, places: Any, tiles: Any, bias: Any, weight: Any, scores: Any, top: Any, total: Any
) -> None:
    """Adds exp(score - top) of all words to total (Q,); top (Q,) becomes one of the larger scores. For `compiled_loop`.

    hidden (Q, H), places (Q, R), tiles (P, H, TILE), bias (P, TILE), weight (W,); scores (ROWS, TILE) is room to work
    in. Q is a multiple of ROWS. hidden and tiles may be pairs of bfloat16, weight the bits of float16.
    """
    for tile in range(tiles.shape[0]):
        first = tile * TILE
        for begin in range(0, hidden.shape[0], ROWS):
            for i in range(ROWS):
                score = scores[i]
                for v in range(TILE):
                    score[v] = bias[tile, v]
                for length in range(places.shape[1]):
                    features = weight[places[begin + i, length] + first :]
                    for v in range(TILE):
                        score[v] += as_float32(features[v])
            add_products(scores, hidden[begin : begin + ROWS], tiles[tile])
            for i in range(ROWS):
                query = begin + i
                score = scores[i]
                if tile == 0:
                    top[query] = _largest(score)
                part = _sum_of_exponentials(score, top[query])
                if part > _MUCH:
                    largest = _largest(score)
                    total[query] *= math.exp(top[query] - largest)
                    top[query] = largest
                    part = _sum_of_exponentials(score, largest)
                total[query] += part


def _sum_of_exponentials(score: Any, top: Any) -> Any:
    total = np.float32(0.0)
    for v in range(TILE):
        total += exponential(score[v] - top)
    return total


def _largest(score: Any) -> Any:
    largest = score[0]
    for v in range(1, TILE):
        largest = max(largest, score[v])
    return largest
