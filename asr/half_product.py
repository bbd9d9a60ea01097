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


def half_product(weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor] | None:
    """inputs (Q, I) -> inputs weight^T + bias (Q, O), on one thread, for weight (O, I), bias (O,) float32 on a CPU.

    None where a weight is no float16 number, where numba is missing, or the processor's instruction that widens these.
    """
    if not imports("numba"):
        return None
    from asr.lm.rnn.register_block import has_instruction

    half = weight.half()
    if not has_instruction("f16c") or not torch.equal(half.float(), weight):
        return None
    loop, num_outputs = compiled_loop(fill_products), len(weight)
    assert loop is not None
    tiles = tiled(half, COLUMNS).view(torch.int16).numpy()
    padded_bias = F.pad(bias, (0, -num_outputs % COLUMNS)).numpy()

    def product(inputs: Tensor) -> Tensor:
        num_rows = len(inputs)
        outputs = inputs.new_empty(-(-num_rows // ROWS) * ROWS, len(padded_bias))
        loop(outputs.numpy(), inputs.detach().contiguous().numpy(), tiles, padded_bias)
        return outputs[:num_rows, :num_outputs]

    return product


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
