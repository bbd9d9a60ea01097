"""Recurrent layers as compiled loops, for scoring and for training.

`run_sentences` scores sentences side by side. `fill_steps` and `fill_byte_steps` advance a GRU network by one step for
a few histories. `looped_sequence` is the layer in training, with its gradient. Products and activations of a few states
at a time stay in the L1 cache. In training the streams are divided among threads; the results do not depend on the
number of threads.

Shapes: Q rows, R states before them, L words, T steps, B streams or sentences, S state, E inputs, H hidden, V words, G
sums of the gates (3H; H in a simple layer), D distinct inputs, P tiles of U hidden units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr.kernels.byte_products import ROWS_AT_ONCE, ByteWeights, fill_byte_products, nothing_follows, room_for_products
from asr.kernels.hash_table import distinct_values
from asr.kernels.jit import arrays_of, in_threads, jit_for, jit_required
from asr.kernels.linear import fill_products
from asr.kernels.simd import (
    COLUMNS,
    NARROW,
    ROWS,
    add_products,
    add_products_by_column,
    add_products_by_row,
    exponential,
    padded,
    padded_room,
)

_MAX_UNITS = 128  # a tile of a wide layer's weights should not fill the L2 cache
_ROWS_AT_LEAST = 256  # rows of a thread's part
MIN_ROWS_FOR_TILES = 512  # laying out the weights in tiles costs at most as much as this many words
GRU, SIGMOID, RELU = 0, 1, 2


def run_sentences(
    loop: Callable[..., None], cell: int, gates: Tensor, input_idx: Tensor, sizes: list[int], state: Tensor,
    weight: Tensor, bias_n: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """gates (D, GH) of the distinct inputs, input_idx (L,) which of them, sizes (T,), state (B, H), weight (GH, H),
    bias_n (H,), of a GRU's n from the state -> outputs (L, H), and the last step's."""
    size = state.shape[1]
    num_gates = len(weight) // size
    num_tiles = -(-size // _MAX_UNITS)
    units = -(-size // (num_tiles * NARROW)) * NARROW
    width = num_tiles * units
    by_gate = F.pad(weight.detach().view(num_gates, size, size), (0, 0, 0, width - size))
    tiles = by_gate.view(num_gates, num_tiles, units, size).permute(1, 3, 0, 2).contiguous()
    states = state.new_empty(len(state) + len(input_idx), size)
    states[: len(state)] = state
    arrays = arrays_of(
        gates, input_idx, torch.tensor(sizes), states, tiles.view(num_tiles, size, num_gates * units), bias_n,
        gates.new_zeros(ROWS, width), gates.new_zeros(ROWS, (num_gates + 1) * units), gates.new_zeros(units),
    )  # fmt: skip
    loop(cell, *arrays)
    return states[len(state) :], states[len(states) - sizes[-1] :]


def add_sentences(
    cell: int, gates: Any, input_idx: Any, sizes: Any, states: Any, tiles: Any, bias_n: Any,
    left: Any, scores: Any, new: Any,
) -> None:  # fmt: skip
    """Fills states (B + L, H), which starts with the B initial ones; for `jit`.

    tiles (P, H, GU); left (ROWS, PU), scores (ROWS, GU + U) and new (U,) to work in.
    """
    size, units = states.shape[1], len(new)
    before, now = 0, len(states) - len(input_idx)
    num_initial = now
    for step in range(len(sizes)):
        end = sizes[step]
        for tile in range(tiles.shape[0]):
            first = tile * units
            count = min(units, size - first)
            for begin in range(0, end, ROWS):
                # If fewer sentences are left, the last one is computed several times.
                for i in range(ROWS):
                    sentence = min(begin + i, end - 1)
                    _copy(left[i], states[before + sentence], size)
                    inputs = gates[input_idx[now - num_initial + sentence]]
                    _copy(scores[i], inputs[first:], count)
                    if cell == GRU:
                        _copy(scores[i, units:], inputs[size + first :], count)
                        _copy(scores[i, 2 * units :], bias_n[first:], count)
                        _copy(scores[i, 3 * units :], inputs[2 * size + first :], count)
                add_products(scores, left, tiles[tile])
                for i in range(min(ROWS, end - begin)):
                    if cell == GRU:
                        _gru_cell(scores[i], left[i, first:], new)
                    else:
                        _simple_cell(scores[i], new, cell)
                    _copy(states[now + begin + i, first:], new, count)
        before = now
        now += sizes[step]


def next_states(
    loop: Callable[..., None], gates: Tensor, from_state: Tensor, state: Tensor, which: Tensor | None,
    before: Tensor | None,
) -> Tensor:  # fmt: skip
    """A GRU's next states (Q, H): gates (D, 3H) of the distinct inputs, from_state (R, 3H) the part that states (R, H)
    decide, both with their biases; row q is of gates[which[q]] and state[before[q]], or of the q-th of either."""
    num = len(gates) if which is None else len(which)
    new = state.new_empty(num, state.shape[1])
    indices = (torch.arange(num) if index is None else index for index in (which, before))
    arrays = arrays_of(gates, from_state, state, *indices, new)

    def work(begin: int, end: int) -> None:
        loop(begin, end, *arrays, np.empty(4 * state.shape[1], np.float32))

    in_threads(work, num, rows_at_least=_ROWS_AT_LEAST)
    return new


def add_next_states(
    begin: int, end: int, gates: Any, from_state: Any, state: Any, which: Any, before: Any, new: Any, score: Any
) -> None:
    """Fills the rows begin .. end - 1 of new (Q, H), for `jit`; score (4H,) to work in."""
    size = new.shape[1]
    for row in range(begin, end):
        inputs, recurrent = gates[which[row]], from_state[before[row]]
        for j in range(2 * size):
            score[j] = inputs[j] + recurrent[j]
        _copy(score[2 * size :], recurrent[2 * size :], size)
        _copy(score[3 * size :], inputs[2 * size :], size)
        _gru_cell(score, state[before[row]], new[row])


def _copy(to: Any, values: Any, count: int) -> None:
    for j in range(count):
        to[j] = values[j]


def _simple_cell(score: Any, new: Any, cell: int) -> None:
    for j in range(len(new)):
        if cell == SIGMOID:
            new[j] = np.float32(1.0) / (np.float32(1.0) + exponential(-score[j]))
        else:
            new[j] = max(score[j], np.float32(0.0))


def _gru_cell(score: Any, old: Any, new: Any) -> None:
    """score (4U,): sums of r and z, n's parts from the state and from the input; old and new states (U,)."""
    one, two, units = np.float32(1.0), np.float32(2.0), len(new)
    reset, update, from_state, from_input = score, score[units:], score[2 * units :], score[3 * units :]
    for j in range(units):
        n = from_input[j] + from_state[j] / (one + exponential(-reset[j]))
        n = two / (one + exponential(-two * n)) - one
        new[j] = n + (old[j] - n) / (one + exponential(-update[j]))


