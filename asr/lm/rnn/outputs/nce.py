"""Output layer trained by noise-contrastive estimation (Gutmann and Hyvarinen 2010; Chen et al. 2015).

Neither training nor scoring needs a sum over the vocabulary: log Z is a constant. Every noise word of a batch is
compared with every word of it. On a CPU, compiled loops compute loss and gradients for eight words at a time; the words
are divided among threads, and the results do not depend on the number of threads.

Shapes: N words of a batch, Q queries, K noise words, G of them with MaxEnt gradients, H hidden, M history words, R
history lengths, V vocabulary, W the MaxEnt table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.kernels.jit import arrays_of, in_threads, jit_for, jit_required
from asr.kernels.precision import product_dtype
from asr.kernels.simd import (
    NARROW,
    ROWS,
    add_products_by_column,
    add_products_by_row,
    exponential,
    padded,
    padded_room,
    prefetch,
    row_product,
)
from asr.lm.interface import CacheableTerms
from asr.lm.rnn.maxent import HashedMaxEnt, places_and_weight
from asr.lm.rnn.output_numba import add_word_scores
from asr.lm.rnn.outputs.base import OutputLayer
from asr.lm.rnn.outputs.log_partition import LogZ, Precision, log_z_of
from asr.lm.rnn.outputs.softmax_loss import LogZPenalty, softmax_loss
from asr.text.symbols import BOS_ID, EPSILON_ID

_PRODUCT_OF = 512  # factors below 2: their product does not overflow a float64
_MIN_BLOCKS = 16  # for each thread


class NceBatch(NamedTuple):
    """The inputs of a batch that have no gradient.

    Attributes:
        places: of the MaxEnt slices, (N, R); R is 0 without features.
        word_id: (N,).
        noise_id: (K,).
        grad_columns: the noise words through which MaxEnt weights get their gradient, scaled by K / G, (G,).
        noise_log_prob: the noise's log probability of each word, (V,).
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
        loop = jit_required(add_products_by_column)
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
    """Calls function(begin, end, arrays, *more) on parts of the words; the first array has a multiple of ROWS rows."""
    loop = jit_required(function)
    arrays = tuple(arrays_of(*tensors))

    def work(begin: int, end: int) -> None:
        loop(ROWS * begin, ROWS * end, arrays, *more)

    in_threads(work, len(arrays[0]) // ROWS, rows_at_least=_MIN_BLOCKS)


def fill_probabilities(begin: int, end: int, arrays: Any) -> None:
    """For the words begin .. end - 1, fills prob (N, K) with P(data) of the noise words, residual (N,) with P(data) - 1
    of the word itself, and losses (N,).

    hidden (N or more, H), noise_rows (H, K or more), offset (N,) and noise_offset (K,) are added to the products.
    """
    hidden, places, word_id, rows, offset, noise_rows, noise_offset, noise_id, weight, prob, residual, losses = arrays
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
    """score (K or more,) += the features of noise_id (K,) at places (R,); prefetches those of the next places."""
    for length in range(len(places)):
        features, ahead = weight[places[length] :], following[length]
        for k in range(len(noise_id)):
            prefetch(weight, ahead + noise_id[k])
            score[k] += features[noise_id[k]]


def _fill_sigmoids(prob: Any, score: Any, num: int) -> float:
    """prob = sigmoid(score), the first num of them, and returns the sum of log(1 + exp(score))."""
    one, zero, total = np.float32(1.0), np.float32(0.0), 0.0
    for begin in range(0, num, _PRODUCT_OF):
        # One logarithm of the product of all 1 + exp(-|score|).
        product = 1.0
        for k in range(begin, min(begin + _PRODUCT_OF, num)):
            power = exponential(-abs(score[k]))
            prob[k] = (one if score[k] > zero else power) / (one + power)
            product *= 1.0 + power
            total += max(score[k], zero)
        total += math.log(product)
    return total


def fill_hidden_gradients(begin: int, end: int, arrays: Any) -> None:
    """grad_hidden (N, H) of the words begin .. end - 1, from noise_rows (K, H) and rows (V, H)."""
    prob, noise_rows, residual, rows, word_id, grad_hidden = arrays
    grad_hidden[begin:end] = np.float32(0.0)
    add_products_by_row(grad_hidden[begin:end], prob[begin:end], noise_rows)
    for query in range(begin, min(end, len(word_id))):
        grad, row, factor = grad_hidden[query], rows[word_id[query]], residual[query]
        for j in range(len(row)):
            grad[j] += factor * row[j]


def fill_feature_gradients(begin: int, end: int, arrays: Any, scale: float) -> None:
    """slots and values (N, R, G + 1) of the words begin .. end - 1: those of the noise words and of the word itself."""
    prob, places, word_id, noise_id, grad_columns, residual, slots, values = arrays
    num_columns = len(grad_columns)
    for query in range(begin, min(end, len(word_id))):
        for length in range(places.shape[1]):
            place, slot, value = places[query, length], slots[query, length], values[query, length]
            for i in range(num_columns):
                slot[i] = place + noise_id[grad_columns[i]]
                value[i] = scale * prob[query, grad_columns[i]]
            slot[num_columns], value[num_columns] = place + word_id[query], residual[query]


@dataclass(frozen=True)
class SharedNoise:
    """The noise words that all words of a batch share.

    MaxEnt weights get their gradient only through `grad_columns` (G,) of the K noise words, scaled by K / G: an
    unbiased estimate at a fraction of the cost of updating N * K weights.
    """

    noise_id: Tensor
    grad_columns: Tensor
    maxent: HashedMaxEnt | None
    compute_dtype: torch.dtype
    compiled: bool

    def loss(self, hidden: Tensor, history: Tensor, rows: Tensor, offset: Tensor) -> Tensor:
        """hidden (N, H), history (N, M), rows (K, H), offset (K,) -> sum over N and K of -log P(noise)."""
        weight = places = None
        if self.maxent is not None:
            weight, places = self.maxent.weight, self.maxent.places(history)
        loss: Tensor = _NoiseLoss.apply(  # type: ignore[no-untyped-call]
            hidden.to(self.compute_dtype), rows.to(self.compute_dtype), offset, weight, places, self
        )
        return loss


class _NoiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: Tensor, offset: Tensor, weight: Tensor | None, places: Tensor | None,
        noise: SharedNoise,
    ) -> Tensor:  # fmt: skip
        products = torch.mm(hidden, rows.t())
        if noise.compiled:
            loss, prob = compiled_terms()(products, offset, weight, places, noise.noise_id)
        else:
            loss, prob = noise_terms(products, offset, noise.maxent, places, noise.noise_id)
        ctx.save_for_backward(hidden, rows, prob, places)
        ctx.noise = noise
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, rows, prob, places = ctx.saved_tensors
        noise: SharedNoise = ctx.noise
        grad_hidden = torch.mm(prob, rows) * grad
        grad_rows = torch.mm(prob.t(), hidden) * grad
        grad_offset = torch.mm(prob.new_ones(1, len(prob)), prob)[0].float() * grad
        grad_weight = None
        if noise.maxent is not None:
            num_places = places.shape[1]
            slots = places[:, :, None] + noise.noise_id[noise.grad_columns]
            scale = grad * (len(noise.noise_id) / len(noise.grad_columns))
            values = (prob[:, noise.grad_columns].float() * scale)[:, None, :].expand(-1, num_places, -1)
            size = noise.maxent.weight.shape
            grad_weight = torch.sparse_coo_tensor(slots.reshape(1, -1), values.reshape(-1), size)
        return grad_hidden, grad_rows, grad_offset, grad_weight, None, None


