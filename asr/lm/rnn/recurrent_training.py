"""A recurrent layer's steps over streams in training, forward and backward, as compiled loops in float32.

Threads share out the streams, each of which goes its own way, and then the rows of the weights' gradients, products
over all steps and streams; so the results do not depend on the number of threads.

Shapes: T steps, B streams, E inputs, H hidden, G sums of the gates (3H, or H in a simple layer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.lm.compiled_loop import arrays_of, existing_loop, loop_for
from asr.lm.rnn.product_kernel import add_products_by_column, add_products_by_row, padded, padded_room
from asr.lm.rnn.recurrent_kernel import GRU, SIGMOID
from asr.lm.rnn.tile_kernel import ROWS, exponential
from asr.lm.threads import in_threads


def looped_sequence(
    cell: int, inputs: Tensor, state: Tensor, keep: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor,
    bias_hh: Tensor,
) -> Tensor | None:  # fmt: skip
    """inputs (T, B, E), state (B, H), keep (T, B, 1), 0 where the state is set back, weights (G, E) and (G, H), biases
    (G,) -> outputs (T, B, H), with gradients; None where loops do not serve."""
    if loop_for(fill_outputs, inputs.detach()) is None:
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
        previous, saved = (
            padded_room(num_steps, rows, size),
            torch.empty(num_steps, rows, 4 * size if cell == GRU else size),
        )
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
        # In a simple layer what comes from inputs and from states are added, and have one gradient.
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
    loop = existing_loop(function)
    arrays = arrays_of(*tensors)

    def work(begin: int, end: int) -> None:
        loop(cell, ROWS * begin, ROWS * end, *arrays)

    in_threads(work, arrays[0].shape[1] // ROWS, rows_at_least=1)


def _weight_gradient(grad: Tensor, factor: Tensor) -> Tensor:
    """grad (T, B, G), factor (T, B, E) -> the sum of their outer products (G, E), padded as they are."""
    loop = existing_loop(add_products_by_column)
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
    # Loop by loop: over many arrays at once the compiler uses no vector instructions.
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
