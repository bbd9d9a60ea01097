"""Building blocks of compiled loops: matrix products held in registers, exponentials, tiled tables.

Numbers of rows are multiples of ROWS, and widths are multiples of NARROW. The padding of a factor may hold anything;
the padding of the product is then undefined as well. Rows should begin at multiples of 64 bytes.

Shapes: N rows, K inner dimension, M and W columns, R history lengths, V vocabulary, P tiles of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr import old_paths
from asr.kernels.jit import Intrinsic

ROWS = 8  # of each call of `add_products`
COLUMNS, NARROW = 48, 16  # columns of a block: as many blocks of the first size as fit, then blocks of the second
AMX_TILE = 16  # rows, columns, and int32 along the inner dimension, of a tile of AMX; COLUMNS are three tiles
_INNER_AT_ONCE = 128  # this many rows of COLUMNS columns fit the L1 cache
_LINE = 64  # bytes of a cache's line

add_block: Any = Intrinsic("asr.kernels.intrinsics", "add_block")
add_narrow_block: Any = Intrinsic("asr.kernels.intrinsics", "add_narrow_block")
add_transposed_block: Any = Intrinsic("asr.kernels.intrinsics", "add_transposed_block")
add_narrow_transposed_block: Any = Intrinsic("asr.kernels.intrinsics", "add_narrow_transposed_block")
as_float32: Any = Intrinsic("asr.kernels.intrinsics", "as_float32")
prefetch: Any = Intrinsic("asr.kernels.intrinsics", "prefetch")
row_product: Any = Intrinsic("asr.kernels.intrinsics", "row_product")


def aligned(num_rows: int, width: int, like: Any) -> Any:
    """A new array (num_rows, width) of another's type, which begins at a multiple of 64 bytes; for loops and Python."""
    numbers = _LINE // like.itemsize
    room = np.empty(num_rows * width + numbers, like.dtype)
    begin = -room.ctypes.data % _LINE // like.itemsize
    return room[begin : begin + num_rows * width].reshape(num_rows, width)


def add_products(products: Any, left: Any, right: Any) -> None:
    """products (ROWS, W) += left (ROWS, K) @ right (K, W); W is a multiple of NARROW, all rows are contiguous.

    All are float32; or all are int32, with four unsigned bytes along K in left and four signed ones in right.
    """
    width = right.shape[1]
    num_wide = width - width % COLUMNS
    for column in range(0, num_wide, COLUMNS):
        add_block(products, left, right, column)
    for column in range(num_wide, width, NARROW):
        add_narrow_block(products, left, right, column)


def exponential(x: Any) -> Any:
    """exp(x) = 2^n 2^f with |f| <= 1/2: 2^n by its bits, 2^f by a series, to float32's last digit."""
    x = np.float32(1.442695041) * x
    # Below -126, 2^n is not a normal number; above 127, n does not fit its bits, and f grows instead. NaN stays NaN.
    x = np.float32(-126.0) if x < np.float32(-126.0) else x
    n = np.rint(x)
    n = np.float32(127.0) if n > np.float32(127.0) else n
    f = x - n
    power = as_float32(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    series = np.float32(0.00133335581) + f * np.float32(0.000154035304)
    series = np.float32(0.0555041087) + f * (np.float32(0.00961812911) + f * series)
    series = np.float32(0.693147181) + f * (np.float32(0.240226507) + f * series)
    return power * (np.float32(1.0) + f * series)


def padded(tensor: Tensor, num_rows: int = 1) -> Tensor:
    """Pads a matrix, or matrices, with zeros: the width to a multiple of NARROW, the rows to one of `num_rows`."""
    padding = -tensor.shape[-1] % NARROW, -tensor.shape[-2] % num_rows
    return F.pad(tensor, (0, padding[0], 0, padding[1])) if any(padding) else tensor.contiguous()


def padded_room(*shape: int) -> Tensor:
    """An array of the shape, on wider rows in memory if the width is not a multiple of NARROW."""
    return torch.empty(*shape[:-1], shape[-1] + -shape[-1] % NARROW, dtype=torch.float32)


def add_products_by_row(products: Any, left: Any, right: Any) -> None:
    """products (N, W) += left (N, K or wider) @ right (K, W)."""
    width = right.shape[1]
    num_wide = width - width % COLUMNS
    for column in range(0, num_wide, COLUMNS):
        for row in range(0, len(products), ROWS):
            add_block(products[row:], left[row:], right, column)
    for column in range(num_wide, width, NARROW):
        for row in range(0, len(products), ROWS):
            add_narrow_block(products[row:], left[row:], right, column)


def add_products_by_column(products: Any, left: Any, right: Any, begin: int, end: int) -> None:
    """products (M, W) += left (N, M)^T @ right (N, W), only the blocks begin .. end - 1 of ROWS rows of products."""
    width = right.shape[1]
    num_wide = width - width % COLUMNS
    for first in range(0, len(right), _INNER_AT_ONCE):
        factors, part = left[first : first + _INNER_AT_ONCE], right[first : first + _INNER_AT_ONCE]
        for column in range(0, num_wide, COLUMNS):
            for row in range(ROWS * begin, ROWS * end, ROWS):
                add_transposed_block(products[row:], factors[:, row:], part, column)
        for column in range(num_wide, width, NARROW):
            for row in range(ROWS * begin, ROWS * end, ROWS):
                add_narrow_transposed_block(products[row:], factors[:, row:], part, column)


def tiled(rows: Tensor, width: int) -> Tensor:
    """rows (V, K) -> (P, K, width), zeros after the last one."""
    return F.pad(rows, (0, 0, 0, -len(rows) % width)).view(-1, width, rows.shape[1]).transpose(1, 2).contiguous()


old_paths.offer(__name__)
