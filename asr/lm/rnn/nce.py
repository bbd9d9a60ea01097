"""Output layer trained by noise-contrastive estimation: no sum over the vocabulary, in training or in scoring.

Shapes: N words of a batch, Q queries, H hidden, M history words, K noise words, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.lm.compiled_loop import arrays_of, loop_for
from asr.lm.rnn.log_z import LogZ, Precision, log_z_of
from asr.lm.rnn.maxent import HASH_MULTIPLIERS, HashedMaxEnt, places_and_weight
from asr.lm.rnn.nce_training import LoopedNceLoss, NceBatch, fill_probabilities
from asr.lm.rnn.output_kernel import add_word_scores
from asr.lm.rnn.shared_noise import SharedNoise
from asr.lm.threads import in_threads
from asr.text.vocabulary import BOS_ID, EPSILON_ID

_WORDS_AT_LEAST = 2048  # of a thread's part


class NceOutput(nn.Module):
    """score(w | h) = row(w) . hidden + bias(w) + MaxEnt(w, h); log P = score - log Z with one constant log Z.

    Args:
        rows: the output word vectors (V, H), shared with the input where the two are tied.
        maxent: n-gram features, or none.
        num_noise_words: noise words of a batch, shared by all of its words.
        noise_power: the noise is the unigram (one added to each count) to this power.
        log_z: the constant, or where it starts if it is learnt.
        learn_log_z: whether log Z is a parameter.
        normalized: scores are normalised by a sum over the vocabulary, exact and slow, not by the constant log Z.
        num_grad_words: noise words of a batch through which MaxEnt weights are updated.
        compute_dtype: what the matrix products of the loss run in.
        compile_loss: compiles the element-wise part of the loss (torch 2 and a C++ compiler).
        normalizer_precision: of the sum over the vocabulary, see `log_z_of`; a word's own score is float32.
    """

    def __init__(
        self,
        rows: nn.Embedding,
        maxent: HashedMaxEnt | None,
        num_noise_words: int = 512,
        noise_power: float = 0.75,
        log_z: float = 0.0,
        learn_log_z: bool = False,
        normalized: bool = False,
        num_grad_words: int = 32,
        compute_dtype: str = "float32",
        compile_loss: bool = False,
        normalizer_precision: Precision = "float32",
    ) -> None:
        super().__init__()
        vocabulary_size = rows.num_embeddings
        self.rows = rows
        self.maxent = maxent
        self.num_noise_words = num_noise_words
        self.noise_power = noise_power
        self.normalized = normalized
        self.num_grad_words = min(num_grad_words, num_noise_words)
        self.compute_dtype: torch.dtype = getattr(torch, compute_dtype)
        self.compile_loss = compile_loss
        self.normalizer_precision: Precision = normalizer_precision
        self.bias = nn.Embedding(vocabulary_size, 1, sparse=True)
        self.log_z = nn.Parameter(torch.tensor(float(log_z)), requires_grad=learn_log_z)
        self.noise_log_prob: Tensor
        self.noise_cdf: Tensor
        self.register_buffer("noise_log_prob", torch.zeros(vocabulary_size), persistent=False)
        self.register_buffer("noise_cdf", torch.zeros(vocabulary_size, dtype=torch.float64), persistent=False)
        self.set_unigram(torch.ones(vocabulary_size), reset_bias=True)

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
        """hidden (N, H), history (N, M), word_id (N,) -> the NCE objective summed over the words."""
        num_noise = self.num_noise_words
        uniform = torch.rand(num_noise, generator=generator, dtype=torch.float64).to(hidden.device)
        # Sorted ids make the MaxEnt slices' reads run forward through memory.
        noise_id = torch.searchsorted(self.noise_cdf, uniform).clamp(max=len(self.noise_cdf) - 1).sort().values
        columns = torch.randperm(num_noise, generator=generator)[: self.num_grad_words].to(hidden.device)
        is_plain = self.compute_dtype == torch.float32 and not self.compile_loss
        if is_plain and loop_for(fill_probabilities, hidden.detach()) is not None:
            return self._looped_loss(hidden, history, word_id, noise_id, columns)
        both_id = torch.cat((word_id, noise_id))
        rows, bias = self.rows(both_id), self.bias(both_id).squeeze(1)
        # Score less log(K q(w)) less log Z: the log odds that a word is data and not noise.
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
        """hidden (Q, H), history (Q, M), word_id (Q,) -> unnormalised score (Q,)."""
        # Tables in host memory are not one array each, and rows chosen before have a gradient of their own.
        is_whole = isinstance(self.rows, nn.Embedding) and isinstance(self.maxent, HashedMaxEnt | None)
        if is_whole and not torch.is_grad_enabled():
            rows, bias = self.rows.weight, self.bias.weight[:, 0]
            return scores_by_rows(hidden, history, word_id, rows, bias, word_id, self.maxent)
        scores = (hidden * self.rows(word_id)).sum(dim=1) + self.bias.weight[word_id, 0]
        return scores if self.maxent is None else scores + self.maxent.score(history, word_id)

    def output_for_loop(self) -> tuple[Any, ...] | None:
        """What `add_word_scores` reads, rows and all behind them, and log Z; None where a word's score takes more."""
        is_whole = isinstance(self.rows, nn.Embedding) and isinstance(self.maxent, HashedMaxEnt | None)
        if not is_whole or self.normalized or self.rows.weight.device.type != "cpu":
            return None
        tables = self.rows.weight, self.bias.weight[:, 0], *_feature_weights(self.maxent, self.rows.weight)
        arrays = (part.detach().numpy() if isinstance(part, Tensor) else part for part in tables)
        return *arrays, HASH_MULTIPLIERS, np.float32(self.log_z.item())

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        """The constant log Z, or the true one of each history where `normalized` is set, (Q,)."""
        if not self.normalized:
            return self.log_z.expand(len(hidden))
        return self.exact_log_z(len(hidden))(hidden, history)

    def exact_log_z(self, num_queries: int) -> LogZ:
        """log of the scores' sum over the vocabulary, see `log_z_of`, with the weights as they are now."""
        return log_z_of(self.rows.weight, self.bias.weight[:, 0], self.maxent, self.normalizer_precision, num_queries)

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """Score less log Z, (Q,); not `normalized`, it is as close to a probability as NCE has brought it."""
        return self.word_score(hidden, history, word_id) - self.history_normalizer(hidden, history)


