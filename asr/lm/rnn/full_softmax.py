"""Output layer with one softmax over the whole vocabulary.

Shapes: N words of a batch, Q queries, H hidden, M history words, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.lm.rnn.log_z import LogZ, Precision, log_z_of
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.text.vocabulary import BOS_ID, EPSILON_ID


class FullSoftmaxOutput(nn.Module):
    """log P(w | h) = row(w) . hidden + bias(w) + MaxEnt(w, h), normalised over all words but `<eps>` and `<s>`.

    Args:
        rows: the output word vectors (V, H), shared with the input where the two are tied.
        maxent: n-gram features, or none; in training they cost a weight a word of the vocabulary and history length.
        compute_dtype: what the matrix products of the loss run in.
        normalizer_precision: of the sum over the vocabulary, see `log_z_of`; a word's own score is float32.
    """

    def __init__(
        self, rows: nn.Embedding, maxent: HashedMaxEnt | None, compute_dtype: str = "float32",
        normalizer_precision: Precision = "float32",
    ) -> None:  # fmt: skip
        super().__init__()
        self.rows = rows
        self.maxent = maxent
        self.compute_dtype: torch.dtype = getattr(torch, compute_dtype)
        self.normalizer_precision: Precision = normalizer_precision
        self.bias = nn.Parameter(torch.zeros(rows.num_embeddings))

    def set_unigram(self, counts: Tensor, *, reset_bias: bool) -> None:
        """Starts the biases at the unigram of the training text's counts (V,)."""
        if reset_bias:
            smoothed = counts.double() + 1
            self.bias.data.copy_((smoothed / smoothed.sum()).log())

    def loss(self, hidden: Tensor, history: Tensor, word_id: Tensor, generator: torch.Generator) -> Tensor:
        """hidden (N, H), history (N, M), word_id (N,) -> negative log-likelihood, ()."""
        words = torch.arange(self.rows.num_embeddings, device=hidden.device)
        rows = self.rows(words)
        scores = F.linear(hidden.to(self.compute_dtype), rows.to(self.compute_dtype)).float() + self.bias
        if self.maxent is not None:
            scores = scores + self.maxent.score_each(history, words)
        scores = scores.index_fill(1, torch.tensor([EPSILON_ID, BOS_ID], device=hidden.device), -torch.inf)
        return F.cross_entropy(scores, word_id, reduction="sum")

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M), word_id (Q,) -> unnormalised score (Q,)."""
        scores = (hidden * self.rows.weight[word_id]).sum(dim=1) + self.bias[word_id]
        return scores if self.maxent is None else scores + self.maxent.score(history, word_id)

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M) -> log Z (Q,)."""
        return self.exact_log_z(len(hidden))(hidden, history)

    def exact_log_z(self, num_queries: int) -> LogZ:
        """log of the scores' sum over the vocabulary, see `log_z_of`, with the weights as they are now."""
        return log_z_of(self.rows.weight, self.bias, self.maxent, self.normalizer_precision, num_queries)

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,)."""
        return self.word_score(hidden, history, word_id) - self.history_normalizer(hidden, history)
