"""Factorized layers with quantized inputs, one after the other in one compiled loop.

Layer by layer, all frames of a batch would pass through memory several times for each layer. Here some hundred rows go
through all layers before the next ones, and stay in the L2 cache. The numbers are the same.

Shapes: N utterances, T frames of which the layers leave T', D channels, B channels of a bottleneck, L layers, M parts;
G and W are those of `asr.kernels.byte_products`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.kernels.byte_products import (
    ROWS_AT_ONCE,
    ByteWeights,
    NormAndBypass,
    fill_byte_products,
    input_type,
    nothing_follows,
    quantized_weights,
    room_for_products,
)
from asr.kernels.jit import in_threads, jit_required, num_threads

_ROWS_IN_CACHE = 320  # of a part; with their bottlenecks they take about 1 MB
_ROWS_AT_LEAST = 64  # of a thread's part


class LayerWeights(NamedTuple):
    """A layer: its two factors, and the norm after its ReLU as a factor of each output and what is added.

    Attributes:
        factor: (2 B, D), or (B, D) if the stride is 0.
        factor_bias: (2 B,) or (B,).
        expand: (D, 2 B) or (D, B).
        expand_bias: (D,).
        gain: (D,).
        offset: (D,).
        stride: see `asr.kernels.byte_products.joined_taps`.
    """

    factor: Tensor
    factor_bias: Tensor
    expand: Tensor
    expand_bias: Tensor
    gain: Tensor
    offset: Tensor
    stride: int


class Int8Layers:
    """Layers of equal shapes; needs `has_byte_products`.

    Each computes gain * relu(expand taps + bias) + offset + share * input, where taps are `joined_taps` of the products
    of the input and the first factor, and input frames without an output are left out.

    Args:
        layers: at least one.
        share: of the bypass.
        rows_in_cache: about how many output rows go through all layers together.
    """

    def __init__(self, layers: Sequence[LayerWeights], share: float, rows_in_cache: int = _ROWS_IN_CACHE) -> None:
        self._rows_in_cache = rows_in_cache
        self._loop = jit_required(fill_layers)
        self._tables = (
            _stacked([quantized_weights(layer.factor, layer.factor_bias) for layer in layers]),
            _stacked([quantized_weights(layer.expand, layer.expand_bias) for layer in layers]),
            NormAndBypass(
                torch.stack([layer.gain for layer in layers]).numpy(),
                torch.stack([layer.offset for layer in layers]).numpy(),
                np.float32(share),
            ),
            np.array([layer.stride for layer in layers]),
        )
        self._num_lost = 2 * sum(layer.stride for layer in layers)
        self._bottleneck = len(layers[0].factor)

    def __call__(self, inputs: Tensor) -> Tensor:
        """(N, T, D) -> (N, T', D); a row that reads NaN or infinity becomes NaN."""
        num_utterances, length, num_channels = inputs.shape
        num_left = max(length - self._num_lost, 0)
        outputs = inputs.new_empty(num_utterances, num_left, num_channels)
        read, filled = inputs.detach().contiguous().numpy(), outputs.numpy()
        parts = self._parts(num_utterances, num_left)

        def work(begin: int, end: int) -> None:
            self._loop(filled, read, parts[begin:end], *self._tables, np.empty(0, dtype=input_type()), self._bottleneck)

        in_threads(work, len(parts), rows_at_least=1)
        return outputs

    def _parts(self, num_utterances: int, length: int) -> Any:
        """(M, 4): first utterance, number of utterances, first output frame, number of frames; several are whole."""
        of_thread = max(_ROWS_AT_LEAST, -(-num_utterances * length // num_threads()))
        rows = min(self._rows_in_cache, of_thread)
        together = max(1, rows // max(1, length + self._num_lost))
        num_cuts = -(-length // rows)
        bounds = [length * cut // num_cuts for cut in range(num_cuts + 1)] if num_cuts else []
        return np.array(
            [
                (first, min(together, num_utterances - first), begin, end - begin)
                for first in range(0, num_utterances, together)
                for begin, end in itertools.pairwise(bounds)
            ],
            dtype=np.int64,
        ).reshape(-1, 4)


def _stacked(tables: Sequence[ByteWeights]) -> ByteWeights:
    return ByteWeights(*(torch.stack(columns).numpy() for columns in zip(*tables, strict=True)))


def fill_layers(
    outputs: Any, inputs: Any, parts: Any, factor: Any, expand: Any, norm: Any, strides: Any, byte_kind: Any,
    bottleneck: Any,
) -> None:  # fmt: skip
    """Fills outputs (N, T', D), for `jit`.

    inputs (N, T, D); parts (M, 4), see `Int8Layers._parts`. factor and expand are `ByteWeights` and norm is a
    `NormAndBypass` whose arrays have L rows more, one of each layer; strides (L,). byte_kind (0,) has the type of
    quantized inputs; `bottleneck` is how many outputs the first factor has.
    """
    num_channels, num_lost = inputs.shape[2], 2 * strides.sum()
    num_rows = 0
    for part in range(len(parts)):
        num_rows = max(num_rows, parts[part, 1] * (parts[part, 3] + num_lost))
    rows, hidden = np.empty((num_rows, num_channels), np.float32), np.empty((num_rows, bottleneck), np.float32)
    wide, few = room_for_products(ROWS_AT_ONCE, factor.tiles[0], byte_kind)
    narrow, many = room_for_products(ROWS_AT_ONCE, expand.tiles[0], byte_kind)
    no_norm, no_bypass = nothing_follows()
    for part in range(len(parts)):
        first, together, begin, count = parts[part]
        length = count + num_lost
        for at in range(together):
            rows[at * length : (at + 1) * length] = inputs[first + at, begin : begin + length]
        for layer in range(len(strides)):
            stride = strides[layer]
            first_weights, second_weights = _of_layer(factor, layer), _of_layer(expand, layer)
            own_norm = NormAndBypass(norm.gain[layer], norm.offset[layer], norm.share)
            fill_byte_products(
                hidden[: together * length], rows, 1, 0, first_weights, False, no_norm, no_bypass, wide, few
            )
            left = length - 2 * stride
            # In place: a row is read, as the bypass, before an output is written there.
            fill_byte_products(
                rows[: together * left], hidden, left, stride, second_weights, True, own_norm, rows, narrow, many
            )
            length = left
        for at in range(together):
            outputs[first + at, begin : begin + count] = rows[at * count : (at + 1) * count]


def _of_layer(weights: Any, layer: Any) -> Any:
    return ByteWeights(weights.tiles[layer], weights.step[layer], weights.total[layer], weights.bias[layer])