def scores_by_rows(
    hidden: Tensor, history: Tensor, word_id: Tensor, rows: Tensor, bias: Tensor, row_idx: Tensor,
    maxent: HashedMaxEnt | None,
) -> Tensor:  # fmt: skip
    """hidden (Q, H), history (Q, M), word_id (Q,), whose vector and bias are row_idx (Q,) of rows (W, H) and bias (W,)
    -> rows . hidden + bias + MaxEnt, (Q,), without gradient."""
    loop = loop_for(add_word_scores, hidden)
    if loop is None:
        scores = (hidden * rows.index_select(0, row_idx)).sum(dim=1) + bias.index_select(0, row_idx)
        return scores if maxent is None else scores + maxent.score(history, word_id)
    scores = hidden.new_zeros(len(word_id))
    weight, order, table_size = _feature_weights(maxent, hidden)
    arrays = arrays_of(hidden, history, word_id, row_idx, rows, bias, weight)

    def work(begin: int, end: int) -> None:
        queries = (array[begin:end] for array in arrays[:4])
        loop(*queries, *arrays[4:], order, table_size, HASH_MULTIPLIERS, scores[begin:end].numpy())

    in_threads(work, len(word_id), rows_at_least=_WORDS_AT_LEAST)
    return scores


def _feature_weights(maxent: HashedMaxEnt | None, like: Tensor) -> tuple[Tensor, int, int]:
    """Weights, order and number of hash values of the features, as `add_word_scores` takes them."""
    return (like.new_zeros(0), 1, 1) if maxent is None else (maxent.weight, maxent.order, maxent.table_size)
