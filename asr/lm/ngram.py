"""A backoff n-gram model of any size in flat arrays, looked up in batches.

Shapes: S states, A arcs, V words, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from asr.lm.ngram_arpa import read_arpa
from asr.lm.ngram_arrays import ROOT_STATE, NgramArrays
from asr.lm.ngram_trie import NgramTrie
from asr.text.vocabulary import BOS_ID, EOS_ID, UNK_ID, Vocabulary

_QUERIES_AT_ONCE = 1 << 14  # on a CPU, so that what is between two steps stays in its cache


class NgramLM:
    """An n-gram language model behind the `LanguageModel` contract; a context index is a state.

    Args:
        vocabulary: the words that `word_id` numbers.
        arrays: the model, all on the device where queries are answered.
        order: length of the longest n-grams.
        name: where the model came from, for reports.

    Words of the vocabulary that the model does not list are scored as `<unk>`; `num_unlisted_words` says how many.
    """

    def __init__(self, vocabulary: Vocabulary, arrays: NgramArrays, order: int, name: str = "n-gram model") -> None:
        self._vocabulary = vocabulary
        self.arrays = arrays
        self.order = order
        self.name = name
        word = torch.arange(len(vocabulary), device=arrays.word_map.device)
        unlisted = torch.nonzero(arrays.word_map.ne(word))[:, 0]
        self._maps_words = len(unlisted) > 0
        self.num_unlisted_words = int(torch.sum(unlisted > UNK_ID))
        num_arcs = arrays.arc_begin[2:] - arrays.arc_begin[1:-1]
        self._num_halvings = int(num_arcs.max()).bit_length() if len(num_arcs) else 0
        self._start_state = int(arrays.dst_state[BOS_ID])

    @classmethod
    def from_trie(cls, trie: NgramTrie, name: str = "n-gram model") -> NgramLM:
        """Builds the arrays from n-grams."""
        return cls(trie.vocabulary, NgramArrays.from_trie(trie), trie.order, name)

    @classmethod
    def from_arpa(cls, path: str | Path, vocabulary: Vocabulary | None = None) -> NgramLM:
        """Reads an ARPA file (plain, .gz, .xz).

        Args:
            path: the file.
            vocabulary: word ids to answer for; by default the file's words, in its order.
        """
        return cls.from_trie(read_arpa(path, vocabulary), str(path))

    def with_index(self, load: float = 0.6) -> NgramLM:
        """The same model with a hash index of 8 / `load` bytes an n-gram: several times the look-ups a second."""
        return NgramLM(self._vocabulary, self.arrays.with_index(load), self.order, self.name)

    def quantized(self) -> NgramLM:
        """The same model with scores of one byte."""
        return NgramLM(self._vocabulary, self.arrays.quantized(), self.order, self.name)

    def to(self, device: torch.device | str) -> NgramLM:
        """The same model on a device."""
        return NgramLM(self._vocabulary, self.arrays.to(device), self.order, self.name)

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._vocabulary

    @property
    def device(self) -> torch.device:
        """Where queries are answered."""
        return torch.device(self.arrays.label.device)

    @property
    def num_states(self) -> int:
        """How many histories are told apart."""
        return len(self.arrays.backoff_state)

    @property
    def num_arcs(self) -> int:
        """How many n-grams of all orders there are, one per word of the vocabulary among them."""
        return len(self.arrays.label)

    def start(self, num_streams: int) -> Tensor:
        """The state after `<s>` for each stream, (num_streams,) int64."""
        return torch.full((num_streams,), self._start_state, dtype=torch.int64, device=self.device)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | state) and the next state: log_prob (Q,), next_idx (Q,)."""
        if len(word_id) <= _QUERIES_AT_ONCE or self.device.type != "cpu":
            return self._score(context_idx, word_id)
        log_prob = torch.empty(len(word_id), dtype=torch.float32)
        next_idx = torch.empty(len(word_id), dtype=torch.int64)
        for begin in range(0, len(word_id), _QUERIES_AT_ONCE):
            part = slice(begin, begin + _QUERIES_AT_ONCE)
            log_prob[part], next_idx[part] = self._score(context_idx[part], word_id[part])
        return log_prob, next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | state), (Q,)."""
        return self.score(context_idx, torch.full_like(context_idx, EOS_ID))[0]

    def _score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        arc_idx, backoff = self.find_arcs(context_idx, word_id)
        next_idx = self.arrays.dst_state.index_select(0, arc_idx).to(torch.int64)
        return backoff + self.arrays.arc_score(arc_idx), next_idx

    def find_arcs(self, state: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Follows backoffs until the word is listed: arc_idx (Q,) int64 and the backoff weights passed (Q,)."""
        arrays = self.arrays
        if self._maps_words:
            word_id = arrays.word_map.index_select(0, word_id)
        arc_idx = word_id.clone()  # in state 0 the word's arc has its own number
        backoff = torch.zeros(len(state), dtype=torch.float32, device=state.device)
        open_idx = torch.nonzero(state).squeeze(1)
        state, word = state.index_select(0, open_idx), word_id.index_select(0, open_idx)
        while len(open_idx):
            found = arrays.index.find(state, word) if arrays.index is not None else self._search(state, word)
            hit = torch.nonzero(found.ge(0)).squeeze(1)
            arc_idx.index_copy_(0, open_idx.index_select(0, hit), found.index_select(0, hit))
            missed = torch.nonzero(found.lt(0)).squeeze(1)
            open_idx, state = open_idx.index_select(0, missed), state.index_select(0, missed)
            backoff.index_add_(0, open_idx, arrays.backoff_score.index_select(0, state))
            state = arrays.backoff_state.index_select(0, state).to(torch.int64)
            inner = torch.nonzero(state.ne(ROOT_STATE)).squeeze(1)
            open_idx, state = open_idx.index_select(0, inner), state.index_select(0, inner)
            word = word_id.index_select(0, open_idx)
        return arc_idx, backoff

    def _search(self, state: Tensor, word_id: Tensor) -> Tensor:
        """Binary search among each state's labels: arc_idx (Q,), -1 where the word is not listed."""
        label = self.arrays.label
        low = self.arrays.arc_begin.index_select(0, state).to(torch.int64)
        end = self.arrays.arc_begin.index_select(0, state + 1).to(torch.int64)
        high = end
        for _ in range(self._num_halvings):
            middle = torch.bitwise_right_shift(low + high, 1)
            below = (middle < high) & (label.index_select(0, middle.clamp(max=len(label) - 1)) < word_id)
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
        at_low = label.index_select(0, low.clamp(max=len(label) - 1))
        return torch.where((low < end) & (at_low == word_id), low, torch.full_like(low, -1))

    def score_sentence(self, words: Sequence[str]) -> Tensor:
        """log P of each word of a sentence and of its end, (len(words) + 1,): for tests and perplexities."""
        context_idx = self.start(1)
        log_prob = []
        for word_id in self._vocabulary.ids_of([*words, "</s>"]).to(self.device):
            score, context_idx = self.score(context_idx, word_id[None])
            log_prob.append(score)
        return torch.cat(log_prob)
