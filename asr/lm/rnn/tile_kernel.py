"""What the compiled loops do with a few rows of scores in the nearest cache: products, features, exponentials.

Rows should begin at multiples of 64 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.lm.compiled_loop import Intrinsic

ROWS = 8  # of each call of `add_products`
COLUMNS, NARROW = 48, 16  # its columns: as many of the first as fit, the rest in multiples of the second
_LINE = 64  # bytes of a cache's line
MUCH = 1e18  # of exponentials: far from float32's end, and far from where the smaller ones would be lost

add_narrow_block: Any = Intrinsic("asr.lm.rnn.register_block", "add_narrow_block")
add_block: Any = Intrinsic("asr.lm.rnn.register_block", "add_block")
as_float32: Any = Intrinsic("asr.lm.rnn.register_block", "as_float32")
prefetch: Any = Intrinsic("asr.lm.rnn.register_block", "prefetch")


def add_products(products: Any, left: Any, right: Any) -> None:
    """products (ROWS, W) += left (ROWS, K) @ right (K, W): W a multiple of NARROW, all rows contiguous.

    All are float32; or int32, of which left's are four unsigned bytes along K and right's four signed ones.
    """
    width = right.shape[1]
    num_wide = width - width % COLUMNS
    for column in range(0, num_wide, COLUMNS):
        add_block(products, left, right, column)
    for column in range(num_wide, width, NARROW):
        add_narrow_block(products, left, right, column)


def ask_for_features(features: Any, places: Any, width: int) -> None:
    """Asks for the slices of that width of features (W,), float32 or int8, at places (R,) to be in the cache soon."""
    numbers = _LINE // features.itemsize
    for length in range(len(places)):
        for at in range(0, width + numbers, numbers):
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


def exponential(x: Any) -> Any:
    """exp(x) = 2^n 2^f, f within half a unit of 0: 2^n by its bits, 2^f by its series, to float32's last digit."""
    x = np.float32(1.442695041) * x
    # Below, 2^n has no bits; above, f grows, and its series beyond all bounds. What is not a number stays so.
    x = np.float32(-126.0) if x < np.float32(-126.0) else x
    n = np.rint(x)
    n = np.float32(127.0) if n > np.float32(127.0) else n
    f = x - n
    power = as_float32(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    series = np.float32(0.00133335581) + f * np.float32(0.000154035304)
    series = np.float32(0.0555041087) + f * (np.float32(0.00961812911) + f * series)
    series = np.float32(0.693147181) + f * (np.float32(0.240226507) + f * series)
    return power * (np.float32(1.0) + f * series)
