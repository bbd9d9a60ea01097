"""Recurrent layers whose state is reset where a sentence starts: GRU and simple (Elman), and dropout from a seed.

`torch.nn.GRU` cannot reset states within a sequence, and a plain loop computes the gradient of the recurrent weight by
one product per step; here it is one product over all steps. Parameter names and the gate order r, z, n are those of
`torch.nn.GRU`. Dropout masks are computed from a seed (MurmurHash3's finalizer), so they are the same on any device
and need not be kept for the gradient.

Shapes: T steps, B streams, E inputs, H hidden, Q queries.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.kernels.byte_products import input_type
from asr.kernels.jit import arrays_of, jit_for, num_threads
from asr.kernels.linear import MAX_LOOP_ROWS, PackedLinear, PackedWeights, are_bytes_multiplied
from asr.kernels.precision import product_dtype
from asr.lm.rnn.recurrent_numba import (
    GRU,
    MIN_ROWS_FOR_TILES,
    NO_BYTE_WEIGHTS,
    RELU,
    SIGMOID,
    ByteGru,
    HalfGru,
    add_next_states,
    add_sentences,
    fill_byte_steps,
    fill_steps,
    looped_sequence,
    next_states,
    run_sentences,
)


def cell_forward(
    gates: Tensor, recurrent: Tensor, hidden: Tensor, next_keep: Tensor,
    saved: Tensor, out: Tensor, next_hidden: Tensor, next_previous: Tensor,
) -> None:  # fmt: skip
    """gates, recurrent (B, 3H), hidden (B, H) -> out (B, H), and what the next step starts from; saved (B, 4H) receives
    r, z, n and n's recurrent part."""
    size = hidden.shape[1]
    rz = torch.sigmoid(gates[:, : 2 * size].float() + recurrent[:, : 2 * size].float())
    from_state = recurrent[:, 2 * size :]
    n = torch.tanh(gates[:, 2 * size :].float() + rz[:, :size] * from_state.float())
    new = n + rz[:, size:] * (hidden - n)
    kept = new * next_keep
    out.copy_(new)
    next_hidden.copy_(kept)
    next_previous.copy_(kept)
    saved[:, : 2 * size].copy_(rz)
    saved[:, 2 * size : 3 * size].copy_(n)
    saved[:, 3 * size :].copy_(from_state)


