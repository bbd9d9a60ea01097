"""One step of a network of one GRU layer for few histories: a compiled loop instead of a dozen tensor operations.

Shapes: Q queries, R states before them, S state, V words, E inputs, H hidden, D distinct values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.fixed_linear import FEW_ROWS
from asr.half_product import fill_products
from asr.lm.compiled_loop import arrays_of, loop_for
from asr.lm.rnn.gru import GruLayer
from asr.lm.rnn.recurrent_kernel import add_next_states
from asr.lm.rnn.tile_kernel import COLUMNS, ROWS
from asr.packed_linear import PackedLinear

_NO_PROJECTION = np.empty((0, 0, COLUMNS), dtype=np.int16), np.empty(0, dtype=np.float32)


def gru_step(
    layer: GruLayer,
    rows: Tensor,
    projection: PackedLinear | None,
    state: Tensor,
    before: Tensor | None,
    word_id: Tensor,
) -> Tensor | None:
    """What follows state (R, S)[before (Q,)] and the words word_id (Q,), whose vectors stand in rows (V, E): (Q, S).

    None where weights are not multiplied by `half_product`, as for many rows, or without numba.
    """
    loop = loop_for(fill_steps, state)
    if loop is None or len(word_id) > FEW_ROWS or torch.is_grad_enabled():
        return None
    products = [*layer.tables_of_few(), _NO_PROJECTION if projection is None else projection.tables_of_few()]
    if None in products:
        return None
    following = state.new_empty(len(word_id), state.shape[1])
    before = torch.arange(len(word_id)) if before is None else before
    loop(*arrays_of(word_id, before, state, rows), *products, following.numpy())
    return following


def fill_steps(
    word_id: Any, before: Any, state: Any, rows: Any, from_input: Any, from_state: Any, projection: Any, following: Any
) -> None:
    """Fills following (Q, S) from `gru_step`'s arguments and three products' tables, see `fill_products`."""
    num = len(word_id)
    word, which_word = distinct_values(word_id)
    one, which_state = distinct_values(before)
    size = from_state[0].shape[1]
    inputs, old = np.empty((len(word), rows.shape[1]), np.float32), np.empty((len(one), size), np.float32)
    for i in range(len(word)):
        inputs[i] = rows[word[i]]
    for i in range(len(one)):
        old[i] = state[one[i], :size]
    gates, recurrent = _product(inputs, from_input), _product(old, from_state)
    new = np.empty((num, size), np.float32)
    add_next_states(0, num, gates, recurrent, old, which_word, which_state, new, np.empty(4 * size, np.float32))
    following[:, :size] = new
    if len(projection[0]):
        following[:, size:] = _product(new, projection)[:num, : following.shape[1] - size]


def _product(inputs: Any, tables: Any) -> Any:
    tiles, bias = tables
    outputs = np.empty((-(-len(inputs) // ROWS) * ROWS, len(bias)), np.float32)
    fill_products(outputs, inputs, tiles, bias)
    return outputs


def distinct_values(values: Any) -> Any:
    """The distinct ones among values (Q,), in the order of their coming, (D,), and which one each is, (Q,)."""
    num_slots = 16
    while num_slots < 2 * len(values):
        num_slots *= 2
    table = np.full(num_slots, -1, dtype=np.int64)
    distinct, which = np.empty(len(values), dtype=np.int64), np.empty(len(values), dtype=np.int64)
    num = 0
    for i in range(len(values)):
        slot = (values[i] * 0x1E3779B97F4A7C15 >> 20) & (num_slots - 1)
        while table[slot] >= 0 and distinct[table[slot]] != values[i]:
            slot = (slot + 1) & (num_slots - 1)
        if table[slot] < 0:
            table[slot], distinct[num] = num, values[i]
            num += 1
        which[i] = table[slot]
    return distinct[:num], which
