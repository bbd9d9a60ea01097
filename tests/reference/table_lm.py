"""A language model that is a dictionary: the slow, obvious answer to the score contract."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from asr.lm.interface import LanguageModel
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID, Vocabulary


class TableLM(LanguageModel):
    """Random probabilities that depend on the whole history; a context index is a place in the list of histories.

    Args:
        vocabulary: the words.
        seed: another seed is another model.
        num_history_words: how many words of the history count; None is all of them.
    """

    def __init__(self, vocabulary: Vocabulary, seed: int = 0, num_history_words: int | None = None) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._num_history_words = num_history_words
        self._histories: list[tuple[int, ...]] = []
        self._idx_of: dict[tuple[int, ...], int] = {}
        self._distributions: dict[tuple[int, ...], list[float]] = {}
        self.num_calls = 0

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def history_of(self, context_idx: int) -> tuple[int, ...]:
        return self._histories[context_idx]

    def log_prob_of(self, history: tuple[int, ...], word_id: int) -> float:
        """log P(word | history), history beginning with `<s>`."""
        history = self._cut(history)
        if history not in self._distributions:
            generator = random.Random(f"{self._seed} {history}")
            scores = torch.tensor([generator.gauss(0.0, 2.0) for _ in self.vocabulary.words])
            scores[[EPSILON_ID, BOS_ID]] = -torch.inf
            self._distributions[history] = scores.log_softmax(0).tolist()
        return self._distributions[history][word_id]

    def score_sentence(self, word_ids: tuple[int, ...]) -> float:
        """The sentence word by word, `</s>` included."""
        words = (BOS_ID, *word_ids, EOS_ID)
        return sum(self.log_prob_of(words[:i], words[i]) for i in range(1, len(words)))

    def reserve(self, num_queries: int) -> tuple[Tensor, ...]:
        """No calls are captured, so the host may answer them."""
        return ()

    def start(self, num_streams: int) -> Tensor:
        return torch.full((num_streams,), self._place((BOS_ID,)), dtype=torch.int64)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        queries = list(zip(context_idx.tolist(), word_id.tolist(), strict=True))
        answers = {}
        for context, word in dict.fromkeys(queries):  # many tokens ask the same
            history = self._histories[context]
            answers[context, word] = self.log_prob_of(history, word), self._place((*history, word))
        log_prob = torch.tensor([answers[query][0] for query in queries], dtype=torch.float32)
        return log_prob, torch.tensor([answers[query][1] for query in queries], dtype=torch.int64)

    def final(self, context_idx: Tensor) -> Tensor:
        return torch.tensor([self.log_prob_of(self._histories[idx], EOS_ID) for idx in context_idx.tolist()])

    def _cut(self, history: tuple[int, ...]) -> tuple[int, ...]:
        return history if self._num_history_words is None else history[-self._num_history_words :]

    def _place(self, history: tuple[int, ...]) -> int:
        history = self._cut(history)
        if history not in self._idx_of:
            self._idx_of[history] = len(self._histories)
            self._histories.append(history)
        return self._idx_of[history]


class ForgetfulLM(TableLM):
    """Answers only for contexts that were kept, or made since."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.held: set[int] = set()
        self.made: set[int] = set()
        self.most_held = 0

    def start(self, num_streams: int) -> Tensor:
        context = super().start(num_streams)
        self.held |= set(context.tolist())
        return context

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        assert self.held.issuperset(context_idx.tolist())
        log_prob, following = super().score(context_idx, word_id)
        self.held |= set(following.tolist())
        self.made |= self.held
        self.most_held = max(self.most_held, len(self.held))
        return log_prob, following

    def final(self, context_idx: Tensor) -> Tensor:
        assert self.held.issuperset(context_idx.tolist())
        return super().final(context_idx)

    def retain(self, live: Tensor) -> None:
        self.held &= set(live.tolist())
