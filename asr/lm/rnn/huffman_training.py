"""The loss of a Huffman tree and its gradients by compiled loops: what `HuffmanOutput.loss` computes in tensors.

Threads share out the words of the batch, and the columns of the nodes' vectors where sums go over the batch; so the
results do not depend on the number of threads.

Shapes: N words of a batch, H hidden, R history lengths, V vocabulary, L path nodes of all words together, D distinct
ones among them, W the MaxEnt table.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.lm.compiled_loop import Intrinsic, arrays_of, existing_loop
from asr.lm.rnn.output_kernel import ask_for_path
from asr.lm.threads import in_threads

_WORDS_AT_LEAST, _COLUMNS_AT_LEAST = 128, 32  # of a thread's part

row_product: Any = Intrinsic("asr.lm.rnn.register_block", "row_product")


class TreeBatch(NamedTuple):
    """What is given of a batch: places of the MaxEnt slices (N, R), R being 0 without features, and word_id (N,); and
    of the tree: a word's path is path_begin[word] .. path_begin[word + 1] - 1 of path_node and path_sign."""

    places: Tensor
    word_id: Tensor
    path_begin: Tensor
    path_node: Tensor
    path_sign: Tensor


class LoopedTreeLoss(torch.autograd.Function):
    """hidden (N, H), rows (V, H), bias (V, 1), MaxEnt weight (W,) -> the loss; sparse gradients of tables.

    The gradients come with the loss: a node's vector is read once for both.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor, bias: Tensor, weight: Tensor, batch: TreeBatch) -> Tensor:
        num_words, (num_rows, size), places = len(hidden), rows.shape, batch.places
        length = batch.path_begin[batch.word_id + 1] - batch.path_begin[batch.word_id]
        first = length.cumsum(0) - length
        num_nodes = int(length.sum())
        losses, residual, grad_hidden = torch.empty(num_words), torch.empty(num_nodes), torch.zeros(num_words, size)
        slots = torch.empty(num_nodes, places.shape[1], dtype=torch.int64)
        paths = batch.word_id, batch.path_begin, batch.path_node, first
        tensors = places, batch.path_sign, rows, bias[:, 0], weight, losses, residual, slots, grad_hidden
        arrays = arrays_of(hidden, *paths, *tensors)
        loop = existing_loop(fill_paths)
        in_threads(lambda begin, end: loop(begin, end, *arrays), num_words, _WORDS_AT_LEAST)
        which, node = torch.empty(num_nodes, dtype=torch.int64), torch.empty(num_nodes, dtype=torch.int64)
        num_distinct = existing_loop(number_nodes)(*arrays_of(*paths[:3], which, node), np.full(num_rows, -1))
        grad_rows, grad_bias = torch.zeros(num_distinct, size), torch.zeros(num_distinct, 1)
        sums = arrays_of(hidden, first, which, residual, grad_rows, grad_bias)
        loop_of_sums = existing_loop(add_row_gradients)
        in_threads(lambda begin, end: loop_of_sums(begin, end, *sums), size, _COLUMNS_AT_LEAST)
        ctx.save_for_backward(grad_hidden, node[:num_distinct], grad_rows, grad_bias, slots, residual)
        ctx.sizes = rows.shape, bias.shape, weight.shape
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, node, grad_rows, grad_bias, slots, residual = ctx.saved_tensors
        rows_shape, bias_shape, weight_shape = ctx.sizes
        grad_weight = None
        if weight_shape[0]:
            values = (residual * grad)[:, None].expand_as(slots)
            grad_weight = torch.sparse_coo_tensor(slots.view(1, -1), values.reshape(-1), weight_shape)
        return (
            grad_hidden * grad,
            torch.sparse_coo_tensor(node[None], grad_rows * grad, rows_shape),
            torch.sparse_coo_tensor(node[None], grad_bias * grad, bias_shape),
            grad_weight,
            None,
        )


def fill_paths(
    begin: int, end: int, hidden: Any, word_id: Any, path_begin: Any, path_node: Any, first: Any, places: Any,
    path_sign: Any, rows: Any, bias: Any, weight: Any, losses: Any, residual: Any, slots: Any, grad_hidden: Any,
) -> None:  # fmt: skip
    """Of the words begin .. end - 1 fills losses (N,), and adds to grad_hidden (N, H); and of their paths' nodes, which
    begin at first (N,), fills residual (L,), the gradients of their sums, and slots (L, R)."""
    one = np.float32(1.0)
    for query in range(begin, end):
        word, at, total, grads = word_id[query], first[query], 0.0, grad_hidden[query]
        if query + 1 < end:
            ask_for_path(query + 1, word, hidden, places, word_id[query + 1], path_begin, path_node, rows, weight)
        for place in range(path_begin[word], path_begin[word + 1]):
            node, sign = path_node[place], path_sign[place]
            logit = bias[node] + row_product(hidden, query, rows, node)
            for i in range(places.shape[1]):
                slots[at, i] = places[query, i] + node
                logit += weight[slots[at, i]]
            against = -sign * logit
            power = math.exp(-abs(against))
            total += max(against, 0.0) + math.log1p(power)
            grad = np.float32(-sign * (one if against > 0 else power) / (one + power))
            row = rows[node]
            for j in range(len(row)):
                grads[j] += grad * row[j]
            residual[at] = grad
            at += 1
        losses[query] = total


def number_nodes(word_id: Any, path_begin: Any, path_node: Any, which: Any, node: Any, number_of: Any) -> int:
    """Numbers the nodes of all words' paths as they come: which one each is, (L,), and the node of each number, (D, or
    more,) -> D. number_of (V,), at first -1, has the number of each."""
    at = num = 0
    for query in range(len(word_id)):
        word = word_id[query]
        for place in range(path_begin[word], path_begin[word + 1]):
            one = path_node[place]
            if number_of[one] < 0:
                number_of[one], node[num] = num, one
                num += 1
            which[at] = number_of[one]
            at += 1
    return num


def add_row_gradients(
    begin: int, end: int, hidden: Any, first: Any, which: Any, residual: Any, grad_rows: Any, grad_bias: Any
) -> None:
    """Adds to the columns begin .. end - 1 of grad_rows (D, H), and, with the first of them, to grad_bias (D, 1)."""
    for query in range(len(first)):
        last = first[query + 1] if query + 1 < len(first) else len(which)
        factor = hidden[query]
        for at in range(first[query], last):
            grads, grad = grad_rows[which[at]], residual[at]
            for j in range(begin, end):
                grads[j] += grad * factor[j]
            if begin == 0:
                grad_bias[which[at], 0] += grad
