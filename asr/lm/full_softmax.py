"""Output layer with one softmax over the whole vocabulary.

Shapes: N words of a batch, Q queries, H hidden, M history words, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.lm.maxent import HashedMaxEnt
from asr.text.vocabulary import BOS_ID, EPSILON_ID

# Sums over the vocabulary are made in blocks that stay in a CPU's cache.
_QUERIES_AT_ONCE = 256
_WORDS_AT_ONCE = 4096


class FullSoftmaxOutput(nn.Module):
    """log P(w | h) = row(w) . hidden + bias(w) + MaxEnt(w, h), normalised over all words but `<eps>` and `<s>`.

    Args:
        rows: the output word vectors (V, H), shared with the input where the two are tied.
        maxent: n-gram features, or none; in training they cost a weight a word of the vocabulary and history length.
        compute_dtype: what the matrix products of the loss run in.
    """

    def __init__(self, rows: nn.Embedding, maxent: HashedMaxEnt | None, compute_dtype: str = "float32") -> None:
        super().__init__()
        self.rows = rows
        self.maxent = maxent
        self.compute_dtype: torch.dtype = getattr(torch, compute_dtype)
        self.bias = nn.Parameter(torch.zeros(rows.num_embeddings))

    def set_unigram(self, counts: Tensor, *, reset_bias: bool) -> None:
        """Starts the biases at the unigram of the training text's counts (V,)."""
        if reset_bias:
            smoothed = counts.double() + 1
            self.bias.data.copy_((smoothed / smoothed.sum()).log())

    def loss(self, hidden: Tensor, history: Tensor, word_id: Tensor, generator: torch.Generator) -> Tensor:
        """hidden (N, H), history (N, M), word_id (N,) -> negative log-likelihood, ()."""
        rows = self.rows(torch.arange(self.rows.num_embeddings, device=hidden.device))
        scores = F.linear(hidden.to(self.compute_dtype), rows.to(self.compute_dtype)).float() + self.bias
        if self.maxent is not None:
            words = torch.arange(self.rows.num_embeddings, device=hidden.device)
            scores = scores + self.maxent.score_each(history, words)
        scores = scores.index_fill(1, _never_predicted(hidden.device), -torch.inf)
        return F.cross_entropy(scores, word_id, reduction="sum")

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M), word_id (Q,) -> unnormalised score (Q,)."""
        scores = (hidden * self.rows.weight[word_id]).sum(dim=1) + self.bias[word_id]
        return scores if self.maxent is None else scores + self.maxent.score(history, word_id)

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M) -> log Z (Q,)."""
        return exact_log_z(hidden, history, self.rows.weight, self.bias, self.maxent)

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,)."""
        return self.word_score(hidden, history, word_id) - self.history_normalizer(hidden, history)


def exact_log_z(hidden: Tensor, history: Tensor, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None) -> Tensor:
    """log of the sum of exp(row . hidden + bias + MaxEnt) over all words that can be predicted, (Q,).

    hidden (Q, H), history (Q, M), rows (V, H), bias (V,). Not differentiable.
    """
    log_z = hidden.new_full((len(hidden),), -torch.inf)
    with torch.no_grad():
        for begin in range(0, len(hidden), _QUERIES_AT_ONCE):
            part = slice(begin, begin + _QUERIES_AT_ONCE)
            places = None if maxent is None else maxent.places(history[part])
            for first in range(0, len(rows), _WORDS_AT_ONCE):
                words = slice(first, min(first + _WORDS_AT_ONCE, len(rows)))
                scores = F.linear(hidden[part], rows[words], bias[words])
                if maxent is not None and places is not None:
                    maxent.add_score_range(scores, places, words.start)
                if first == 0:
                    scores.index_fill_(1, _never_predicted(hidden.device), -torch.inf)
                log_z[part] = torch.logaddexp(log_z[part], scores.logsumexp(dim=1))
    return log_z


def _never_predicted(device: torch.device) -> Tensor:
    return torch.tensor([EPSILON_ID, BOS_ID], device=device)
