"""Word sequences as nodes of one tree: a language model whose scores are all 0 and which forgets no word.

Shapes: N streams, Q queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.lm.contexts import ContextTable
from asr.lm.interface import LanguageModel
from asr.text.symbols import Vocabulary


class HistoryTree(LanguageModel):
    """A `LanguageModel` whose every score is 0 and whose contexts are equal only where all words are.

    Args:
        vocabulary: the words.
        device: where it is asked.
    """

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        # A node's key is its parent and its last word; node 0 has neither.
        self._table = ContextTable(device)
        self._table.index_of(torch.zeros(1, dtype=torch.int64, device=device))

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The empty history, (num_streams,)."""
        return torch.zeros(num_streams, dtype=torch.int64, device=self._device)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros, and the longer history: (Q,), (Q,)."""
        next_idx = self._table.index_of(context_idx * len(self._vocabulary) + word_id)
        return torch.zeros(len(word_id), device=self._device), next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        """Zeros, (Q,)."""
        return torch.zeros(len(context_idx), device=self._device)
