"""A gated recurrent layer whose state is set back where a sentence starts.

Shapes: T steps, B streams, E inputs, H hidden, Q queries. Gate order r, z, n and parameter names as in `torch.nn.GRU`.

`torch.nn.GRU` cannot reset states inside a sequence, and the gradient of a plain loop multiplies out the recurrent
weight's gradient once a step; here that is one product over all steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.fixed_linear import FixedLinear
from asr.lm.compiled_loop import loop_for
from asr.lm.rnn.gru_cell import PLAIN_CELL, GruCell, compiled_cell
from asr.lm.rnn.recurrent_kernel import (
    GRU,
    ROWS_WORTH_TILES,
    add_next_states,
    add_sentences,
    next_states,
    run_sentences,
)
from asr.lm.rnn.recurrent_training import looped_sequence


class GruLayer(nn.Module):
    """One layer; `compute_dtype` is what the matrix products of `forward` run in ("float32" or "bfloat16")."""

    def __init__(
        self, input_size: int, hidden_size: int, compute_dtype: str = "float32", compile_cell: bool = False
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.compute_dtype: torch.dtype = getattr(torch, compute_dtype)
        self.compile_cell = compile_cell
        self._from_input, self._from_state = FixedLinear(), FixedLinear()
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.zeros(3 * hidden_size))
        self.bias_hh = nn.Parameter(torch.zeros(3 * hidden_size))
        bound = 1 / math.sqrt(hidden_size)
        nn.init.uniform_(self.weight_ih, -bound, bound)
        nn.init.uniform_(self.weight_hh, -bound, bound)

    def forward(self, inputs: Tensor, state: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """inputs (T, B, E), state (B, H), keep (T, B, 1), 0 where the state is set back -> (T, B, H), last (B, H)."""
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
        """The part of the gates that inputs (L, E) alone decide, (L, 3H), without gradient."""
        return self._from_input(inputs, self.weight_ih, self.bias_ih)

    def tables_of_few(self) -> tuple[tuple[Any, Any] | None, tuple[Any, Any] | None]:
        """What a loop for few rows reads of the products with inputs and states, as of `FixedLinear`."""
        from_input = self._from_input.tables_of_few(self.weight_ih, self.bias_ih)
        return from_input, self._from_state.tables_of_few(self.weight_hh, self.bias_hh)

    def packed(self, gates: Tensor, input_idx: Tensor, sizes: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
        """Steps of fewer and fewer sequences side by side, without gradient.

        gates (D, 3H) of the distinct inputs, input_idx (L,) the input of each step's sequences one step after the
        other, state (B, H); step t has the first sizes[t] of the sequences.

        Returns:
            outputs (L, H), and the last step's.
        """
        size = self.hidden_size
        loop = loop_for(add_sentences, state.detach()) if len(input_idx) >= ROWS_WORTH_TILES else None
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

        The product of a state is made once, however many rows follow it.
        """
        size = self.hidden_size
        state = state.contiguous()
        from_state = self._from_state(state, self.weight_hh, self.bias_hh)
        loop = loop_for(add_next_states, state)
        if loop is not None:
            return next_states(loop, gates, from_state, state, which, before)
        if which is not None:
            gates = gates.index_select(0, which)
        if before is not None:
            from_state, state = from_state.index_select(0, before), state.index_select(0, before)
        rz = torch.add(gates[:, : 2 * size], from_state[:, : 2 * size]).sigmoid_()
        n = torch.addcmul(gates[:, 2 * size :], rz[:, :size], from_state[:, 2 * size :]).tanh_()
        # As torch.lerp, whose loop torch 1.13 has not made fast.
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
                grad_recurrent[step], grad_gates[step], next_direct,
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
