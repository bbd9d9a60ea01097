"""What the compiled loops do with a few rows of scores in the nearest cache: products, exponentials and their sums.

Rows should begin at multiples of 64 bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from asr.lm.compiled_loop import Intrinsic

ROWS = 8  # of each call of `add_products`
COLUMNS = 48  # its columns come in multiples of this
_LINE = 64  # bytes of a cache's line
_MUCH = 1e18  # of exponentials: far from float32's end, and far from where the smaller ones would be lost

add_block: Any = Intrinsic("asr.lm.rnn.register_block", "add_block")
as_float32: Any = Intrinsic("asr.lm.rnn.register_block", "as_float32")
prefetch: Any = Intrinsic("asr.lm.rnn.register_block", "prefetch")


def add_products(products: Any, left: Any, right: Any) -> None:
    """products (ROWS, W) += left (ROWS, K) @ right (K, W): W a multiple of COLUMNS, all rows contiguous.

    All are float32; or int32, of which left's are four unsigned bytes along K and right's four signed ones.
    """
    for column in range(0, right.shape[1], COLUMNS):
        add_block(products, left, right, column)


def ask_for_features(features: Any, places: Any, width: int) -> None:
    """Asks for the slices of that width of features (W,), float32 or int8, at places (R,) to be in the cache soon."""
    numbers = _LINE // features.itemsize
    for length in range(len(places)):
        for at in range(0, width + numbers, numbers):
            prefetch(features, places[length] + at)


def add_features(score: Any, features: Any, places: Any, step: Any) -> None:
    """score (width,) += step * the slices of features (W,), float32 or int8, at places (R,)."""
    num_lengths, width = len(places), len(score)
    for length in range(0, num_lengths - 2, 3):
        one, two, three = features[places[length] :], features[places[length + 1] :], features[places[length + 2] :]
        for v in range(width):
            score[v] += step * np.float32(one[v] + two[v] + three[v])
    for length in range(num_lengths - num_lengths % 3, num_lengths):
        one = features[places[length] :]
        for v in range(width):
            score[v] += step * np.float32(one[v])


def exponential(x: Any) -> Any:
    """exp(x) = 2^n 2^f, f within half a unit of 0: 2^n by its bits, 2^f by its series, to float32's last digit."""
    x = np.float32(1.442695041) * x
    # Beyond these 2^n has no bits; what is not a number stays so.
    if x < np.float32(-126.0):
        x = np.float32(-126.0)
    if x > np.float32(127.0):
        x = np.float32(127.0)
    n = np.rint(x)
    f = x - n
    power = as_float32(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    series = np.float32(0.00133335581) + f * np.float32(0.000154035304)
    series = np.float32(0.0555041087) + f * (np.float32(0.00961812911) + f * series)
    series = np.float32(0.693147181) + f * (np.float32(0.240226507) + f * series)
    return power * (np.float32(1.0) + f * series)


def sum_exponentials(powers: Any, scores: Any, query: int, top: Any, total: Any) -> Any:
    """powers (W,) = exp(scores (W,) - top[query]) -> their sum, for which total[query] is of the same top.

    Where there is no top yet, -inf, or the sum would be large, top[query] becomes the largest score.
    """
    part = _exponentials(powers, scores, top[query])
    if top[query] == -np.inf or part > _MUCH:
        largest = scores[0]
        for v in range(1, len(scores)):
            largest = max(largest, scores[v])
        total[query] *= math.exp(top[query] - largest)
        top[query] = largest
        part = _exponentials(powers, scores, largest)
    return part


def _exponentials(powers: Any, scores: Any, top: Any) -> Any:
    total = np.float32(0.0)
    for v in range(len(scores)):
        power = exponential(scores[v] - top)
        powers[v] = power
        total += power
    return total
