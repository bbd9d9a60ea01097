"""What the compiled loops do with a few rows of scores in the nearest cache: products, exponentials.

Rows should begin at multiples of 64 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asr.lm.compiled_loop import Intrinsic

ROWS = 8  # of each call of `add_products`
COLUMNS = 48  # its columns come in multiples of this

add_block: Any = Intrinsic("asr.lm.rnn.register_block", "add_block")
as_float32: Any = Intrinsic("asr.lm.rnn.register_block", "as_float32")


def add_products(products: Any, left: Any, right: Any) -> None:
    """products (ROWS, W) += left (ROWS, K) @ right (K, W): W a multiple of COLUMNS, all rows contiguous.

    left and right are float32, or int32: pairs of bfloat16 along K.
    """
    for column in range(0, right.shape[1], COLUMNS):
        add_block(products, left, right, column)


def exponential(x: Any) -> Any:
    """exp(x) = 2^n 2^f, f within half a unit of 0: 2^n by its bits, 2^f by its series, to float32's last digit."""
    x = np.float32(1.442695041) * x
    # Beyond these 2^n has no bits; what is not a number stays so.
    if x < np.float32(-126.0):
        x = np.float32(-126.0)
    if x > np.float32(127.0):
        x = np.float32(127.0)
    n = np.floor(x + np.float32(0.5))
    f = x - n
    power = as_float32(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    series = np.float32(0.00133335581) + f * np.float32(0.000154035304)
    series = np.float32(0.0555041087) + f * (np.float32(0.00961812911) + f * series)
    series = np.float32(0.693147181) + f * (np.float32(0.240226507) + f * series)
    return power * (np.float32(1.0) + f * series)
