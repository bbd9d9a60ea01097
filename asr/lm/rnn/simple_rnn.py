"""A simple recurrent (Elman) layer, sigmoid or ReLU, whose state is set back where a sentence starts.

Shapes: T steps, B streams, E inputs, H hidden, Q queries.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.lm.compiled_loop import loop_for
from asr.lm.rnn.recurrent_kernel import RELU, ROWS_WORTH_TILES, SIGMOID, add_sentences, run_sentences
from asr.lm.rnn.recurrent_training import looped_sequence

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
        self.compute_dtype: torch.dtype = getattr(torch, compute_dtype)
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
        """inputs (T, B, E), state (B, H), keep (T, B, 1), 0 where the state is set back -> (T, B, H), last (B, H)."""
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
        """The part of the sum that inputs (L, E) alone decide, (L, H)."""
        return F.linear(inputs, self.weight_ih, self.bias)

    def packed(self, gates: Tensor, input_idx: Tensor, sizes: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
        """Steps of fewer and fewer sequences side by side, as `GruLayer.packed`: gates (D, H), state (B, H)."""
        loop = loop_for(add_sentences, state.detach()) if len(input_idx) >= ROWS_WORTH_TILES else None
        if loop is not None:
            return run_sentences(loop, self._cell, gates, input_idx, sizes, state, self.weight_hh, self.bias)
        return self._packed_by_tensors(gates.index_select(0, input_idx), sizes, state)

    def _packed_by_tensors(self, gates: Tensor, sizes: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
        weight_t = self.weight_hh.t()
        activation = torch.relu_ if self.activation == "relu" else torch.sigmoid_
        outputs = torch.empty_like(gates)
        begin = 0
        for from_input in gates.split(sizes):
            state = state[: len(from_input)]
            out = outputs[begin : begin + len(from_input)]
            state = activation(torch.addmm(from_input, state, weight_t, out=out))
            begin += len(from_input)
        return outputs, state
