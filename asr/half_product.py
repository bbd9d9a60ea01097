"""The product of few rows by weights that are float16 numbers, as a bundle's are, by a compiled loop.

Such a product takes the time to read the weights. Here they are kept in 16 bits and widened on their way into the
registers, which loses nothing: sums are float32.

Shapes: Q rows, I inputs, O outputs, P tiles of W outputs, P W at least O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr.compiled_forms import imports
from asr.lm.compiled_loop import compiled_loop
from asr.lm.rnn.tile_kernel import COLUMNS, ROWS, add_block
from asr.lm.rnn.tile_queries import tiled


class HalfProduct:
    """inputs (Q, I) -> inputs weight^T + bias (Q, O), on one thread.

    Attributes:
        tables: the weights' tiles and the bias as `fill_products` reads them.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        loop = compiled_loop(fill_products)
        assert loop is not None
        self._loop: Callable[..., None] = loop
        self._num_outputs = len(weight)
        padded_bias = F.pad(bias, (0, -len(weight) % COLUMNS)).numpy()
        self.tables: tuple[Any, Any] = tiled(weight.half(), COLUMNS).view(torch.int16).numpy(), padded_bias

    def __call__(self, inputs: Tensor) -> Tensor:
        num_rows = len(inputs)
        outputs = inputs.new_empty(-(-num_rows // ROWS) * ROWS, len(self.tables[1]))
        self._loop(outputs.numpy(), inputs.detach().contiguous().numpy(), *self.tables)
        return outputs[:num_rows, : self._num_outputs]


def half_product(weight: Tensor, bias: Tensor) -> HalfProduct | None:
    """What multiplies by weight (O, I) and adds bias (O,), float32 on a CPU.

    None where a weight is no float16 number, where numba is missing, or the processor's instruction that widens these.
    """
    if not imports("numba"):
        return None
    from asr.lm.rnn.register_block import has_instruction

    if not has_instruction("f16c") or not torch.equal(weight.half().float(), weight):
        return None
    return HalfProduct(weight, bias)


def fill_products(outputs: Any, inputs: Any, tiles: Any, bias: Any) -> None:
    """Fills outputs (Q or more, P W), for `compiled_loop`.

    Q is rounded up to a multiple of ROWS, what is added being left to chance; inputs (Q, I), bias (P W,), tiles
    (P, I, W) int16, a float16's bits.
    """
    num_rows, size = inputs.shape
    last = np.zeros((ROWS, size), dtype=np.float32)
    first_of_last = num_rows // ROWS * ROWS
    for row in range(first_of_last, num_rows):
        for j in range(size):
            last[row - first_of_last, j] = inputs[row, j]
    for tile in range(len(tiles)):
        column = tile * COLUMNS
        for begin in range(0, num_rows, ROWS):
            for row in range(begin, begin + ROWS):
                for j in range(column, column + COLUMNS):
                    outputs[row, j] = bias[j]
            left = inputs[begin:] if begin < first_of_last else last
            add_block(outputs[begin:, column:], left, tiles[tile], 0)
