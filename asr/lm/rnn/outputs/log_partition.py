"""log Z, the normalizer over the whole vocabulary: log of the sum of exp(row . hidden + bias + MaxEnt).

On a CPU one compiled loop computes it in float32, one tile of the vocabulary at a time, so that scores stay in the L1
cache. With precision int8, all words get rough scores from products of 8-bit integers, and those that have a large
share of the sum are scored again in float32.

Shapes: Q queries, H hidden, M history words, R history lengths, V vocabulary, P tiles of it, W the MaxEnt table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr.kernels.byte_products import has_byte_products, packed_integers, rounded_rows
from asr.kernels.jit import Intrinsic, in_threads, jit_for
from asr.kernels.simd import (
    COLUMNS,
    ROWS,
    add_products,
    as_float32,
    exponential,
    prefetch,
    row_product,
    tiled,
)
from asr.lm.rnn.maxent import HashedMaxEnt, add_score_range
from asr.text.symbols import BOS_ID, EPSILON_ID

Precision = Literal["float32", "int8"]

LogZ = Callable[[Tensor, Tensor], Tensor]
"""hidden (Q, H), history (Q, M) -> log Z (Q,)."""

# Sums over the vocabulary are computed in blocks that fit a CPU's cache.
_QUERIES_AT_ONCE = 256
_WORDS_AT_ONCE = 4096

# The compiled loops need the word vectors in tiles, words along rows; that layout costs as much as this many queries.
_QUERIES_WORTH_TILES = 512

TILE = 12 * COLUMNS  # words
MAX_TERM = 1e18  # of a sum of exponentials: larger terms might overflow float32, or swamp the smaller ones
_LINE = 64  # bytes of a cache's line


def log_z_of(rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None, precision: Precision, num_queries: int) -> LogZ:
    """log Z over all words that can be predicted, for about `num_queries` queries in one or more calls.

    rows (V, H), bias (V,); they and the MaxEnt weights must not change between calls. Not differentiable. "float32" is
    exact; "int8" scores words with a small share of the sum only roughly, which is faster for many queries if the
    processor multiplies 8-bit integers, and slower otherwise.
    """
    rows, bias = rows.detach(), bias.detach().clone()
    bias[[EPSILON_ID, BOS_ID]] = -torch.inf
    loop = _loop_for(rows, precision, num_queries)
    if precision == "int8":
        return _without_gradient(Int8LogZ(rows, bias, maxent, loop))
    if loop is not None:
        return _without_gradient(Float32LogZ(rows, bias, maxent, loop))
    return _without_gradient(functools.partial(log_z_by_tensors, rows=rows, bias=bias, maxent=maxent))


def _loop_for(rows: Tensor, precision: Precision, num_queries: int) -> Callable[..., None] | None:
    if precision == "float32":
        return jit_for(add_exponentials_float32, rows) if num_queries >= _QUERIES_WORTH_TILES else None
    return jit_for(add_exponentials_int8, rows) if has_byte_products() else None


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


def log_sums(
    loop: Callable[..., None], queries: tuple[Tensor, ...], history: Tensor, maxent: HashedMaxEnt | None,
    tables: tuple[Any, ...], buffers: tuple[tuple[tuple[int, ...], torch.dtype], ...],
) -> Tensor:  # fmt: skip
    """log Z (Q,) by loop(queries, places, tables, buffers, top, total), which adds exp(score - top) to total.

    queries: (Q, ...) each; history (Q, M); buffers: shapes and types of each thread's work arrays.
    """
    num_queries = len(history)
    places = history.new_zeros(num_queries, 0) if maxent is None else maxent.places(history)
    order = torch.arange(num_queries)
    # Histories with the same last words are adjacent: their features are then in the processor's cache.
    for column in places[:, :2].t().flip(0):
        order = order[column[order].argsort(stable=True)]
    # The last query is repeated to fill the last rows.
    order = order[torch.arange(-(-num_queries // ROWS) * ROWS).clamp(max=num_queries - 1)]
    columns = [values[order].contiguous().numpy() for values in (*queries, places)]
    arrays = tuple(table.numpy() if isinstance(table, Tensor) else table for table in tables)
    top = torch.full((len(order),), -torch.inf, dtype=torch.float32)
    total = torch.zeros(len(order), dtype=torch.float64)

    def work(begin: int, end: int) -> None:
        part = slice(ROWS * begin, ROWS * end)
        *own, own_places = (column[part] for column in columns)
        room = tuple(torch.empty(shape, dtype=dtype).numpy() for shape, dtype in buffers)
        loop(tuple(own), own_places, arrays, room, top[part].numpy(), total[part].numpy())

    in_threads(work, len(order) // ROWS, rows_at_least=8)
    log_z = torch.empty(num_queries, dtype=torch.float32)
    log_z[order] = (top + total.log()).float()
    return log_z


def in_tiles(values: Tensor, padding: float = 0.0) -> Tensor:
    """values (V,) -> (P, TILE)."""
    return F.pad(values, (0, -len(values) % TILE), value=padding).view(-1, TILE)


class Float32LogZ:
    """log Z by the compiled loop; the word vectors are laid out once.

    Args:
        rows, bias: (V, H) and (V,), -inf for words that are never predicted.
        maxent: n-gram features, or None.
        loop: `add_exponentials_float32`, compiled.
    """

    def __init__(self, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None, loop: Callable[..., None]) -> None:
        self._maxent, self._loop = maxent, loop
        weight = bias.new_zeros(0) if maxent is None else maxent.weight.detach()
        # A tile may reach beyond the last word.
        self._tables = tiled(rows, TILE), in_tiles(bias, -math.inf), F.pad(weight, (0, TILE))

    def __call__(self, hidden: Tensor, history: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M) -> (Q,)."""
        buffers = (((ROWS, TILE), torch.float32),)
        return log_sums(self._loop, (hidden,), history, self._maxent, self._tables, buffers)


