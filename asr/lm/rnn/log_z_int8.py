"""log Z of many queries from rough scores of all words, and exact ones of those that carry its mass.

Rough scores are products of 8-bit integers. What they are off by hardly shows in a sum of thousands of small terms; a
word that has a larger share of the sum is scored again in float32.

Shapes: Q queries, H hidden, M history words, R history lengths, V vocabulary, P tiles of it, W the MaxEnt table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr.lm.compiled_loop import Intrinsic
from asr.lm.rnn.maxent import HashedMaxEnt, add_score_range
from asr.lm.rnn.tile_kernel import ROWS, add_features, add_products, ask_for_features, exponential, sum_exponentials
from asr.lm.rnn.tile_queries import TILE, log_sums, of_tiles, tiled

EXACT_SHARE = 1 / 256  # of the sum so far: words of more are scored again
_LARGEST = 127
_UNSIGNED = 128  # added to hidden numbers: the instruction multiplies unsigned numbers by signed ones
_QUERIES_AT_ONCE = 256
_BITS = 64

bits_above: Any = Intrinsic("asr.lm.rnn.register_block", "bits_above")
lowest_bit: Any = Intrinsic("asr.lm.rnn.register_block", "lowest_bit")


class Int8LogZ:
    """log Z from rough and exact scores, for which the tables are rounded and laid out once.

    A word's vector and a hidden vector are rounded to 255 steps of their own, MaxEnt weights to 255 steps of the table.

    Args:
        rows, bias: (V, H) and (V,), -inf for what is never predicted.
        maxent: n-gram features, or none.
        loop: `add_exponentials`, compiled, where the processor has the instruction; or tensor operations do it, slowly.
    """

    def __init__(
        self, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None, loop: Callable[..., None] | None
    ) -> None:
        self._rows, self._bias, self._maxent, self._loop = rows, bias, maxent, loop
        self._weight = bias.new_zeros(0) if maxent is None else maxent.weight.detach()
        self._word_step, rounded = _rounded(rows)
        feature_step, (features,) = _rounded(self._weight[None])
        if loop is None:
            self._rounded_rows, self._rough_weight = rounded, features * feature_step
            return
        # A tile may reach beyond the last word.
        self._tables = (
            tiled(_quads(rounded.char())), of_tiles((-_UNSIGNED * rounded.sum(dim=1)).int()),
            of_tiles(self._word_step), of_tiles(bias, -math.inf), F.pad(features.char(), (0, TILE)),
            np.float32(feature_step.item()), rows.contiguous(), self._weight,
        )  # fmt: skip

    def __call__(self, hidden: Tensor, history: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M) -> (Q,)."""
        step, rounded = _rounded(hidden)
        if self._loop is None:
            parts = zip(*(tensor.split(_QUERIES_AT_ONCE) for tensor in (hidden, step, rounded, history)), strict=True)
            return torch.cat([self._by_tensors(*part) for part in parts])
        queries = _quads((rounded + _UNSIGNED).byte()), step, hidden
        rooms = ((ROWS, TILE), torch.int32), ((TILE,), torch.float32), ((TILE,), torch.float32)
        return log_sums(self._loop, queries, history, self._maxent, self._tables, rooms)

    def _by_tensors(self, hidden: Tensor, step: Tensor, rounded: Tensor, history: Tensor) -> Tensor:
        log_z = hidden.new_full((len(hidden),), -torch.inf)
        places = None if self._maxent is None else self._maxent.places(history)
        for first in range(0, len(self._rows), TILE):
            words = slice(first, min(first + TILE, len(self._rows)))
            rough = F.linear(rounded, self._rounded_rows[words]) * self._word_step[words] * step[:, None]
            rough += self._bias[words]
            exact = F.linear(hidden, self._rows[words], self._bias[words])
            if places is not None:
                add_score_range(rough, self._rough_weight, places, first)
                add_score_range(exact, self._weight, places, first)
            limit = torch.logaddexp(log_z, rough.logsumexp(dim=1)) + math.log(EXACT_SHARE)
            scores = torch.where(rough > limit[:, None], exact, rough)
            log_z = torch.logaddexp(log_z, scores.logsumexp(dim=1))
        return log_z


def _rounded(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """numbers (N, K) -> the step of each row (N,), and whole numbers of -127 to 127 of it (N, K)."""
    largest = numbers.abs().amax(dim=1) if numbers.numel() else numbers.new_zeros(len(numbers))
    step = largest.clamp(min=torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
    return step, (numbers / step[:, None]).round_()


def _quads(numbers: Tensor) -> Tensor:
    """(N, K) of 8 bits -> (N, K / 4) int32, each four numbers side by side, zeros after the last ones."""
    return F.pad(numbers, (0, -numbers.shape[1] % 4)).contiguous().view(torch.int32)


def add_exponentials(
    rounded: Any, step: Any, hidden: Any, places: Any, tiles: Any, offset: Any, word_step: Any, bias: Any,
    features: Any, feature_step: Any, rows: Any, weight: Any, products: Any, score: Any, powers: Any,
    top: Any, total: Any,
) -> None:  # fmt: skip
    """Adds exp(score - top) of all words to total (Q,); top (Q,), at first -inf, becomes one of the larger scores.

    rounded (Q, H / 4) fours of unsigned bytes, step (Q,), hidden (Q, H), places (Q, R); tiles (P, H / 4, TILE) fours of
    signed bytes, offset, what makes up for the unsigned, word_step and bias (P, TILE), features (W,) int8, rows (V, H),
    weight (W,). Room to work in: products (ROWS, TILE), score and powers (TILE,). Q is a multiple of ROWS.
    """
    for tile in range(tiles.shape[0]):
        first = tile * TILE
        added = features[first:]
        for begin in range(0, rounded.shape[0], ROWS):
            for i in range(ROWS):
                product = products[i]
                for v in range(TILE):
                    product[v] = offset[tile, v]
            add_products(products, rounded[begin : begin + ROWS], tiles[tile])
            for i in range(ROWS):
                query = begin + i
                if query + ROWS < len(step):
                    ask_for_features(added, places[query + ROWS], TILE)
                product, factor = products[i], step[query]
                for v in range(TILE):
                    score[v] = np.float32(product[v]) * (factor * word_step[tile, v]) + bias[tile, v]
                add_features(score, added, places[query], feature_step)
                part = sum_exponentials(powers, score, query, top, total)
                limit = np.float32(EXACT_SHARE * (total[query] + part))
                for at in range(0, TILE, _BITS):
                    bits = bits_above(powers, at, limit)
                    while bits:
                        v = at + lowest_bit(bits)
                        bits &= bits - 1
                        word = first + v
                        exact = bias[tile, v] + _score(hidden[query], rows[word], places[query], weight[word:])
                        part += exponential(exact - top[query]) - powers[v]
                total[query] += part


def _score(hidden: Any, row: Any, places: Any, weight: Any) -> Any:
    """hidden, row (H,), places (R,), weight from the word's on -> row . hidden + MaxEnt."""
    total = np.float32(0.0)
    for k in range(len(hidden)):
        total += hidden[k] * row[k]
    for length in range(len(places)):
        total += weight[places[length]]
    return total