def noise_terms(
    products: Tensor, offset: Tensor, maxent: HashedMaxEnt | None, places: Tensor | None, noise_id: Tensor
) -> tuple[Tensor, Tensor]:
    """products (N, K), offset (K,), places (N, R), noise_id (K,) -> loss (), P(data) (N, K) of the products' type."""
    odds = products.float() + offset
    if maxent is not None and places is not None:
        maxent.add_scores(odds, places, noise_id)
    loss = F.softplus(odds).sum()
    return loss, odds.sigmoid_().to(products.dtype)


def _terms_by_indexing(
    products: Tensor, offset: Tensor, weight: Tensor | None, places: Tensor | None, noise_id: Tensor
) -> tuple[Tensor, Tensor]:
    # Written for torch.compile: `noise_terms` on plain tensors; weight (W,).
    odds = products.float() + offset
    if weight is not None and places is not None:
        for column in range(places.shape[1]):
            odds = odds + weight[places[:, column, None] + noise_id]
    prob = torch.sigmoid(odds)
    # softplus(x) = max(x, 0) - log(sigmoid(|x|)), with the one exponential shared.
    return (odds.clamp(min=0) - torch.log(torch.where(odds > 0, prob, 1 - prob))).sum(), prob.to(products.dtype)


@lru_cache(maxsize=1)
def compiled_terms() -> Callable[..., tuple[Tensor, Tensor]]:
    """The same as one compiled loop; needs torch 2 and a C++ compiler."""
    return torch.compile(_terms_by_indexing, dynamic=False)


