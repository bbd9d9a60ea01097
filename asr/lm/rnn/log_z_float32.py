"""log Z of many queries by one compiled loop in float32: scores never leave the nearest cache.

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

from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.tile_kernel import MUCH, ROWS, add_features, add_products, ask_for_features, exponential
from asr.lm.rnn.tile_queries import TILE, log_sums, of_tiles, tiled


class Float32LogZ:
    """log Z by the compiled loop, for which the word vectors are laid out once.

    Args:
        rows, bias: (V, H) and (V,), -inf for what is never predicted.
        maxent: n-gram features, or none.
        loop: `add_exponentials`, compiled.
    """

    def __init__(self, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None, loop: Callable[..., None]) -> None:
        self._maxent, self._loop = maxent, loop
        weight = bias.new_zeros(0) if maxent is None else maxent.weight.detach()
        # A tile may reach beyond the last word.
        self._tables = tiled(rows), of_tiles(bias, -math.inf), F.pad(weight, (0, TILE))

    def __call__(self, hidden: Tensor, history: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M) -> (Q,)."""
        rooms = (((ROWS, TILE), torch.float32),)
        return log_sums(self._loop, (hidden,), history, self._maxent, self._tables, rooms)


def add_exponentials(
    hidden: Any, places: Any, tiles: Any, bias: Any, weight: Any, scores: Any, top: Any, total: Any
) -> None:
    """Adds exp(score - top) of all words to total (Q,); top (Q,), at first -inf, becomes one of the larger scores.

    hidden (Q, H), places (Q, R), tiles (P, H, TILE), bias (P, TILE), weight (W,); scores (ROWS, TILE) to
    work in. Q is a multiple of ROWS.
    """
    for tile in range(tiles.shape[0]):
        added = weight[tile * TILE :]
        for begin in range(0, hidden.shape[0], ROWS):
            for i in range(ROWS):
                score = scores[i]
                for v in range(TILE):
                    score[v] = bias[tile, v]
                add_features(score, added, places[begin + i])
            add_products(scores, hidden[begin : begin + ROWS], tiles[tile])
            for i in range(ROWS):
                if begin + i + ROWS < len(top):
                    ask_for_features(added, places[begin + i + ROWS], TILE)
                part = _sum_exponentials(scores[i], begin + i, top, total)
                total[begin + i] += part


def _sum_exponentials(scores: Any, query: int, top: Any, total: Any) -> Any:
    """Sum of exp(scores (W,) - top[query]), for which total[query] is of the same top.

    Where there is no top yet, -inf, or the sum would be large, top[query] becomes the largest score.
    """
    part = _exponentials(scores, top[query])
    if top[query] == -np.inf or part > MUCH:
        largest = scores[0]
        for v in range(1, len(scores)):
            largest = max(largest, scores[v])
        total[query] *= math.exp(top[query] - largest)
        top[query] = largest
        part = _exponentials(scores, largest)
    return part


def _exponentials(scores: Any, top: Any) -> Any:
    total = np.float32(0.0)
    for v in range(len(scores)):
        total += exponential(scores[v] - top)
    return total
