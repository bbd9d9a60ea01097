"""Adapter for language models that score one word at a time in a given state, such as KenLM's and torchaudio's.

Shapes: N streams, Q queries.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from asr.lm.interface import LanguageModel
from asr.text.symbols import Vocabulary


class StatefulModel(LanguageModel):
    """A language model that caches the score of each (state, word); contexts number the states seen so far, from 0.

    Several times slower than models that score in batches. Several threads may query it.

    Args:
        vocabulary: the words of `word_id`.
        first: the state before the first word.
    """

    def __init__(self, vocabulary: Vocabulary, first: Any) -> None:
        self._vocabulary = vocabulary
        self._states: list[Any] = [first]
        self._edges: dict[tuple[int, int], tuple[float, int]] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def after(self, state: Any, word_id: int) -> tuple[float, Any]:
        """The score of a word in a state, natural log, and the state after it."""

    @abstractmethod
    def at_end(self, state: Any) -> float:
        """The score of ending the sentence in a state, natural log."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The words of `word_id`."""
        return self._vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The context of the first state, (num_streams,)."""
        return torch.zeros(num_streams, dtype=torch.int64)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | history) and the next context, (Q,) each."""
        with self._lock:
            answers = [self._edge(*query) for query in zip(context_idx.tolist(), word_id.tolist(), strict=True)]
        log_prob = torch.tensor([score for score, _ in answers], dtype=torch.float32)
        return log_prob, torch.tensor([state for _, state in answers], dtype=torch.int64)

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | history), (Q,)."""
        with self._lock:
            scores = [self.at_end(self._states[idx]) for idx in context_idx.tolist()]
        return torch.tensor(scores, dtype=torch.float32)

    def _edge(self, context_idx: int, word_id: int) -> tuple[float, int]:
        known = self._edges.get((context_idx, word_id))
        if known is None:
            score, state = self.after(self._states[context_idx], word_id)
            known = self._edges[context_idx, word_id] = float(score), len(self._states)
            self._states.append(state)
        return known
