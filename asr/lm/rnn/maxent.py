"""Hashed maximum-entropy n-gram features: one weight for each (history, word), found by hashing.

Shapes: Q queries, M history words, V words, K of them, R history lengths.

A history of n - 1 words hashes to a place in the table; the weights of its successors lie at that place plus the
word's id. So the scores of all words after one history are one contiguous slice, and nothing wraps around: the table
has V places more than there are hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asr.kernels.jit import jit_for

if hasattr(torch.sparse, "check_sparse_tensor_invariants"):
    # This is the default; if it is not stated, torch warns at the first sparse gradient.
    torch.sparse.check_sparse_tensor_invariants.disable()


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
        self.weight = nn.Parameter(nn.init.constant_(torch.empty(table_size + vocabulary_size), 0.0))
        self.is_pruned = False

    def prune(self, num_kept: int) -> None:
        """Keeps only the `num_kept` weights of largest magnitude; state dicts made from now on contain no others.

        Such a state dict has one bit per weight and the kept weights; `load_state_dict` accepts either form.
        """
        magnitude = self.weight.detach().abs()
        num_zero = len(magnitude) - num_kept
        if num_zero > 0:
            threshold = float(np.partition(magnitude.cpu().numpy(), num_zero)[num_zero])
            with torch.no_grad():
                self.weight[magnitude < threshold] = 0.0
        self.is_pruned = True

    def places(self, history: Tensor) -> Tensor:
        """history (Q, M), newest first -> the place of the slice of each history length, (Q, R)."""
        return hashed_places(history, self.order, self.table_size)

    def score(self, history: Tensor, word_id: Tensor) -> Tensor:
        """history (Q, M), word_id (Q,) -> sum of the features' weights, (Q,)."""
        slots = self.places(history) + word_id[:, None]
        scores: Tensor = _Take.apply(self.weight, slots)  # type: ignore[no-untyped-call]
        return scores.sum(dim=1)

    def score_each(self, history: Tensor, word_id: Tensor) -> Tensor:
        """history (Q, M), word_id (K,) -> (Q, K): every word after every history, with a gradient for each pair."""
        slots = self.places(history)[:, :, None] + word_id
        scores: Tensor = _Take.apply(self.weight, slots)  # type: ignore[no-untyped-call]
        return scores.sum(dim=1)

    def score_blocks(self, history: Sequence[Tensor], word_id: Sequence[Tensor]) -> list[Tensor]:
        """`score_each` of several pairs of history (Q, M) and word_id (K,), with one gradient for all of them."""
        slots = [self.places(block)[:, :, None] + words for block, words in zip(history, word_id, strict=True)]
        scores: Tensor = _Take.apply(self.weight, torch.cat([block.view(-1) for block in slots]))  # type: ignore[no-untyped-call]
        parts = scores.split([block.numel() for block in slots])
        return [part.view_as(block).sum(dim=1) for part, block in zip(parts, slots, strict=True)]

    def add_scores(self, scores: Tensor, places: Tensor, word_id: Tensor) -> None:
        """scores (Q, K) += the features of word_id (K,) after the histories at places (Q, R). Not differentiable."""
        weight = self.weight.detach()
        loop = jit_for(add_gathered, weight)
        if loop is not None:
            loop(scores.numpy(), weight.numpy(), places.numpy(), word_id.numpy())
            return
        for column in places.unbind(dim=1):
            slots = column[:, None] + word_id
            scores += weight.index_select(0, slots.view(-1)).view_as(scores)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_pruned:
            weight = destination.pop(prefix + "weight").detach()
            is_kept = weight != 0
            destination[prefix + "kept_bits"] = torch.from_numpy(np.packbits(is_kept.cpu().numpy()))
            destination[prefix + "kept_weight"] = weight[is_kept]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        bits = state_dict.pop(prefix + "kept_bits", None)
        if bits is not None:
            kept = state_dict.pop(prefix + "kept_weight", None)
            if kept is None or bits.dtype != torch.uint8:
                raise RuntimeError(f"{prefix}kept_bits is not a list of bits with weights")
            is_kept = torch.from_numpy(np.unpackbits(bits.cpu().numpy(), count=len(self.weight)).view(np.bool_))
            if int(is_kept.count_nonzero()) != kept.numel():
                raise RuntimeError(f"{prefix}kept_bits has {int(is_kept.count_nonzero())} bits, not {kept.numel()}")
            # In place: another table of this size would be a third of the memory that loading a bundle takes.
            weight = self.weight.detach().zero_()
            weight.masked_scatter_(is_kept.to(weight.device), kept.to(weight))
            state_dict[prefix + "weight"] = weight
            self.is_pruned = True
        super()._load_from_state_dict(state_dict, prefix, *args)


def places_and_weight(maxent: HashedMaxEnt | None, history: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Places (Q, R) and weight (W,) of the features after history (Q, M), for loops; empty without features."""
    if maxent is None:
        return history.new_empty(len(history), 0), like.new_empty(0)
    return maxent.places(history), maxent.weight


def add_score_range(scores: Tensor, weight: Tensor, places: Tensor, begin: int) -> None:
    """scores (Q, K) += the features weight (W,) of words begin .. begin + K - 1 after the histories at places (Q, R).

    Not differentiable.
    """
    loop = jit_for(add_slices, weight)
    if loop is not None:
        loop(scores.numpy(), weight.numpy(), places.numpy(), begin)
        return
    num_words = scores.shape[1]
    slices = weight.as_strided(
        (len(weight) - begin - num_words + 1, num_words), (1, 1), weight.storage_offset() + begin
    )
    for column in places.unbind(dim=1):
        scores += slices.index_select(0, column)


def hashed_places(history: Tensor, order: int, table_size: int) -> Tensor:
    """history (Q, M), newest first -> the hash of its last word, of its last two and so on, (Q, R)."""
    places = []
    mixed = torch.zeros_like(history[:, 0])
    for age in range(order - 1):
        mixed = mixed_with(mixed, history[:, age], age)
        places.append(torch.remainder(mixed, table_size))
    return torch.stack(places, dim=1)


def mixed_with(mixed: Any, word: Any, age: int) -> Any:
    """The hash of a history with one more word, from that of the newer ones; of tensors (Q,), or for `jit` of numbers.

    `age` is how many words are newer.
    """
    mixed = (mixed ^ word) * _MULTIPLIERS[age % len(_MULTIPLIERS)] + age + 1
    return mixed ^ (mixed >> 29)


def add_slices(scores: Any, weight: Any, places: Any, begin: int) -> None:
    """scores (Q, K) += weight of the words begin .. begin + K - 1 after the histories at places (Q, R)."""
    for query in range(scores.shape[0]):
        for i in range(places.shape[1]):
            first = places[query, i] + begin
            for column in range(scores.shape[1]):
                scores[query, column] += weight[first + column]


def add_gathered(scores: Any, weight: Any, places: Any, word_id: Any) -> None:
    """scores (Q, K) += weight of the words word_id (K,) after the histories at places (Q, R)."""
    for query in range(scores.shape[0]):
        for column in range(scores.shape[1]):
            word = word_id[column]
            total = scores[query, column]
            for i in range(places.shape[1]):
                total += weight[places[query, i] + word]
            scores[query, column] = total


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
