"""Products of float32 matrices, for the loops of training: blocks of them stay in registers, see `register_block`.

Widths are multiples of NARROW and numbers of rows of ROWS; what stands in the padding of a factor is left to chance,
and so is what stands in that of the product.

Shapes: N rows, K inner dimension, M and W columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asr.lm.compiled_loop import Intrinsic
from asr.lm.rnn.tile_kernel import COLUMNS, NARROW, ROWS, add_block, add_narrow_block

_INNER_AT_ONCE = 128  # of COLUMNS columns they fit the nearest cache

add_transposed_block: Any = Intrinsic("asr.lm.rnn.register_block", "add_transposed_block")
add_narrow_transposed_block: Any = Intrinsic("asr.lm.rnn.register_block", "add_narrow_transposed_block")


def padded(tensor: Tensor, num_rows: int = 1) -> Tensor:
    """The matrix, or matrices, with zeros up to a width that is a multiple of NARROW, and rows of `num_rows`."""
    padding = -tensor.shape[-1] % NARROW, -tensor.shape[-2] % num_rows
    return F.pad(tensor, (0, padding[0], 0, padding[1])) if any(padding) else tensor.contiguous()


def padded_room(*shape: int) -> Tensor:
    """An array of the shape, or, where its rows are not a multiple of NARROW wide, of wider ones."""
    return torch.empty(*shape[:-1], shape[-1] + -shape[-1] % NARROW)


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
    """Rows begin .. end - 1, ROWS each, of: products (M, W) += left (N, M)^T @ right (N, W)."""
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
