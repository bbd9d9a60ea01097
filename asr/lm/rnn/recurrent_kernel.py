"""Recurrent layers over sentences side by side, products and activations of a few states at a time in one loop.

Shapes: Q rows, R states before them, L words, T steps, B sentences, H hidden, G gates (3, or 1 in a simple layer), D
distinct inputs, P tiles of U hidden units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr.lm.compiled_loop import arrays_of
from asr.lm.rnn.tile_kernel import NARROW, ROWS, add_products, exponential
from asr.lm.threads import in_threads

_MAX_UNITS = 128  # a tile of a wide layer's weights should leave a core's second cache room for more
_ROWS_AT_LEAST = 256  # of a thread's part
ROWS_WORTH_TILES = 512  # to lay out the weights in tiles costs as much as so many words, or fewer
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
    """Fills states (B + L, H), which starts with the B initial ones; for `compiled_loop`.

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
                # Where fewer sentences are left, the last is computed again in their place.
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
    """Fills the rows begin .. end - 1 of new (Q, H), for `compiled_loop`; score (4H,) to work in."""
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
