"""Products of 8-bit integers: rows of numbers quantized to 255 steps, and linear layers that multiply such rows.

A layer's inputs are quantized between the lowest and the highest of their row, its weights symmetrically around zero.

If the processor has the instruction, four products of bytes take as long as one of float32. Each row of the inputs has
a step of its own, so that the result for a frame does not depend on other frames.

Shapes: Q rows, I inputs, O outputs, P tiles of W outputs, P W at least O.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr.kernels.jit import Intrinsic, has_package, jit
from asr.kernels.simd import COLUMNS, ROWS, tiled
from asr.kernels.threads import in_threads

_LARGEST = 127
_NUM_STEPS = 255
_ROWS_AT_ONCE = 8 * ROWS  # their bytes stay in the nearest caches during the loop over all tiles

set_block: Any = Intrinsic("asr.kernels.intrinsics", "set_block")


def rounded_rows(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """numbers (N, K) -> the step of each row (N,), and the numbers in steps, integers from -127 to 127, (N, K)."""
    largest = numbers.abs().amax(dim=1) if numbers.numel() else numbers.new_zeros(len(numbers))
    step = largest.clamp(min=torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
    return step, (numbers / step[:, None]).round_()


def quads(numbers: Tensor) -> Tensor:
    """(N, K) of 8 bits -> (N, K / 4) int32 of four adjacent numbers each, padded with zeros."""
    return F.pad(numbers, (0, -numbers.shape[1] % 4)).contiguous().view(torch.int32)


@functools.cache
def has_byte_products() -> bool:
    """Whether this processor multiplies bytes, and numba, which generates the instruction, is installed."""
    if not has_package("numba"):
        return False
    from asr.kernels.intrinsics import has_instruction

    return has_instruction("avx512vnni")


class _Choice(threading.local):
    is_on = False


_choice = _Choice()


@contextmanager
def byte_products(is_on: bool = True) -> Iterator[None]:
    """Within the block, this thread's `asr.kernels.linear.PackedLinear` layers multiply bytes, if the processor can.

    Layers on a GPU, in types other than float32 or with a gradient do not.
    """
    before = _choice.is_on
    _choice.is_on = is_on and has_byte_products()
    try:
        yield
    finally:
        _choice.is_on = before


def are_bytes_multiplied() -> bool:
    """Whether this thread is within `byte_products`."""
    return _choice.is_on


class Int8Weights:
    """inputs (Q, I) -> inputs weight^T + bias (Q, O) with quantized rows of both; needs `has_byte_products`.

    Args:
        weight: (O, I) float32.
        bias: (O,).
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        loop = jit(fill_byte_products)
        assert loop is not None
        self._loop: Callable[..., None] = loop
        self._num_outputs, self._num_inputs = weight.shape
        step, rounded = rounded_rows(weight)
        padding = 0, -len(weight) % COLUMNS
        columns = (step, step * rounded.sum(dim=1), bias)
        self._tables = (
            tiled(quads(rounded.char()), COLUMNS).numpy(),
            *(F.pad(column, padding).numpy() for column in columns),
        )

    def __call__(self, inputs: Tensor, rectifies: bool) -> Tensor:
        """inputs (Q, I) -> (Q, O), with 0 for negative ones if `rectifies`; a row with NaN or infinity becomes NaN."""
        num_rows = len(inputs)
        rows = inputs.detach().contiguous().numpy()
        outputs = inputs.new_empty(num_rows, self._num_outputs)
        filled = outputs.numpy()

        def work(begin: int, end: int) -> None:
            left = np.empty((_ROWS_AT_ONCE, self._num_inputs + -self._num_inputs % 4), dtype=np.uint8)
            products = np.empty((ROWS, COLUMNS), dtype=np.int32)
            part = slice(begin * ROWS, min(end * ROWS, num_rows))
            self._loop(filled[part], rows[part], *self._tables, rectifies, left, left.view(np.int32), products)

        in_threads(work, -(-num_rows // ROWS), rows_at_least=8)
        return outputs


def fill_byte_products(
    outputs: Any, inputs: Any, tiles: Any, step: Any, total: Any, bias: Any, rectifies: Any, left: Any, fours: Any,
    products: Any,
) -> None:  # fmt: skip
    """Fills outputs (Q, O), for `jit`.

    inputs (Q, I); tiles (P, I / 4, W) int32, of four signed bytes each, and for each of their columns (P W,) the step,
    the total and the bias. Work arrays: left (_ROWS_AT_ONCE, I) bytes, fours the same as int32, products (ROWS, W)
    int32.
    """
    num_rows, num_inputs = inputs.shape
    num_outputs = outputs.shape[1]
    floor = np.float32(0.0) if rectifies else np.float32(-np.inf)
    lowest, row_step = np.empty(len(left), dtype=np.float32), np.empty(len(left), dtype=np.float32)
    nothing = np.zeros((1, COLUMNS), dtype=np.int32)
    for first in range(0, num_rows, len(left)):
        count = min(len(left), num_rows - first)
        for row in range(count):
            lowest[row], row_step[row] = _round_row(left[row], inputs[first + row], num_inputs)
        for tile in range(len(tiles)):
            column = tile * COLUMNS
            width = min(COLUMNS, num_outputs - column)
            for begin in range(0, count, ROWS):
                set_block(products, fours[begin:], tiles[tile], 0, nothing)
                for i in range(min(ROWS, count - begin)):
                    product, output = products[i], outputs[first + begin + i, column : column + width]
                    low, scale = lowest[begin + i], row_step[begin + i]
                    for j in range(width):
                        c = column + j
                        value = np.float32(product[j]) * (scale * step[c]) + (low * total[c] + bias[c])
                        # Unlike max, this keeps NaN.
                        output[j] = floor if value < floor else value


def _round_row(left: Any, row: Any, num_inputs: int) -> Any:
    """Fills left with the row's numbers in steps above the lowest one -> that number and the step."""
    lowest, highest, check = row[0], row[0], np.float32(0.0)
    for j in range(num_inputs):
        lowest, highest = min(lowest, row[j]), max(highest, row[j])
        check += np.float32(0.0) * row[j]
    width = highest - lowest
    per_step = np.float32(_NUM_STEPS) / width if width > np.float32(1e-30) else np.float32(0.0)
    if check != check:  # NaN, or an infinity times 0
        lowest, width, per_step = np.float32(np.nan), np.float32(0.0), np.float32(0.0)
    for j in range(num_inputs):
        left[j] = np.uint8(np.int32(np.rint((row[j] - lowest) * per_step)))
    return lowest, width / np.float32(_NUM_STEPS)
