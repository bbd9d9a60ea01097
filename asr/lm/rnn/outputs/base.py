"""The interface between the recurrent language model and its output layer.

Shapes: N words of a batch, H hidden, M history words, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from asr.lm.interface import WordScorer
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.outputs.log_partition import LogZ


class OutputLayer(nn.Module, WordScorer):
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

    def exact_log_z(self, num_queries: int) -> LogZ | None:
        """The function that computes the true log Z with the current weights, see `log_z_of`; None without one."""
        return None
