"""A backoff n-gram model of any size in flat arrays, looked up in batches.

Shapes: S states, A arcs, V words, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asr.lm.ngram_arpa import read_arpa
from asr.lm.ngram_trie import ROOT, NgramTrie
from asr.text.vocabulary import BOS_ID, EOS_ID, UNK_ID, Vocabulary

ROOT_STATE = 0


@dataclass(frozen=True)
class NgramArrays:
    """The model as an acceptor: a state is a word history, an arc a listed n-gram. State 0 has no history.

    A state's arcs stand together, sorted by label; state 0 has one arc for each word of the vocabulary, arc w
    for word w. A history is a state only where something depends on it (an n-gram goes on from it or it has a
    backoff weight of its own), so equal futures are one state.

    Attributes:
        arc_begin: (S + 1,) int64, first arc of each state.
        label: (A,) int32, word id.
        score: (A,) float32, natural log P(label | state).
        dst_state: (A,) int32.
        backoff_state: (S,) int32, the longest shorter history; state 0's own is 0.
        backoff_score: (S,) float32.
        word_map: (V,) int64, the word itself, or `UNK_ID` for words that the model does not list.
    """

    arc_begin: Tensor
    label: Tensor
    score: Tensor
    dst_state: Tensor
    backoff_state: Tensor
    backoff_score: Tensor
    word_map: Tensor

    def to(self, device: torch.device | str) -> NgramArrays:
        """The same arrays on a device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    @classmethod
    def from_trie(cls, trie: NgramTrie) -> NgramArrays:
        """Turns n-grams into states and arcs: arc p is n-gram p of the trie."""
        num_arcs = len(trie.parent)
        num_children = np.bincount(trie.parent[trie.order_begin[1] :], minlength=num_arcs)
        backoff = trie.backoff
        is_state = (num_children > 0) | (backoff != 0.0)
        is_state[trie.order_begin[-2] :] = False
        suffix = trie.suffixes()
        num_states = 1 + int(is_state.sum())
        own = is_state.cumsum(dtype=np.int64)
        dst_state = np.zeros(num_arcs, dtype=np.int32)
        for order in range(1, trie.order + 1):
            span = trie.span(order)
            shorter = np.where(suffix[span] == ROOT, ROOT_STATE, dst_state[suffix[span]])
            dst_state[span] = np.where(is_state[span], own[span], shorter)
        suffix_of_state = suffix[is_state]
        backoff_state = np.zeros(num_states, dtype=np.int32)
        backoff_state[1:] = np.where(suffix_of_state == ROOT, ROOT_STATE, dst_state[suffix_of_state])
        backoff_score = np.zeros(num_states, dtype=np.float32)
        backoff_score[1:] = backoff[is_state]
        arc_begin = np.zeros(num_states + 1, dtype=np.int64)
        arc_begin[1] = trie.order_begin[1]
        arc_begin[2:] = num_children[is_state]
        np.cumsum(arc_begin, out=arc_begin)
        word_map = np.where(trie.listed(), np.arange(trie.order_begin[1]), UNK_ID)
        word_map[BOS_ID] = BOS_ID
        arrays = (arc_begin, trie.word_id, trie.score, dst_state, backoff_state, backoff_score, word_map)
        return cls(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))


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
        self._unlisted = torch.nonzero(arrays.word_map.ne(word))[:, 0]
        self.num_unlisted_words = int((self._unlisted > UNK_ID).sum())
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

    def to(self, device: torch.device | str) -> NgramLM:
        """The same model on a device."""
        return NgramLM(self._vocabulary, self.arrays.to(device), self.order, self.name)

    def start(self, num_streams: int) -> Tensor:
        """The state after `<s>` for each stream, (num_streams,) int64."""
        return torch.full((num_streams,), self._start_state, dtype=torch.int64, device=self.device)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | state) and the next state: log_prob (Q,), next_idx (Q,)."""
        arc_idx, backoff = self.find_arcs(context_idx, self.arrays.word_map[word_id])
        return backoff + self.arrays.score[arc_idx], self.arrays.dst_state[arc_idx].to(torch.int64)

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | state), (Q,)."""
        return self.score(context_idx, torch.full_like(context_idx, EOS_ID))[0]

    def find_arcs(self, state: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Follows backoffs until the word is listed: arc_idx (Q,) int64 and the backoff weights passed (Q,)."""
        arc_idx = word_id.clone()  # in state 0 the word's arc has its own number
        backoff = torch.zeros(len(state), dtype=torch.float32, device=state.device)
        open_idx = torch.nonzero(state.ne(ROOT_STATE))[:, 0]
        state = state[open_idx]
        while len(open_idx):
            found = self._search(state, word_id[open_idx])
            hit = found >= 0
            arc_idx[open_idx[hit]] = found[hit]
            missed = ~hit
            open_idx, state = open_idx[missed], state[missed]
            backoff[open_idx] += self.arrays.backoff_score[state]
            state = self.arrays.backoff_state[state].to(torch.int64)
            still_open = state != ROOT_STATE
            open_idx, state = open_idx[still_open], state[still_open]
        return arc_idx, backoff

    def _search(self, state: Tensor, word_id: Tensor) -> Tensor:
        """Binary search among each state's labels: arc_idx (Q,), -1 where the word is not listed."""
        label = self.arrays.label
        low = self.arrays.arc_begin[state]
        end = self.arrays.arc_begin[state + 1]
        high = end
        for _ in range(self._num_halvings):
            middle = (low + high) // 2
            below = (middle < high) & (label[middle.clamp(max=len(label) - 1)] < word_id)
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
        at_low = low.clamp(max=len(label) - 1)
        return torch.where((low < end) & (label[at_low] == word_id), low, torch.full_like(low, -1))

    def score_sentence(self, words: Sequence[str]) -> Tensor:
        """log P of each word of a sentence and of its end, (len(words) + 1,): for tests and perplexities."""
        context_idx = self.start(1)
        log_prob = []
        for word_id in self._vocabulary.ids_of([*words, "</s>"]).to(self.device):
            score, context_idx = self.score(context_idx, word_id[None])
            log_prob.append(score)
        return torch.cat(log_prob)