def cell_backward(
    grad_out: Tensor, direct: Tensor, through: Tensor, next_keep: Tensor, saved: Tensor, previous: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """The new state's gradient, from its output and from the step after it (direct and through the recurrent weights),
    (B, H) -> gradients of both pre-activations (B, 3H) and of the old state's direct path (B, H)."""
    grad_recurrent, grad_gates, next_direct = results
    size = direct.shape[1]
    grad = grad_out + (direct + through.float()) * next_keep
    r, z, n, from_state = (part.float() for part in saved.split(size, dim=1))
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * from_state * r * (1 - r)
    grad_z = grad * (previous.float() - n) * z * (1 - z)
    for target, last in ((grad_recurrent, grad_n * r), (grad_gates, grad_n)):
        target[:, :size].copy_(grad_r)
        target[:, size : 2 * size].copy_(grad_z)
        target[:, 2 * size :].copy_(last)
    next_direct.copy_(grad * z)


@dataclass(frozen=True)
class GruCell:
    """The element-wise part of a step, plain or compiled."""

    forward: Callable[..., None]
    backward: Callable[..., None]


PLAIN_CELL = GruCell(cell_forward, cell_backward)


@lru_cache(maxsize=1)
def compiled_cell() -> GruCell:
    """The cell compiled by torch 2 and a C++ compiler; on a CPU three times as fast as the plain one."""
    return GruCell(torch.compile(cell_forward, dynamic=False), torch.compile(cell_backward, dynamic=False))


class GruLayer(nn.Module):
    """One layer; `compute_dtype` is what the matrix products of `forward` run in ("float32" or "bfloat16")."""

    def __init__(
        self, input_size: int, hidden_size: int, compute_dtype: str = "float32", compile_cell: bool = False
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.compute_dtype = product_dtype(compute_dtype)
        self.compile_cell = compile_cell
        self._from_input, self._from_state = PackedWeights(), PackedWeights()
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.zeros(3 * hidden_size))
        self.bias_hh = nn.Parameter(torch.zeros(3 * hidden_size))
        bound = 1 / math.sqrt(hidden_size)
        nn.init.uniform_(self.weight_ih, -bound, bound)
        nn.init.uniform_(self.weight_hh, -bound, bound)

    def forward(self, inputs: Tensor, state: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """inputs (T, B, E), state (B, H), keep (T, B, 1), 0 where the state is reset -> (T, B, H), last (B, H)."""
        parameters = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        outputs = None
        if self.compute_dtype == torch.float32 and not self.compile_cell:
            outputs = looped_sequence(GRU, inputs, state, keep, *parameters)
        if outputs is None:
            cell = compiled_cell() if self.compile_cell else PLAIN_CELL
            inputs = inputs.to(self.compute_dtype)
            outputs = _GruSequence.apply(inputs, state, keep, *parameters, cell)  # type: ignore[no-untyped-call]
        return outputs, outputs[-1].detach()

    def step(self, inputs: Tensor, state: Tensor, which: Tensor | None = None, before: Tensor | None = None) -> Tensor:
        """inputs (D, E), state (R, H) -> next state (Q, H), in float32.

        Row q reads inputs[which[q]] after state[before[q]], or the q-th of each where these (Q,) are None.
        """
        if inputs.device.type == "cpu" and not torch.is_grad_enabled():
            return self.next_state(self.input_gates(inputs), state, which, before)
        if which is not None:
            inputs = inputs.index_select(0, which)
        if before is not None:
            state = state.index_select(0, before)
        return torch.gru_cell(inputs, state, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)

    def input_gates(self, inputs: Tensor) -> Tensor:
        """The inputs' part of the gates: inputs (L, E) -> (L, 3H), without gradient."""
        return self._from_input(inputs, self.weight_ih, self.bias_ih)

    def small_batch_weights(self) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
        """The packed weights for inputs and for states, see `PackedWeights.small_batch_weights`."""
        from_input = self._from_input.small_batch_weights(self.weight_ih, self.bias_ih)
        return from_input, self._from_state.small_batch_weights(self.weight_hh, self.bias_hh)

    def packed(self, gates: Tensor, input_idx: Tensor, sizes: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
        """Runs sequences side by side, the longest first, without gradient.

        gates (D, 3H) of the distinct inputs, input_idx (L,) which of them each sequence reads, step after step, state
        (B, H); step t has the first sizes[t] sequences.

        Returns:
            outputs (L, H), and the last step's.
        """
        size = self.hidden_size
        loop = jit_for(add_sentences, state.detach()) if len(input_idx) >= MIN_ROWS_FOR_TILES else None
        if loop is not None:
            gates = gates + F.pad(self.bias_hh[: 2 * size], (0, size))
            return run_sentences(loop, GRU, gates, input_idx, sizes, state, self.weight_hh, self.bias_hh[2 * size :])
        outputs = []
        for from_input in gates.index_select(0, input_idx).split(sizes):
            state = self.next_state(from_input, state[: len(from_input)])
            outputs.append(state)
        return torch.cat(outputs), state

    def next_state(
        self, gates: Tensor, state: Tensor, which: Tensor | None = None, before: Tensor | None = None
    ) -> Tensor:
        """gates (D, 3H) of the inputs, the rest as for `step` -> next state (Q, H), without gradient.

        The product of a state is computed once, for all rows that follow it.
        """
        size = self.hidden_size
        state = state.contiguous()
        from_state = self._from_state(state, self.weight_hh, self.bias_hh)
        loop = jit_for(add_next_states, state)
        if loop is not None:
            return next_states(loop, gates, from_state, state, which, before)
        if which is not None:
            gates = gates.index_select(0, which)
        if before is not None:
            from_state, state = from_state.index_select(0, before), state.index_select(0, before)
        rz = torch.add(gates[:, : 2 * size], from_state[:, : 2 * size]).sigmoid_()
        n = torch.addcmul(gates[:, 2 * size :], rz[:, :size], from_state[:, 2 * size :]).tanh_()
        # As torch.lerp, which is slow in torch 1.13.
        return torch.addcmul(n, rz[:, size:], state - n)


class _GruSequence(torch.autograd.Function):
    """inputs (T, B, E) in the compute dtype -> outputs (T, B, H) float32."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, state: Tensor, keep: Tensor,
        weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor, cell: GruCell,
    ) -> Tensor:  # fmt: skip
        num_steps, num_streams, dtype = inputs.shape[0], inputs.shape[1], inputs.dtype
        gates = F.linear(inputs, weight_ih.to(dtype), bias_ih.to(dtype))
        weight_t, bias = weight_hh.to(dtype).t(), bias_hh.to(dtype)
        outputs = torch.empty(num_steps, num_streams, state.shape[1], dtype=torch.float32, device=inputs.device)
        previous = torch.empty_like(outputs, dtype=dtype)
        saved = torch.empty(num_steps, num_streams, 4 * state.shape[1], dtype=dtype, device=inputs.device)
        hidden = state.float() * keep[0]
        previous[0] = hidden
        for step in range(num_steps):
            recurrent = torch.addmm(bias, previous[step], weight_t)
            following = min(step + 1, num_steps - 1)
            next_hidden = torch.empty_like(hidden)
            next_previous = previous[following] if following > step else torch.empty_like(previous[step])
            cell.forward(
                gates[step], recurrent, hidden, keep[following], saved[step], outputs[step], next_hidden, next_previous
            )
            hidden = next_hidden
        ctx.save_for_backward(inputs, keep, weight_ih, weight_hh, previous, saved)
        ctx.cell = cell
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, keep, weight_ih, weight_hh, previous, saved = ctx.saved_tensors
        num_steps, num_streams, hidden_size = previous.shape
        dtype = previous.dtype
        weight = weight_hh.to(dtype)
        grad_recurrent = torch.empty(num_steps, num_streams, 3 * hidden_size, dtype=dtype, device=inputs.device)
        grad_gates = torch.empty_like(grad_recurrent)
        direct = torch.zeros_like(grad_outputs[0])
        through = torch.zeros_like(previous[0])
        no_keep = torch.zeros_like(keep[0])
        for step in range(num_steps - 1, -1, -1):
            next_keep = keep[step + 1] if step + 1 < num_steps else no_keep
            next_direct = torch.empty_like(direct)
            ctx.cell.backward(
                grad_outputs[step], direct, through, next_keep, saved[step], previous[step],
                (grad_recurrent[step], grad_gates[step], next_direct),
            )  # fmt: skip
            direct = next_direct
            through = torch.mm(grad_recurrent[step], weight)
        grad_state = (direct + through) * keep[0]
        flat_recurrent, flat_gates = grad_recurrent.flatten(0, 1), grad_gates.flatten(0, 1)
        # The biases' gradients as products: summing a long bfloat16 matrix is slow.
        ones = flat_gates.new_ones(1, len(flat_gates))
        return (
            torch.mm(flat_gates, weight_ih.to(dtype)).view_as(inputs),
            grad_state,
            None,
            torch.mm(flat_gates.t(), inputs.flatten(0, 1)).float(),
            torch.mm(flat_recurrent.t(), previous.flatten(0, 1)).float(),
            torch.mm(ones, flat_gates)[0].float(),
            torch.mm(ones, flat_recurrent)[0].float(),
            None,
        )


_ACTIVATIONS = {"sigmoid": torch.sigmoid, "relu": torch.relu}


class SimpleRnnLayer(nn.Module):
    """state' = activation(W_ih input + W_hh state + b).

    The ReLU layer's recurrent weights start at half the identity: with random weights its states grow without bound.
    """

    def __init__(
        self, input_size: int, hidden_size: int, activation: Literal["sigmoid", "relu"], compute_dtype: str = "float32"
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.activation = activation
        self._cell = RELU if activation == "relu" else SIGMOID
        self.compute_dtype = product_dtype(compute_dtype)
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        bound = 1 / math.sqrt(hidden_size)
        nn.init.uniform_(self.weight_ih, -bound, bound)
        if activation == "relu":
            self.weight_hh.data.copy_(0.5 * torch.eye(hidden_size))
        else:
            nn.init.uniform_(self.weight_hh, -bound, bound)

    def forward(self, inputs: Tensor, state: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """inputs (T, B, E), state (B, H), keep (T, B, 1), 0 where the state is reset -> (T, B, H), last (B, H)."""
        dtype = self.compute_dtype
        if dtype == torch.float32:
            no_bias = torch.zeros_like(self.bias)
            looped = looped_sequence(
                self._cell, inputs, state, keep, self.weight_ih, self.weight_hh, self.bias, no_bias
            )
            if looped is not None:
                return looped, looped[-1].detach()
        activation = _ACTIVATIONS[self.activation]
        from_input = F.linear(inputs.to(dtype), self.weight_ih.to(dtype), self.bias.to(dtype)).float()
        weight = self.weight_hh.to(dtype)
        outputs = []
        for step, kept in zip(from_input, keep, strict=True):
            state = activation(step + F.linear((state * kept).to(dtype), weight).float())
            outputs.append(state)
        return torch.stack(outputs), state.detach()

    def step(self, inputs: Tensor, state: Tensor, which: Tensor | None = None, before: Tensor | None = None) -> Tensor:
        """inputs (D, E), state (R, H) -> next state (Q, H), in float32; which and before as for `GruLayer.step`."""
        return self.next_state(self.input_gates(inputs), state, which, before)

    def next_state(
        self, gates: Tensor, state: Tensor, which: Tensor | None = None, before: Tensor | None = None
    ) -> Tensor:
        """gates (D, H) of the inputs, the rest as for `step` -> next state (Q, H)."""
        from_state = F.linear(state, self.weight_hh)
        if which is not None:
            gates = gates.index_select(0, which)
        if before is not None:
            from_state = from_state.index_select(0, before)
        return _ACTIVATIONS[self.activation](gates + from_state)

    def input_gates(self, inputs: Tensor) -> Tensor:
        """The inputs' part of the sum: inputs (L, E) -> (L, H)."""
        return F.linear(inputs, self.weight_ih, self.bias)

    def packed(self, gates: Tensor, input_idx: Tensor, sizes: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
        """Runs sequences side by side, like `GruLayer.packed`: gates (D, H), state (B, H)."""
        loop = jit_for(add_sentences, state.detach()) if len(input_idx) >= MIN_ROWS_FOR_TILES else None
        if loop is not None:
            return run_sentences(loop, self._cell, gates, input_idx, sizes, state, self.weight_hh, self.bias)
        weight_t = self.weight_hh.t()
        activation = torch.relu_ if self.activation == "relu" else torch.sigmoid_
        inputs = gates.index_select(0, input_idx)
        outputs = torch.empty_like(inputs)
        for from_input, out in zip(inputs.split(sizes), outputs.split(sizes), strict=True):
            state = activation(torch.addmm(from_input, state[: len(from_input)], weight_t, out=out))
        return outputs, state


_BITS = 0xFFFFFFFF
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35


class RowsOfWhole(NamedTuple):
    """Where elements are in a larger array: row r, of `length` elements, begins there at r * stride + first."""

    length: int
    stride: int
    first: int


def seeded_dropout(inputs: Tensor, probability: float, seed: int, whole: RowsOfWhole | None = None) -> Tensor:
    """inputs, of any shape, each set to zero with this probability; the others are divided by one minus it.

    Which ones are zeroed depends on the seed and on their places, in `inputs` or in the whole that these are part of.
    """
    if whole is None:
        whole = RowsOfWhole(inputs.numel(), inputs.numel(), 0)
    outputs: Tensor = _SeededDropout.apply(inputs, probability, seed, whole)  # type: ignore[no-untyped-call]
    return outputs


class _SeededDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, probability: float, seed: int, whole: RowsOfWhole) -> Tensor:
        ctx.arguments = probability, seed, whole
        return _masked(inputs, probability, seed, whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _masked(grad, *ctx.arguments), None, None, None


def _masked(inputs: Tensor, probability: float, seed: int, whole: RowsOfWhole) -> Tensor:
    key, limit, scale = seed & _BITS, int(probability * (_BITS + 1)), 1 / (1 - probability)
    loop = jit_for(fill_kept, inputs.detach())
    if loop is not None:
        inputs = inputs.detach().contiguous()
        outputs = torch.empty_like(inputs)
        loop(outputs.view(-1).numpy(), inputs.view(-1).numpy(), key, limit, np.float32(scale), *whole)
        return outputs
    place = torch.arange(inputs.numel(), device=inputs.device).view(inputs.shape)
    row = torch.div(place, max(1, whole.length), rounding_mode="floor")
    place = place + row * (whole.stride - whole.length) + whole.first
    return inputs * ((_mixed(_mixed(place) ^ key) >= limit) * scale).to(inputs.dtype)


def _mixed(number: Tensor) -> Tensor:
    """A permutation of the 32-bit numbers, as int64."""
    number = ((number ^ (number >> 16)) * _FIRST) & _BITS
    number = ((number ^ (number >> 13)) * _SECOND) & _BITS
    return number ^ (number >> 16)


def fill_kept(
    outputs: Any, inputs: Any, key: int, limit: int, scale: float, length: int, stride: int, first: int
) -> None:
    """outputs (L,) = inputs (L,) * scale where the hash is at least the limit, else 0; for `jit`."""
    zero, word = np.float32(0.0), np.uint32(key)
    for row in range(len(inputs) // max(1, length)):
        begin, shift = row * length, row * (stride - length) + first
        for i in range(begin, begin + length):
            outputs[i] = inputs[i] * scale if _mixed_word(_mixed_word(np.uint32(i + shift)) ^ word) >= limit else zero


def _mixed_word(number: Any) -> Any:
    number = np.uint32((number ^ (number >> np.uint32(16))) * np.uint32(_FIRST))
    number = np.uint32((number ^ (number >> np.uint32(13))) * np.uint32(_SECOND))
    return np.uint32(number ^ (number >> np.uint32(16)))


# More rows are divided among threads, if there are several.
_MAX_BYTE_ROWS = 128


def gru_step(layer: GruLayer, rows: Tensor, state: Tensor, before: Tensor | None, word_id: Tensor) -> Tensor | None:
    """One step of a GRU: state (R, H)[before (Q,)] and word_id (Q,), with the words' vectors rows (V, E) -> (Q, H).

    None if the weights are kept neither in bytes nor in float16 (`float16_weights`), for many rows, or without numba.
    """
    are_bytes = are_bytes_multiplied()
    loop = jit_for(fill_byte_steps if are_bytes else fill_steps, state)
    most = max_byte_rows() if are_bytes else MAX_LOOP_ROWS
    if loop is None or len(word_id) > most or torch.is_grad_enabled():
        return None
    network = byte_gru(layer, rows, None) if are_bytes else _half_gru(layer, rows)
    if network is None:
        return None
    following = state.new_empty(len(word_id), state.shape[1])
    before = torch.arange(len(word_id)) if before is None else before
    loop(*arrays_of(word_id, before, state), network, following.numpy())
    return following


def max_byte_rows() -> int:
    """How many rows a loop should multiply in one call; more are divided among threads, if there are several."""
    return _MAX_BYTE_ROWS if num_threads() > 1 else sys.maxsize


def byte_gru(layer: GruLayer, rows: Tensor, projection: PackedLinear | None) -> ByteGru | None:
    """The arrays of a network with word vectors rows (V, E), for `fill_byte_steps`.

    None where this thread does not multiply bytes.
    """
    if not are_bytes_multiplied():
        return None
    projected = NO_BYTE_WEIGHTS if projection is None else projection.small_batch_weights()
    products = *layer.small_batch_weights(), projected
    if None in products:
        return None
    (vectors,) = arrays_of(rows)
    return ByteGru(vectors, np.empty(0, dtype=input_type()), *products)


def _half_gru(layer: GruLayer, rows: Tensor) -> HalfGru | None:
    """Like `byte_gru`, for `fill_steps`; None if no float16 weights are kept."""
    from_input, from_state = layer.small_batch_weights()
    if from_input is None or from_state is None:
        return None
    (vectors,) = arrays_of(rows)
    return HalfGru(vectors, from_input, from_state)