def looped_sequence(
    cell: int, inputs: Tensor, state: Tensor, keep: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor,
    bias_hh: Tensor,
) -> Tensor | None:  # fmt: skip
    """inputs (T, B, E), state (B, H), keep (T, B, 1), 0 where the state is reset, weights (G, E) and (G, H), biases
    (G,) -> outputs (T, B, H), with gradients; None where the loops cannot be used."""
    if jit_for(fill_outputs, inputs.detach()) is None:
        return None
    outputs: Tensor = _LoopedSequence.apply(  # type: ignore[no-untyped-call]
        cell, inputs, state, keep, weight_ih, weight_hh, bias_ih, bias_hh
    )
    return outputs


class _LoopedSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cell: int, inputs: Tensor, state: Tensor, keep: Tensor, weight_ih: Tensor, weight_hh: Tensor,
        bias_ih: Tensor, bias_hh: Tensor,
    ) -> Tensor:  # fmt: skip
        num_steps, num_streams = inputs.shape[:2]
        num_gates, size = weight_hh.shape
        inputs, keep = padded(inputs, ROWS), padded(keep, ROWS)
        rows = inputs.shape[1]
        previous = padded_room(num_steps, rows, size)
        saved = torch.empty(num_steps, rows, 4 * size if cell == GRU else size)
        previous[0] = padded(state * keep[0, :num_streams, :1], ROWS)
        outputs = torch.empty(num_steps, rows, size)
        arrays = [
            inputs, keep, padded(weight_ih.t()), padded(weight_hh.t()), bias_ih, bias_hh, previous, saved, outputs,
            padded_room(rows, num_gates), padded_room(rows, num_gates),
        ]  # fmt: skip
        _over_streams(fill_outputs, cell, arrays)
        ctx.save_for_backward(inputs, keep, weight_ih, weight_hh, previous, saved)
        ctx.cell, ctx.num_streams = cell, num_streams
        return outputs[:, :num_streams]

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, keep, weight_ih, weight_hh, previous, saved = ctx.saved_tensors
        num_steps, rows = inputs.shape[:2]
        num_gates, size = weight_hh.shape
        grad_gates = padded_room(num_steps, rows, num_gates)
        # A simple layer adds the sums over inputs and over states, so that both have the same gradient.
        grad_recurrent = torch.empty_like(grad_gates) if ctx.cell == GRU else grad_gates
        grad_inputs, direct, through = torch.empty_like(inputs), torch.zeros(rows, size), torch.zeros_like(previous[0])
        arrays = [
            padded(grad_outputs, ROWS), keep, padded(weight_ih), padded(weight_hh), previous, saved,
            grad_gates, grad_recurrent, grad_inputs, direct, through,
        ]  # fmt: skip
        _over_streams(fill_gradients, ctx.cell, arrays)
        grad_state = (direct + through[:, :size]) * keep[0, :, :1]
        grad_weights = [_weight_gradient(*pair) for pair in ((grad_gates, inputs), (grad_recurrent, previous))]
        grad_biases = [grad.sum(dim=(0, 1))[:num_gates] for grad in (grad_gates, grad_recurrent)]
        return (
            None, grad_inputs[:, : ctx.num_streams, : weight_ih.shape[1]], grad_state[: ctx.num_streams], None,
            grad_weights[0][:num_gates, : weight_ih.shape[1]], grad_weights[1][:num_gates, :size], *grad_biases,
        )  # fmt: skip


