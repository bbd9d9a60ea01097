"""The NCE objective and its gradients by compiled loops in float32: what `NceOutput.loss` computes in tensors.

The scores of eight words of the batch at a time stay in the nearest cache. Threads share out the words, and the noise
words where sums go over the batch; so the results do not depend on the number of threads.

Shapes: N words of a batch, K noise words, G of them with MaxEnt gradients, H hidden, R history lengths, V vocabulary,
W the MaxEnt table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.lm.compiled_loop import Intrinsic, arrays_of, existing_loop
from asr.lm.rnn.product_kernel import add_products_by_column, add_products_by_row, padded, padded_room
from asr.lm.rnn.tile_kernel import NARROW, ROWS, exponential
from asr.lm.threads import in_threads

_PRODUCT_OF = 512  # factors below two, which overflows no float64
_BLOCKS_AT_LEAST = 16  # of a thread's part

prefetch: Any = Intrinsic("asr.lm.rnn.register_block", "prefetch")
row_product: Any = Intrinsic("asr.lm.rnn.register_block", "row_product")


class NceBatch(NamedTuple):
    """What is given of a batch.

    Attributes:
        places: of the MaxEnt slices, (N, R); R is 0 without features.
        word_id: (N,).
        noise_id: (K,).
        grad_columns: the noise words through which MaxEnt weights get their gradient, scaled by K / G, (G,).
        noise_log_prob: of each word, (V,).
    """

    places: Tensor
    word_id: Tensor
    noise_id: Tensor
    grad_columns: Tensor
    noise_log_prob: Tensor


class LoopedNceLoss(torch.autograd.Function):
    """hidden (N, H), rows (V, H), bias (V, 1), MaxEnt weight (W,), log_z () -> the loss; sparse gradients of tables."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: Tensor, bias: Tensor, weight: Tensor, log_z: Tensor, batch: NceBatch
    ) -> Tensor:
        num_words, num_noise = len(hidden), len(batch.noise_id)
        both_id = torch.cat((batch.word_id, batch.noise_id))
        offset = bias[both_id, 0] - batch.noise_log_prob[both_id] - math.log(num_noise) - log_z
        noise_rows, hidden = rows[batch.noise_id], padded(hidden, ROWS)
        prob = torch.zeros(len(hidden), num_noise + -num_noise % NARROW)
        residual, losses = torch.empty(num_words), torch.empty(num_words)
        arrays = [
            hidden, batch.places, batch.word_id, rows, offset[:num_words], padded(noise_rows.t()), offset[num_words:],
            batch.noise_id, weight, prob, residual, losses,
        ]  # fmt: skip
        _over_words(fill_probabilities, arrays)
        ctx.save_for_backward(hidden, rows, noise_rows, both_id, prob, residual, weight)
        ctx.batch = batch
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, rows, noise_rows, both_id, prob, residual, weight = ctx.saved_tensors
        batch: NceBatch = ctx.batch
        (num_words, num_noise), size = (len(batch.word_id), len(batch.noise_id)), rows.shape[1]
        residual = residual * grad
        grad_hidden = padded_room(len(hidden), size)
        arrays = [prob, padded(noise_rows * grad), residual, rows, batch.word_id, grad_hidden]
        _over_words(fill_hidden_gradients, arrays)
        grad_rows, grad_noise = torch.empty(len(both_id), size), torch.zeros(prob.shape[1], hidden.shape[1])
        torch.mul(hidden[:num_words, :size], residual[:, None], out=grad_rows[:num_words])
        loop = existing_loop(add_products_by_column)
        factors = arrays_of(grad_noise, prob, hidden)
        in_threads(lambda begin, end: loop(*factors, begin, end), len(grad_noise) // ROWS, rows_at_least=1)
        torch.mul(grad_noise[:num_noise, :size], grad, out=grad_rows[num_words:])
        grad_offset = torch.cat((residual, prob.sum(dim=0)[:num_noise] * grad))
        grad_weight = None
        if len(weight):
            num_places, num_columns = batch.places.shape[1], len(batch.grad_columns)
            slots = torch.empty(num_words, num_places, num_columns + 1, dtype=torch.int64)
            values = torch.empty(slots.shape)
            scale = float(grad) * num_noise / num_columns
            arrays = [
                prob, batch.places, batch.word_id, batch.noise_id, batch.grad_columns, residual, slots, values
            ]  # fmt: skip
            _over_words(fill_feature_gradients, arrays, np.float32(scale))
            grad_weight = torch.sparse_coo_tensor(slots.view(1, -1), values.view(-1), weight.shape)
        return (
            grad_hidden[:num_words, :size],
            torch.sparse_coo_tensor(both_id[None], grad_rows, rows.shape),
            torch.sparse_coo_tensor(both_id[None], grad_offset[:, None], (len(rows), 1)),
            grad_weight,
            -grad_offset.sum() if ctx.needs_input_grad[4] else None,
            None,
        )


def _over_words(function: Callable[..., None], tensors: list[Tensor], *more: Any) -> None:
    """function(begin, end, arrays, more) on parts of the words; the first array's rows are a multiple of ROWS."""
    loop = existing_loop(function)
    arrays = arrays_of(*tensors)

    def work(begin: int, end: int) -> None:
        loop(ROWS * begin, ROWS * end, *arrays, *more)

    in_threads(work, len(arrays[0]) // ROWS, rows_at_least=_BLOCKS_AT_LEAST)


def fill_probabilities(
    begin: int, end: int, hidden: Any, places: Any, word_id: Any, rows: Any, offset: Any, noise_rows: Any,
    noise_offset: Any, noise_id: Any, weight: Any, prob: Any, residual: Any, losses: Any,
) -> None:  # fmt: skip
    """Of the words begin .. end - 1 fills prob (N, K) with P(data) of noise words, residual (N,) with the word's own
    P(data) - 1, and losses (N,).

    hidden (N or more, H), noise_rows (H, K or more), offset (N,) and noise_offset (K,) are added to the products.
    """
    num_words, num_noise = len(word_id), len(noise_id)
    scores, one = np.empty((ROWS, noise_rows.shape[1]), dtype=np.float32), np.float32(1.0)
    for first in range(begin, min(end, num_words), ROWS):
        for i in range(ROWS):
            scores[i, :num_noise] = noise_offset
        add_products_by_row(scores, hidden[first:], noise_rows)
        for query in range(first, min(first + ROWS, num_words)):
            score = scores[query - first]
            _add_features(score, weight, places[query], places[min(query + 1, num_words - 1)], noise_id)
            odds = offset[query] + row_product(rows, word_id[query], hidden, query)
            for i in range(places.shape[1]):
                odds += weight[places[query, i] + word_id[query]]
            against = math.exp(-abs(odds))
            residual[query] = -(against if odds > 0 else one) / (one + against)
            losses[query] = max(-odds, 0.0) + math.log1p(against) + _fill_sigmoids(prob[query], score, num_noise)


def _add_features(score: Any, weight: Any, places: Any, following: Any, noise_id: Any) -> None:
    """score (K or more,) += the features of noise_id (K,) at places (R,); asks for those of the places that follow."""
    for length in range(len(places)):
        features, ahead = weight[places[length] :], following[length]
        for k in range(len(noise_id)):
            prefetch(weight, ahead + noise_id[k])
            score[k] += features[noise_id[k]]


def _fill_sigmoids(prob: Any, score: Any, num: int) -> float:
    """prob = sigmoid(score), the first num of them, and returns the sum of log(1 + exp(score))."""
    one, zero, total = np.float32(1.0), np.float32(0.0), 0.0
    for begin in range(0, num, _PRODUCT_OF):
        # Of the product of all 1 + exp(-|score|) one logarithm is taken.
        product = 1.0
        for k in range(begin, min(begin + _PRODUCT_OF, num)):
            power = exponential(-abs(score[k]))
            prob[k] = (one if score[k] > zero else power) / (one + power)
            product *= 1.0 + power
            total += max(score[k], zero)
        total += math.log(product)
    return total


def fill_hidden_gradients(
    begin: int, end: int, prob: Any, noise_rows: Any, residual: Any, rows: Any, word_id: Any, grad_hidden: Any
) -> None:
    """grad_hidden (N, H) of the words begin .. end - 1, from noise_rows (K, H) and rows (V, H)."""
    grad_hidden[begin:end] = np.float32(0.0)
    add_products_by_row(grad_hidden[begin:end], prob[begin:end], noise_rows)
    for query in range(begin, min(end, len(word_id))):
        grad, row, factor = grad_hidden[query], rows[word_id[query]], residual[query]
        for j in range(len(row)):
            grad[j] += factor * row[j]


def fill_feature_gradients(
    begin: int, end: int, prob: Any, places: Any, word_id: Any, noise_id: Any, grad_columns: Any, residual: Any,
    slots: Any, values: Any, scale: float,
) -> None:  # fmt: skip
    """slots and values (N, R, G + 1) of the words begin .. end - 1: those of the noise words and of the word itself."""
    num_columns = len(grad_columns)
    for query in range(begin, min(end, len(word_id))):
        for length in range(places.shape[1]):
            place, slot, value = places[query, length], slots[query, length], values[query, length]
            for i in range(num_columns):
                slot[i] = place + noise_id[grad_columns[i]]
                value[i] = scale * prob[query, grad_columns[i]]
            slot[num_columns], value[num_columns] = place + word_id[query], residual[query]
