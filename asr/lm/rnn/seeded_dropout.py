"""Dropout whose mask follows from a seed: the same on any device, and drawn again for the gradient instead of kept.

Each place's number is mixed with the seed by MurmurHash3's last step, one pass where torch's generator takes a
hundred times as long as the product by its mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.lm.compiled_loop import loop_for

_BITS = 0xFFFFFFFF
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35


def seeded_dropout(inputs: Tensor, probability: float, seed: int) -> Tensor:
    """inputs, of any shape, each set to zero with that probability, and the others divided by what it leaves."""
    outputs: Tensor = _SeededDropout.apply(inputs, probability, seed)  # type: ignore[no-untyped-call]
    return outputs


class _SeededDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, probability: float, seed: int) -> Tensor:
        ctx.arguments = probability, seed
        return _masked(inputs, probability, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _masked(grad, *ctx.arguments), None, None


def _masked(inputs: Tensor, probability: float, seed: int) -> Tensor:
    key, limit, scale = seed & _BITS, int(probability * (_BITS + 1)), 1 / (1 - probability)
    loop = loop_for(fill_kept, inputs.detach())
    if loop is not None:
        inputs = inputs.detach().contiguous()
        outputs = torch.empty_like(inputs)
        loop(outputs.view(-1).numpy(), inputs.view(-1).numpy(), key, limit, np.float32(scale))
        return outputs
    place = torch.arange(inputs.numel(), device=inputs.device).view(inputs.shape)
    return inputs * ((_mixed(_mixed(place) ^ key) >= limit) * scale).to(inputs.dtype)


def _mixed(number: Tensor) -> Tensor:
    """A permutation of the numbers of 32 bits, in int64."""
    number = ((number ^ (number >> 16)) * _FIRST) & _BITS
    number = ((number ^ (number >> 13)) * _SECOND) & _BITS
    return number ^ (number >> 16)


def fill_kept(outputs: Any, inputs: Any, key: int, limit: int, scale: float) -> None:
    """outputs (L,) = inputs (L,) * scale where the hash is at least the limit, else 0; for `compiled_loop`."""
    zero, word = np.float32(0.0), np.uint32(key)
    for i in range(len(inputs)):
        outputs[i] = inputs[i] * scale if _mixed_word(_mixed_word(np.uint32(i)) ^ word) >= limit else zero


def _mixed_word(number: Any) -> Any:
    number = np.uint32((number ^ (number >> np.uint32(16))) * np.uint32(_FIRST))
    number = np.uint32((number ^ (number >> np.uint32(13))) * np.uint32(_SECOND))
    return np.uint32(number ^ (number >> np.uint32(16)))
