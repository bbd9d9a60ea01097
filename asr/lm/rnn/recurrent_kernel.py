"""Recurrent layers over sentences side by side, products and activations of a few states at a time in one loop.

Shapes: L words, T steps, B sentences, H hidden, G gates (3, or 1 in a simple layer), D distinct inputs, P tiles of U
hidden units, K of H rounded up to a multiple of 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr.lm.compiled_loop import in_threads
from asr.lm.rnn.tile_kernel import LANES, add_products, exponentials

_MAX_UNITS = 128  # a tile of a wide layer's weights should leave a core's second cache room for more
ROWS_WORTH_TILES = 512  # to lay out the weights in tiles costs as much as so many words, or fewer
GRU, SIGMOID, RELU = 0, 1, 2


def run_sentences(
    loop: Callable[..., None], cell: int, gates: Tensor, input_idx: Tensor, sizes: list[int], state: Tensor,
    weight: Tensor, bias_n: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """gates (D, GH) of the distinct inputs, input_idx (L,) which of them, sizes (T,), state (B, H), weight (GH, H),
    bias_n (H,), of a GRU's n from the state -> outputs (L, H), and the last step's."""
    size = state.shape[1]
    num_tiles = -(-size // _MAX_UNITS)
    units = -(-size // (num_tiles * LANES)) * LANES
    by_gate = F.pad(weight.detach().view(-1, size, size), (0, -size % 4, 0, num_tiles * units - size))
    num_gates, width = len(by_gate), by_gate.shape[2]
    tiles = by_gate.view(num_gates, num_tiles, units, width).permute(1, 3, 0, 2).contiguous()
    states = state.new_empty(len(state) + len(input_idx), size)
    states[: len(state)] = state

    def work(begin: int, end: int) -> None:
        arrays = (
            gates, input_idx, torch.tensor(sizes), states, tiles.view(num_tiles, width, num_gates * units), bias_n,
            gates.new_zeros(4, width), gates.new_zeros(4, num_gates * units), gates.new_empty(num_gates * units),
        )  # fmt: skip
        loop(cell, begin, end, *(array.detach().contiguous().numpy() for array in arrays))

    in_threads(work, len(state), rows_at_least=64)
    return states[len(state) :], states[len(states) - sizes[-1] :]


def add_sentences(
    cell: int, first_sentence: int, end_sentence: int, gates: Any, input_idx: Any, sizes: Any, states: Any, tiles: Any,
    bias_n: Any, left: Any, scores: Any, room: Any,
) -> None:  # fmt: skip
    """Fills states (B + L, H), which starts with the B initial ones, for some of the sentences; for `compiled_loop`.

    tiles (P, K, GU), left (4, K), 0 beyond H; scores (4, GU) and room (GU,) to work in.
    """
    size = states.shape[1]
    units = tiles.shape[2] // 3 if cell == GRU else tiles.shape[2]
    room_bits = room.view(np.int32)
    before, now = 0, len(states) - len(input_idx)
    num_initial = now
    for step in range(len(sizes)):
        end = min(end_sentence, sizes[step])
        for tile in range(tiles.shape[0]):
            first = tile * units
            count = min(units, size - first)
            for begin in range(first_sentence, end, 4):
                # Where fewer than four sentences are left, the last is computed again in their place.
                for i in range(4):
                    sentence = min(begin + i, end - 1)
                    _copy(left[i], states[before + sentence], size)
                    inputs = gates[input_idx[now - num_initial + sentence]]
                    _copy(scores[i], inputs[first:], count)
                    if cell == GRU:
                        _copy(scores[i, units:], inputs[size + first :], count)
                        _copy(scores[i, 2 * units :], bias_n[first:], count)
                add_products(scores, left, tiles[tile])
                for i in range(4):
                    sentence = min(begin + i, end - 1)
                    new = states[now + sentence, first : first + count]
                    if cell == GRU:
                        inputs = gates[input_idx[now - num_initial + sentence], 2 * size + first :]
                        _gru_cell(scores[i], inputs, left[i, first:], new, units, room, room_bits)
                    elif cell == SIGMOID:
                        _sigmoid_cell(scores[i], new, room, room_bits)
                    else:
                        for j in range(count):
                            new[j] = max(scores[i, j], np.float32(0.0))
        before = now
        now += sizes[step]


def _copy(to: Any, values: Any, count: int) -> None:
    for j in range(count):
        to[j] = values[j]


def _sigmoid_cell(score: Any, new: Any, room: Any, room_bits: Any) -> None:
    exponentials(score, len(new), -1.0, np.float32(0.0), room, room_bits)
    for j in range(len(new)):
        new[j] = np.float32(1.0) / (np.float32(1.0) + score[j])


def _gru_cell(score: Any, inputs: Any, old: Any, new: Any, units: int, room: Any, room_bits: Any) -> None:
    """score (3U,): sums of r and z, and n's part from the state; inputs, n's other part, old and new states."""
    zero, one, two = np.float32(0.0), np.float32(1.0), np.float32(2.0)
    exponentials(score, 2 * units, -1.0, zero, room, room_bits)
    reset, update, from_state = score[:units], score[units : 2 * units], score[2 * units :]
    for j in range(len(new)):
        from_state[j] = inputs[j] + from_state[j] / (one + reset[j])
    exponentials(from_state, len(new), -2.0, zero, room, room_bits)
    for j in range(len(new)):
        n = two / (one + from_state[j]) - one
        new[j] = n + (old[j] - n) / (one + update[j])