def add_exponentials_float32(queries: Any, places: Any, tables: Any, buffers: Any, top: Any, total: Any) -> None:
    """Adds exp(score - top) of all words to total (Q,); top (Q,), at first -inf, becomes one of the larger scores.

    hidden (Q, H), places (Q, R), tiles (P, H, TILE), bias (P, TILE), weight (W,); scores (ROWS, TILE) to
    work in. Q is a multiple of ROWS.
    """
    (hidden,), (tiles, bias, weight), (scores,) = queries, tables, buffers
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
                    ask_for_features(added, places[begin + i + ROWS])
                part = _sum_exponentials(scores[i], begin + i, top, total)
                total[begin + i] += part


def ask_for_features(features: Any, places: Any) -> None:
    """Prefetches the slices (TILE,) of features (W,), float32 or int8, at places (R,)."""
    numbers = _LINE // features.itemsize
    for length in range(len(places)):
        for at in range(0, TILE + numbers, numbers):
            prefetch(features, places[length] + at)


def add_features(score: Any, features: Any, places: Any) -> None:
    """score (width,) += the slices of features (W,) at places (R,)."""
    num_lengths, width = len(places), len(score)
    for length in range(0, num_lengths - 2, 3):
        one, two, three = features[places[length] :], features[places[length + 1] :], features[places[length + 2] :]
        for v in range(width):
            score[v] += one[v] + two[v] + three[v]
    for length in range(num_lengths - num_lengths % 3, num_lengths):
        one = features[places[length] :]
        for v in range(width):
            score[v] += one[v]


def _sum_exponentials(scores: Any, query: int, top: Any, total: Any) -> Any:
    """The sum of exp(scores (W,) - top[query]); total[query] is relative to the same top.

    Where there is no top yet, -inf, or the sum would be large, top[query] becomes the largest score.
    """
    part = _exponentials(scores, top[query])
    if top[query] == -np.inf or part > MAX_TERM:
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


EXACT_SHARE = 1 / 256  # words with a larger share of the sum so far are scored again
_UNSIGNED = 128  # added to hidden values: the instruction multiplies unsigned by signed numbers
_BITS = 64
_LOG2_E, _LOG_2 = math.log2(math.e), math.log(2)
bits_above: Any = Intrinsic("asr.kernels.intrinsics", "bits_above")
lowest_bit: Any = Intrinsic("asr.kernels.intrinsics", "lowest_bit")
set_block: Any = Intrinsic("asr.kernels.intrinsics", "set_block")