_MIN_WORDS = 2048  # for each thread


@dataclass(frozen=True)
class NoiseWords:
    """The noise of `NceOutput`.

    Attributes:
        num_noise_words: noise words per batch, shared by all of its words.
        noise_power: the noise is the unigram (one added to each count) to this power.
        num_grad_words: noise words of a batch through which MaxEnt weights are updated.
    """

    num_noise_words: int = 512
    noise_power: float = 0.75
    num_grad_words: int = 32


@dataclass(frozen=True)
class Normalization:
    """How the scores of `NceOutput` become log probabilities.

    Attributes:
        log_z: the constant log Z, or its initial value if it is learned.
        learn_log_z: whether log Z is a parameter.
        normalized: whether scores are normalized by an exact, slow sum over the vocabulary instead of the constant.
        normalizer_precision: of the sum over the vocabulary, see `log_z_of`; a word's own score is float32.
        log_z_penalty: if it is not None, the loss is that of a softmax over all words, plus this times the square of
            the true log Z minus the constant.
    """

    log_z: float = 0.0
    learn_log_z: bool = False
    normalized: bool = False
    normalizer_precision: Precision = "float32"
    log_z_penalty: float | None = None


class NceOutput(OutputLayer):
    """score(w | h) = row(w) . hidden + bias(w) + MaxEnt(w, h); log P = score - log Z with one constant log Z.

    Args:
        rows: the output word vectors (V, H), shared with the input where the two are tied.
        maxent: n-gram features, or None.
        noise: how many noise words there are, and how they are drawn.
        normalization: log Z.
        compute_dtype: what the matrix products of the loss run in.
        compile_loss: compiles the element-wise part of the loss (torch 2 and a C++ compiler).
    """

    def __init__(
        self,
        rows: nn.Embedding,
        maxent: HashedMaxEnt | None,
        noise: NoiseWords = NoiseWords(),
        normalization: Normalization = Normalization(),
        compute_dtype: str = "float32",
        compile_loss: bool = False,
    ) -> None:
        super().__init__()
        vocabulary_size = rows.num_embeddings
        self.rows = rows
        self.maxent = maxent
        self.num_noise_words = noise.num_noise_words
        self.noise_power = noise.noise_power
        self.num_grad_words = min(noise.num_grad_words, noise.num_noise_words)
        self.normalized = normalization.normalized
        self.normalizer_precision: Precision = normalization.normalizer_precision
        self.log_z_penalty = normalization.log_z_penalty
        self.compute_dtype = product_dtype(compute_dtype)
        self.compile_loss = compile_loss
        self.bias = nn.Embedding(vocabulary_size, 1, sparse=True)
        log_z = torch.tensor(float(normalization.log_z))
        self.log_z = nn.Parameter(log_z, requires_grad=normalization.learn_log_z)
        self.noise_log_prob: Tensor
        self.noise_cdf: Tensor
        self.register_buffer("noise_log_prob", torch.zeros(vocabulary_size), persistent=False)
        self.register_buffer("noise_cdf", torch.zeros(vocabulary_size, dtype=torch.float64), persistent=False)
        self.set_unigram(torch.ones(vocabulary_size), reset_bias=True)

    @property
    def cacheable_terms(self) -> CacheableTerms:
        """`history` if each history has a log Z of its own; a constant needs no cache."""
        return "history" if self.normalized else "none"

    def set_unigram(self, counts: Tensor, *, reset_bias: bool) -> None:
        """The noise from the training text's counts (V,); `reset_bias` starts the biases at the log unigram."""
        smoothed = counts.double() + 1
        smoothed[[EPSILON_ID, BOS_ID]] = 0
        noise = smoothed**self.noise_power
        noise /= noise.sum()
        self.noise_log_prob.copy_(noise.log())
        self.noise_cdf.copy_(noise.cumsum(0))
        if reset_bias:
            log_unigram = (smoothed / smoothed.sum()).log().clamp(min=-30)
            with torch.no_grad():
                self.bias.weight.copy_((log_unigram + self.log_z)[:, None])

    def loss(self, hidden: Tensor, history: Tensor, word_id: Tensor, generator: torch.Generator) -> Tensor:
        if self.log_z_penalty is not None:
            words = torch.arange(self.rows.num_embeddings, device=hidden.device)
            return softmax_loss(
                *(hidden, self.rows(words), self.bias(words)[:, 0], self.maxent, history, word_id),
                *(LogZPenalty(self.log_z, self.log_z_penalty), self.compute_dtype),
            )
        num_noise = self.num_noise_words
        uniform = torch.rand(num_noise, generator=generator, dtype=torch.float64).to(hidden.device)
        # Sorted ids make the MaxEnt slices' reads run forward through memory.
        noise_id = torch.searchsorted(self.noise_cdf, uniform).clamp(max=len(self.noise_cdf) - 1).sort().values
        columns = torch.randperm(num_noise, generator=generator)[: self.num_grad_words].to(hidden.device)
        is_plain = self.compute_dtype == torch.float32 and not self.compile_loss
        if is_plain and jit_for(fill_probabilities, hidden.detach()) is not None:
            return self._looped_loss(hidden, history, word_id, noise_id, columns)
        both_id = torch.cat((word_id, noise_id))
        rows, bias = self.rows(both_id), self.bias(both_id).squeeze(1)
        # The log odds that a word is data and not noise are score - log(K q(w)) - log Z.
        offset = bias - self.noise_log_prob[both_id] - math.log(num_noise) - self.log_z
        num_words = len(word_id)
        data_odds = (hidden * rows[:num_words]).sum(dim=1) + offset[:num_words]
        if self.maxent is not None:
            data_odds = data_odds + self.maxent.score(history, word_id)
        noise = SharedNoise(noise_id, columns, self.maxent, self.compute_dtype, self.compile_loss)
        return F.softplus(-data_odds).sum() + noise.loss(hidden, history, rows[num_words:], offset[num_words:])

    def _looped_loss(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, noise_id: Tensor, grad_columns: Tensor
    ) -> Tensor:
        places, weight = places_and_weight(self.maxent, history, hidden)
        batch = NceBatch(places, word_id, noise_id, grad_columns, self.noise_log_prob)
        loss: Tensor = LoopedNceLoss.apply(  # type: ignore[no-untyped-call]
            hidden, self.rows.weight, self.bias.weight, weight, self.log_z, batch
        )
        return loss

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        # The loop computes no gradient.
        loop = jit_for(add_word_scores, hidden) if self._is_whole and not torch.is_grad_enabled() else None
        bias = self.bias.weight[:, 0]
        if loop is None:
            total = (hidden * self.rows(word_id)).sum(dim=1) + bias.index_select(0, word_id)
            return total if self.maxent is None else total + self.maxent.score(history, word_id)
        scores = hidden.new_zeros(len(word_id))
        weight, order, table_size = _feature_weights(self.maxent, hidden)
        arrays = arrays_of(hidden, history, word_id, self.rows.weight, bias, weight)

        def work(begin: int, end: int) -> None:
            queries = (array[begin:end] for array in arrays[:3])
            loop(*queries, *arrays[3:], order, table_size, scores[begin:end].numpy())

        in_threads(work, len(word_id), rows_at_least=_MIN_WORDS)
        return scores

    @property
    def _is_whole(self) -> bool:
        """Whether loops can read the tables: those in host memory are of other classes."""
        return isinstance(self.rows, nn.Embedding) and isinstance(self.maxent, HashedMaxEnt | None)

    def output_tables(self) -> tuple[Any, ...] | None:
        """The arguments of `add_word_scores` from `rows` on, and log Z; None if scores need more than that."""
        if not self._is_whole or self.normalized or self.rows.weight.device.type != "cpu":
            return None
        tables = self.rows.weight, self.bias.weight[:, 0], *_feature_weights(self.maxent, self.rows.weight)
        arrays = (part.detach().numpy() if isinstance(part, Tensor) else part for part in tables)
        return *arrays, np.float32(self.log_z.item())

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        """The constant log Z, or the true one of each history where `normalized` is set, (Q,)."""
        if not self.normalized:
            return self.log_z.expand(len(hidden))
        return self.exact_log_z(len(hidden))(hidden, history)

    def exact_log_z(self, num_queries: int) -> LogZ:
        return log_z_of(self.rows.weight, self.bias.weight[:, 0], self.maxent, self.normalizer_precision, num_queries)

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """Score minus log Z, at most 0, (Q,); unless `normalized`, only as close to a probability as training has come.

        A search would prefer a word whose score exceeds probability 1 to any other, without end.
        """
        return (self.word_score(hidden, history, word_id) - self.history_normalizer(hidden, history)).clamp(max=0.0)


def _feature_weights(maxent: HashedMaxEnt | None, like: Tensor) -> tuple[Tensor, int, int]:
    """Weights, order and number of hash values of the features, as `add_word_scores` takes them."""
    return (like.new_zeros(0), 1, 1) if maxent is None else (maxent.weight, maxent.order, maxent.table_size)
