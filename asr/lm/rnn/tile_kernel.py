"""What the compiled loops do with a few rows of scores in the nearest cache: products, exponentials.

Rows should begin at multiples of 64 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LANES = 16  # the columns of `add_products` come in multiples of this


def add_products(products: Any, left: Any, right: Any) -> None:
    """products (4, W) += left (4, K) @ right (K, W): K a multiple of 4, W of LANES, all rows contiguous.

    Each pass over the columns holds sixteen numbers of `left` in registers and takes four rows of `right`: of four
    multiplications only one has to wait for memory.
    """
    # So written the compiler sees that no columns are left over, and keeps no registers for them.
    width = right.shape[1] // LANES * LANES
    out0, out1, out2, out3 = products[0], products[1], products[2], products[3]
    left0, left1, left2, left3 = left[0], left[1], left[2], left[3]
    for k in range(0, right.shape[0], 4):
        a00, a01, a02, a03 = left0[k], left0[k + 1], left0[k + 2], left0[k + 3]
        a10, a11, a12, a13 = left1[k], left1[k + 1], left1[k + 2], left1[k + 3]
        a20, a21, a22, a23 = left2[k], left2[k + 1], left2[k + 2], left2[k + 3]
        a30, a31, a32, a33 = left3[k], left3[k + 1], left3[k + 2], left3[k + 3]
        right0, right1, right2, right3 = right[k], right[k + 1], right[k + 2], right[k + 3]
        for v in range(width):
            b0, b1, b2, b3 = right0[v], right1[v], right2[v], right3[v]
            out0[v] += a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3
            out1[v] += a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3
            out2[v] += a20 * b0 + a21 * b1 + a22 * b2 + a23 * b3
            out3[v] += a30 * b0 + a31 * b1 + a32 * b2 + a33 * b3


def exponentials(scores: Any, width: int, scale: Any, shift: Any, power: Any, power_bits: Any) -> None:
    """The first `width` scores become exp(scale * (score - shift)); power_bits is `power` (W,), room to work in, as
    int32.

    exp(x) = 2^n 2^f, f within half a unit of 0: 2^n by its bits, 2^f by its series, exact to float32's last digit.
    """
    scale = np.float32(1.442695041) * np.float32(scale)
    for v in range(width):
        x = scale * (scores[v] - shift)
        # Beyond these 2^n has no bits; what is not a number stays so.
        if x < np.float32(-126.0):
            x = np.float32(-126.0)
        if x > np.float32(127.0):
            x = np.float32(127.0)
        n = np.floor(x + np.float32(0.5))
        f = x - n
        power_bits[v] = (np.int32(n) + np.int32(127)) << np.int32(23)
        series = np.float32(0.00133335581) + f * np.float32(0.000154035304)
        series = np.float32(0.0555041087) + f * (np.float32(0.00961812911) + f * series)
        series = np.float32(0.693147181) + f * (np.float32(0.240226507) + f * series)
        scores[v] = np.float32(1.0) + f * series
    for v in range(width):
        scores[v] *= power[v]