class Int8LogZ:
    """log Z from rough and exact scores; the tables are quantized and laid out once.

    Each word vector and each hidden vector is quantized to 255 steps of its own size, MaxEnt weights all with the same.

    Args:
        rows, bias: (V, H) and (V,), -inf for words that are never predicted.
        maxent: n-gram features, or None.
        loop: `add_exponentials_int8`, compiled, if the processor has the instruction; None for slow tensor operations.
    """

    def __init__(
        self, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None, loop: Callable[..., None] | None
    ) -> None:
        self._rows, self._bias, self._maxent, self._loop = rows, bias, maxent, loop
        self._weight = bias.new_zeros(0) if maxent is None else maxent.weight.detach()
        self._word_step, rounded = rounded_rows(rows)
        feature_step, (features,) = rounded_rows(self._weight[None])
        if loop is None:
            self._rounded_rows, self._rough_weight = rounded, features * feature_step
            return
        # A tile may reach beyond the last word.
        self._tables = (
            tiled(packed_integers(rounded.char()), TILE), in_tiles((-_UNSIGNED * rounded.sum(dim=1)).int()),
            in_tiles(self._word_step), in_tiles(_LOG2_E * bias, -math.inf), F.pad(features.char(), (0, TILE)),
            np.float32(_LOG2_E * feature_step.item()), rows.contiguous(), self._weight,
        )  # fmt: skip

    def __call__(self, hidden: Tensor, history: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M) -> (Q,)."""
        step, rounded = rounded_rows(hidden)
        if self._loop is None:
            parts = zip(*(tensor.split(_QUERIES_AT_ONCE) for tensor in (hidden, step, rounded, history)), strict=True)
            return torch.cat([self._by_tensors(*part) for part in parts])
        queries = packed_integers((rounded + _UNSIGNED).byte()), _LOG2_E * step, hidden.contiguous()
        buffers = ((ROWS, TILE), torch.int32), *(((TILE,), kind) for kind in (torch.int16, torch.float32, torch.int64))
        return log_sums(self._loop, queries, history, self._maxent, self._tables, buffers)

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


def add_exponentials_int8(queries: Any, places: Any, tables: Any, buffers: Any, top: Any, total: Any) -> None:
    """Adds exp(score - top) of all words to total (Q,); top (Q,), at first -inf, becomes one of the larger scores.

    rounded (Q, H / G) of G unsigned integers each (`packed_integers`), step (Q,), hidden (Q, H), places (Q, R); tiles
    (P, H / G, TILE) of G signed ones each, offset, what makes up for the unsigned, word_step and bias (P, TILE),
    features (W,) int8, rows (V, H), weight (W,); step, feature_step and bias are times log2(e). Room to work in:
    products (ROWS, TILE), sums, powers and chosen (TILE,). Q is a multiple of ROWS.
    """
    rounded, step, hidden = queries
    tiles, offset, word_step, bias, features, feature_step, rows, weight = tables
    products, sums, powers, chosen = buffers
    for tile in range(tiles.shape[0]):
        first = tile * TILE
        added = features[first:]
        for begin in range(0, rounded.shape[0], ROWS):
            for column in range(0, TILE, COLUMNS):
                set_block(products, rounded[begin : begin + ROWS], tiles[tile], column, offset[tile : tile + 1])
            for i in range(ROWS):
                query = begin + i
                if query + ROWS < len(step):
                    ask_for_features(added, places[query + ROWS])
                _sum_features(sums, added, places[query])
                scores = products[i], sums, step[query], feature_step, word_step[tile], bias[tile]
                part = _sum_powers(powers, scores, query, top, total)
                limit = np.float32(EXACT_SHARE * (total[query] + part))
                num_chosen = 0
                for at in range(0, TILE, _BITS):
                    bits = bits_above(powers, at, limit)
                    while bits:
                        v = at + lowest_bit(bits)
                        bits &= bits - 1
                        chosen[num_chosen] = v
                        num_chosen += 1
                        # The weights are far apart, so all are prefetched before the first is read.
                        for length in range(places.shape[1]):
                            prefetch(weight, places[query, length] + first + v)
                for at in range(num_chosen):
                    v = chosen[at]
                    word = first + v
                    exact = np.float32(_LOG_2) * bias[tile, v] + row_product(hidden, query, rows, word)
                    for length in range(places.shape[1]):
                        exact += weight[places[query, length] + word]
                    part += exponential(exact - top[query]) - powers[v]
                total[query] += part


def _sum_features(sums: Any, features: Any, places: Any) -> None:
    """sums (TILE,) int16 = the sum of the slices of features (W,) at places (R,)."""
    num_lengths = len(places)
    sums[:] = 0
    for length in range(0, num_lengths - 2, 3):
        one, two, three = features[places[length] :], features[places[length + 1] :], features[places[length + 2] :]
        for v in range(TILE):
            sums[v] = np.int16(sums[v] + one[v] + two[v] + three[v])
    for length in range(num_lengths - num_lengths % 3, num_lengths):
        one = features[places[length] :]
        for v in range(TILE):
            sums[v] = np.int16(sums[v] + one[v])


def _sum_powers(powers: Any, scores: Any, query: int, top: Any, total: Any) -> Any:
    """powers (TILE,) = exp(rough scores - top[query]) -> their sum; total[query] is relative to the same top.

    Where there is no top yet, -inf, or the sum would be large, top[query] becomes the largest score.
    """
    part = np.float32(np.inf)
    if top[query] > -np.inf:
        part = _powers(powers, scores, np.float32(_LOG2_E) * top[query])
    if part > MAX_TERM:
        largest = _rough_score(scores, 0)
        for v in range(1, TILE):
            largest = max(largest, _rough_score(scores, v))
        largest *= np.float32(_LOG_2)
        total[query] *= math.exp(top[query] - largest)
        top[query] = largest
        part = _powers(powers, scores, np.float32(_LOG2_E) * largest)
    return part


def _powers(powers: Any, scores: Any, top: Any) -> Any:
    total = np.float32(0.0)
    for v in range(TILE):
        power = _rough_power_of_2(_rough_score(scores, v) - top)
        powers[v] = power
        total += power
    return total


def _rough_score(scores: Any, v: int) -> Any:
    """log2(e) times the score of a tile's v-th word."""
    product, sums, step, feature_step, word_step, bias = scores
    return np.float32(product[v]) * (step * word_step[v]) + bias[v] + np.float32(sums[v]) * feature_step


def _rough_power_of_2(x: Any) -> Any:
    """2^x with a relative error of 1.7e-3 and no bias: as `exponential`, with a series of three terms."""
    x = np.float32(-126.0) if x < np.float32(-126.0) else x
    n = np.rint(x)
    n = np.float32(127.0) if n > np.float32(127.0) else n
    f = x - n
    power = as_float32(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return power * (np.float32(1.00038435) + f * (np.float32(0.703407058) + f * np.float32(0.23841512)))
