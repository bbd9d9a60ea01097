"""Hashed maximum-entropy n-gram features: one weight for each (history, word), found by hashing.

Shapes: Q queries, M history words, V words, R history lengths.

A history of n - 1 words hashes to a place in the table; the weights of its successors lie at that place plus the
word's id. So the scores of all words after one history are one contiguous slice, and nothing wraps around: the table
has V places more than there are hashes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Odd 64-bit multipliers (from the digits of pi and e); products wrap around.
_MULTIPLIERS = (0x243F6A8885A308D3, 0x13198A2E03707345, 0x2B7E151628AED2A7, 0x3243F6A8885A308D, 0x1B873593CC9E2D51)


class HashedMaxEnt(nn.Module):
    """n-gram features of orders 2 to `order` (order 1 is the output layer's bias).

    Args:
        vocabulary_size: V; word ids, or ids of classes or tree nodes, are below it.
        order: the longest n-gram; its history has order - 1 words.
        table_size: number of hash values.
    """

    def __init__(self, vocabulary_size: int, order: int, table_size: int) -> None:
        super().__init__()
        if order < 2 or table_size < 1:
            raise ValueError(f"MaxEnt needs an order of at least 2 and a table, got {order} and {table_size}.")
        self.vocabulary_size = vocabulary_size
        self.order = order
        self.table_size = table_size
        self.weight = nn.Parameter(torch.zeros(table_size + vocabulary_size))

    def places(self, history: Tensor) -> Tensor:
        """history (Q, M), newest first -> the place of the slice of each history length, (Q, R)."""
        places = []
        mixed = torch.zeros_like(history[:, 0])
        for age in range(self.order - 1):
            mixed = (mixed ^ history[:, age]) * _MULTIPLIERS[age % len(_MULTIPLIERS)] + age + 1
            mixed = mixed ^ (mixed >> 29)
            places.append(torch.remainder(mixed, self.table_size))
        return torch.stack(places, dim=1)

    def score(self, history: Tensor, word_id: Tensor) -> Tensor:
        """history (Q, M), word_id (Q,) -> sum of the features' weights, (Q,)."""
        slots = self.places(history) + word_id[:, None]
        scores: Tensor = _Take.apply(self.weight, slots)  # type: ignore[no-untyped-call]
        return scores.sum(dim=1)

    def score_all(self, history: Tensor) -> Tensor:
        """history (Q, M) -> (Q, V): the slices themselves. Not differentiable."""
        weight = self.weight.detach()
        scores = torch.zeros(len(history), self.vocabulary_size, device=weight.device)
        slices = weight.as_strided((self.table_size, self.vocabulary_size), (1, 1))
        for column in self.places(history).unbind(dim=1):
            scores += slices.index_select(0, column)
        return scores


class _Take(torch.autograd.Function):
    """weight (W,), slots (any) -> weight[slots] with a sparse gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = weight.shape
        return weight.index_select(0, slots.reshape(-1)).view_as(slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (slots,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(slots.reshape(1, -1), grad.reshape(-1), ctx.size), None
