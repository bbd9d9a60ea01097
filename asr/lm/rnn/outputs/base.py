"""What the recurrent language model asks of an output layer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from asr.lm.rnn.maxent import HashedMaxEnt


class OutputLayer(Protocol):
    """From what a history left in the hidden layer to word probabilities; one a file.

    Layers with normalisers that depend on the history, or on it and a group of words, also have

        word_score(hidden, history, word_id) -> (Q,)              the numerator's logarithm
        history_normalizer(hidden, history) -> (Q,)
        group_of(word_id) -> (Q,), group_normalizer(hidden, history, group) -> (Q,)

    and log_prob = word_score - history_normalizer - group_normalizer, as far as they exist: a cache may keep them.
    Layers that decide along a tree's path have

        path_log_prob(hidden, history, word_id, owner, held) -> (Q,), decisions computed

    where held (O, K), read and filled, keeps what is known of the histories owner (Q,), for a cache as well.
    """

    rows: nn.Embedding
    maxent: HashedMaxEnt | None

    def set_unigram(self, counts: Tensor, *, reset_bias: bool) -> None:
        """Takes noise, tree or classes from the training text's counts (V,); `reset_bias` starts at the unigram."""

    def loss(self, hidden: Tensor, history: Tensor, word_id: Tensor, generator: torch.Generator) -> Tensor:
        """hidden (N, H), history (N, M), word_id (N,) -> the training objective summed over the words, ()."""

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,)."""
