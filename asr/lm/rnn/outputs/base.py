"""The interface between the recurrent language model and its output layer.

Shapes: N words of a batch, Q queries, H hidden, M history words, V vocabulary, O histories, K inner nodes of a tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from asr.lm.interface import CacheableTerms
from asr.lm.rnn.maxent import HashedMaxEnt


class OutputLayer(nn.Module, ABC):
    """Turns the hidden layer's state after a history into word probabilities.

    Attributes:
        rows: the output word vectors.
        maxent: n-gram features, or None.
    """

    rows: nn.Embedding
    maxent: HashedMaxEnt | None

    @abstractmethod
    def set_unigram(self, counts: Tensor, *, reset_bias: bool) -> None:
        """Makes noise, tree or classes from the training text's counts (V,); `reset_bias` resets biases to unigrams."""

    @abstractmethod
    def loss(self, hidden: Tensor, history: Tensor, word_id: Tensor, generator: torch.Generator) -> Tensor:
        """hidden (N, H), history (N, M), word_id (N,) -> the training objective summed over the words, ()."""

    @abstractmethod
    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,)."""

    @property
    def cacheable_terms(self) -> CacheableTerms:
        """See `StatefulNetwork`, which describes the methods below as well."""
        return "none"

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        raise NotImplementedError

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        raise NotImplementedError

    def group_of(self, word_id: Tensor) -> Tensor:
        raise NotImplementedError

    def group_normalizer(self, hidden: Tensor, history: Tensor, group: Tensor) -> Tensor:
        raise NotImplementedError

    def path_log_prob(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, owner: Tensor, held: Tensor
    ) -> tuple[Tensor, int]:
        raise NotImplementedError

    def output_tables(self) -> tuple[Any, ...] | None:
        return None
