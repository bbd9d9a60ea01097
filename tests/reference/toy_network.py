"""A small random GRU with a full or class-factored softmax and bigram features: a `StatefulNetwork` for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from asr.lm.interface import StatefulNetwork
from asr.text.symbols import Vocabulary


class ToyNetwork(StatefulNetwork):
    """State of [a column that counts the words read, hidden]: wider than what the output layer reads, on purpose."""

    def __init__(self, num_words: int = 20, hidden_size: int = 8, num_history_words: int = 2, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = Vocabulary([f"w{i}" for i in range(num_words)])
        vocabulary_size = num_words + 4
        self.hidden_size = hidden_size
        self.state_size = hidden_size + 1
        self.num_history_words = num_history_words
        self.num_steps = 0
        self.num_rows = 0
        self.embedding = torch.randn(vocabulary_size, hidden_size, generator=generator)
        self.cell = torch.nn.GRUCell(hidden_size, hidden_size)
        for weight in self.cell.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) / hidden_size**0.5
        self.output = torch.randn(vocabulary_size, hidden_size, generator=generator) * 2 / hidden_size**0.5
        self.output.requires_grad_(True)  # as the weights of a trained network do
        self.feature = torch.randn(max(num_history_words, 1), vocabulary_size, vocabulary_size, generator=generator)

    def initial_state(self) -> Tensor:
        return torch.linspace(-0.5, 0.5, self.state_size)

    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        self.num_steps += 1
        self.num_rows += word_id.numel()
        hidden = self.cell(self.embedding[word_id], state[:, 1:])
        return torch.cat((state[:, :1] * 0.9 + 0.1, hidden), dim=1)

    def _logits(self, hidden: Tensor, history: Tensor) -> Tensor:
        logits = hidden @ self.output.t()
        for position in range(self.num_history_words):
            logits = logits + self.feature[position][history[:, position]]
        return logits

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        return self._logits(hidden, history).log_softmax(1).gather(1, word_id.unsqueeze(1)).squeeze(1)


class ToyNormalizedNetwork(ToyNetwork):
    """The same distribution, offering the numerator and the normaliser apart."""

    cacheable_terms = "history"

    def __init__(self, num_words: int = 20, hidden_size: int = 8, num_history_words: int = 2, seed: int = 0) -> None:
        super().__init__(num_words, hidden_size, num_history_words, seed)
        self.num_normalizers = 0

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        return self._logits(hidden, history).gather(1, word_id.unsqueeze(1)).squeeze(1)

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        self.num_normalizers += hidden.shape[0]
        return self._logits(hidden, history).logsumexp(1)


class ToyClassNetwork(ToyNormalizedNetwork):
    """P(class of word | history) P(word | class, history); the class is the word id modulo 5."""

    num_classes = 5
    cacheable_terms = "group"

    def __init__(self, num_words: int = 20, hidden_size: int = 8, num_history_words: int = 2, seed: int = 0) -> None:
        super().__init__(num_words, hidden_size, num_history_words, seed)
        self.num_group_normalizers = 0
        self.class_output = torch.randn(
            self.num_classes, hidden_size, generator=torch.Generator().manual_seed(seed + 1)
        )

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        group = self.group_of(word_id)
        return (
            self.word_score(hidden, history, word_id)
            - (hidden @ self.class_output.t()).logsumexp(1)
            - self._group_logits(hidden, history, group).logsumexp(1)
        )

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        group_logit = (hidden @ self.class_output.t()).gather(1, self.group_of(word_id).unsqueeze(1)).squeeze(1)
        return group_logit + super().word_score(hidden, history, word_id)

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        self.num_normalizers += hidden.shape[0]
        return (hidden @ self.class_output.t()).logsumexp(1)

    def group_of(self, word_id: Tensor) -> Tensor:
        return word_id % self.num_classes

    def _group_logits(self, hidden: Tensor, history: Tensor, group: Tensor) -> Tensor:
        in_group = (torch.arange(self.output.shape[0]) % self.num_classes).unsqueeze(0) == group.unsqueeze(1)
        return self._logits(hidden, history).masked_fill(~in_group, -float("inf"))

    def group_normalizer(self, hidden: Tensor, history: Tensor, group: Tensor) -> Tensor:
        self.num_group_normalizers += hidden.shape[0]
        return self._group_logits(hidden, history, group).logsumexp(1)