def _over_streams(function: Callable[..., None], cell: int, tensors: list[Tensor]) -> None:
    loop = jit_required(function)
    arrays = arrays_of(*tensors)

    def work(begin: int, end: int) -> None:
        loop(cell, ROWS * begin, ROWS * end, *arrays)

    in_threads(work, arrays[0].shape[1] // ROWS, rows_at_least=1)


def _weight_gradient(grad: Tensor, factor: Tensor) -> Tensor:
    """grad (T, B, G), factor (T, B, E) -> the sum of their outer products (G, E), padded as they are."""
    loop = jit_required(add_products_by_column)
    total = grad.new_zeros(grad.shape[2], factor.shape[2])
    arrays = arrays_of(total, grad.flatten(0, 1), factor.flatten(0, 1))
    in_threads(lambda begin, end: loop(*arrays, begin, end), len(total) // ROWS, rows_at_least=1)
    return total


def fill_outputs(
    cell: int, begin: int, end: int, inputs: Any, keep: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any,
    bias_hh: Any, previous: Any, saved: Any, outputs: Any, from_input: Any, from_state: Any,
) -> None:  # fmt: skip
    """Fills outputs, previous (T, B, H) and saved (T, B, 4H, or H) of the streams begin .. end - 1.

    Weights (E, G) and (H, G); from_input and from_state (B, G) to work in.
    """
    size = outputs.shape[2]
    for step in range(len(outputs)):
        for row in range(begin, end):
            from_input[row, : len(bias_ih)] = bias_ih
            from_state[row, : len(bias_hh)] = bias_hh
        add_products_by_row(from_input[begin:end], inputs[step, begin:end], weight_ih)
        add_products_by_row(from_state[begin:end], previous[step, begin:end], weight_hh)
        for row in range(begin, end):
            kept, new = saved[step, row], outputs[step, row]
            if cell == GRU:
                _gru_forward(from_input[row], from_state[row], previous[step, row], kept, new)
            else:
                _simple_forward(cell, from_input[row], from_state[row], kept, new)
            if step + 1 < len(outputs):
                for j in range(size):
                    previous[step + 1, row, j] = new[j] * keep[step + 1, row, 0]


def fill_gradients(
    cell: int, begin: int, end: int, grad_outputs: Any, keep: Any, weight_ih: Any, weight_hh: Any, previous: Any,
    saved: Any, grad_gates: Any, grad_recurrent: Any, grad_inputs: Any, direct: Any, through: Any,
) -> None:  # fmt: skip
    """Fills the gradients of inputs (T, B, E) and of both parts of the gates (T, B, G), weights (G, E) and (G, H), of
    the streams begin .. end - 1; direct and through (B, H), at first zero, become those of the first state."""
    size = direct.shape[1]
    grad = np.empty(size, dtype=np.float32)
    for step in range(len(saved) - 1, -1, -1):
        following = min(step + 1, len(saved) - 1)
        for row in range(begin, end):
            one, two, three, kept = grad_outputs[step, row], direct[row], through[row], keep[following, row, 0]
            for j in range(size):
                grad[j] = one[j] + (two[j] + three[j]) * kept
            gates, recurrent = grad_gates[step, row], grad_recurrent[step, row]
            if cell == GRU:
                _gru_backward(grad, saved[step, row], previous[step, row], gates, recurrent, direct[row])
            else:
                _simple_backward(grad, saved[step, row], gates)
        through[begin:end] = np.float32(0.0)
        add_products_by_row(through[begin:end], grad_recurrent[step, begin:end], weight_hh)
        grad_inputs[step, begin:end] = np.float32(0.0)
        add_products_by_row(grad_inputs[step, begin:end], grad_gates[step, begin:end], weight_ih)


def _gru_forward(from_input: Any, from_state: Any, old: Any, saved: Any, new: Any) -> None:
    """saved (4H,) receives r, z, n and n's part from the state."""
    one, two, size = np.float32(1.0), np.float32(2.0), len(new)
    # Separate loops: the compiler does not vectorize one over many arrays.
    for j in range(2 * size):
        saved[j] = one / (one + exponential(-(from_input[j] + from_state[j])))
    update, n, recurrent = saved[size:], saved[2 * size :], saved[3 * size :]
    inner, outer = from_state[2 * size :], from_input[2 * size :]
    for j in range(size):
        recurrent[j] = inner[j]
    for j in range(size):
        n[j] = two / (one + exponential(-two * (outer[j] + saved[j] * inner[j]))) - one
    for j in range(size):
        new[j] = n[j] + update[j] * (old[j] - n[j])


def _gru_backward(grad: Any, saved: Any, old: Any, gates: Any, recurrent: Any, direct: Any) -> None:
    one, size = np.float32(1.0), len(grad)
    update, n, inner = saved[size:], saved[2 * size :], saved[3 * size :]
    grad_update, grad_n, recurrent_n = gates[size:], gates[2 * size :], recurrent[2 * size :]
    for j in range(size):
        grad_n[j] = grad[j] * (one - update[j]) * (one - n[j] * n[j])
    for j in range(size):
        recurrent_n[j] = grad_n[j] * saved[j]
    for j in range(size):
        gates[j] = recurrent_n[j] * inner[j] * (one - saved[j])
    for j in range(size):
        grad_update[j] = grad[j] * (old[j] - n[j]) * update[j] * (one - update[j])
    for j in range(2 * size):
        recurrent[j] = gates[j]
    for j in range(size):
        direct[j] = grad[j] * update[j]


def _simple_forward(cell: int, from_input: Any, from_state: Any, saved: Any, new: Any) -> None:
    """saved (H,) receives the derivative."""
    one, zero = np.float32(1.0), np.float32(0.0)
    for j in range(len(new)):
        score = from_input[j] + from_state[j]
        if cell == SIGMOID:
            new[j] = one / (one + exponential(-score))
            saved[j] = new[j] * (one - new[j])
        else:
            new[j] = max(score, zero)
            saved[j] = one if score > zero else zero


def _simple_backward(grad: Any, saved: Any, gates: Any) -> None:
    for j in range(len(grad)):
        gates[j] = grad[j] * saved[j]


NO_BYTE_WEIGHTS = ByteWeights(np.empty((0, 0, COLUMNS), dtype=np.int32), *[np.empty(0, dtype=np.float32)] * 3)


class ByteGru(NamedTuple):
    """A GRU network whose products are of bytes, as `fill_byte_steps` reads it.

    Attributes:
        rows: (V, E) float32, the words' vectors.
        byte_kind: (0,) of the type of quantized inputs.
        from_input, from_state, projection: `Int8Weights.tables`; `NO_BYTE_WEIGHTS` if there is no projection.
    """

    rows: Any
    byte_kind: Any
    from_input: Any
    from_state: Any
    projection: Any


class HalfGru(NamedTuple):
    """A GRU network whose weights are float16, as `fill_steps` reads it.

    Attributes:
        rows: (V, E) float32, the words' vectors.
        from_input, from_state: `Float16Weights.tables`.
    """

    rows: Any
    from_input: Any
    from_state: Any


def fill_steps(word_id: Any, before: Any, state: Any, network: Any, following: Any) -> None:
    """Fills following (Q, H) from state (R, H)[before (Q,)] and word_id (Q,); network is a `HalfGru`."""
    inputs, which_word = _distinct_rows(network.rows, word_id)
    old, which_state = _distinct_rows(state, before)
    gates, recurrent = _product(inputs, network.from_input), _product(old, network.from_state)
    _fill_new_states(following, gates, recurrent, old, which_word, which_state)


def fill_byte_steps(word_id: Any, before: Any, state: Any, network: Any, following: Any) -> None:
    """Like `fill_steps`, for a `ByteGru`."""
    size = state.shape[1]
    inputs, which_word = _distinct_rows(network.rows, word_id)
    old, which_state = _distinct_rows(state, before)
    gates = byte_product(inputs, network.from_input, 3 * size, network.byte_kind)
    recurrent = byte_product(old, network.from_state, 3 * size, network.byte_kind)
    _fill_new_states(following, gates, recurrent, old, which_word, which_state)


def _distinct_rows(rows: Any, number: Any) -> Any:
    """The distinct rows among number (Q,) -> (D, width), and which of them each is (Q,)."""
    distinct, which = distinct_values(number)
    found = np.empty((len(distinct), rows.shape[1]), np.float32)
    for i in range(len(distinct)):
        found[i] = rows[distinct[i]]
    return found, which


def _fill_new_states(new: Any, gates: Any, recurrent: Any, old: Any, which_word: Any, which_state: Any) -> None:
    num, size = new.shape
    add_next_states(0, num, gates, recurrent, old, which_word, which_state, new, np.empty(4 * size, np.float32))


def _product(inputs: Any, tables: Any) -> Any:
    tiles, bias = tables
    outputs = np.empty((-(-len(inputs) // ROWS) * ROWS, len(bias)), np.float32)
    fill_products(outputs, inputs, tiles, bias)
    return outputs


def byte_product(inputs: Any, tables: Any, num_outputs: Any, byte_kind: Any) -> Any:
    """inputs (Q, E) float32 times the weights of `Int8Weights.tables`, (Q, num_outputs); see `ByteGru.byte_kind`."""
    outputs = np.empty((len(inputs), num_outputs), np.float32)
    num_rows = min(len(inputs) + -len(inputs) % ROWS, ROWS_AT_ONCE)
    left, products = room_for_products(num_rows, tables.tiles, byte_kind)
    fill_byte_products(outputs, inputs, 1, 0, tables, False, *nothing_follows(), left, products)
    return outputs
