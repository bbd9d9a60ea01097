"""A backoff n-gram model of any size in flat arrays, looked up in batches.

Shapes: S states, A arcs, V words, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asr.compiled_forms import gpu_module
from asr.lm.compiled_loop import compiled_loop
from asr.lm.contract import LoopTables
from asr.lm.ngram.arc_finder import ArcFinder
from asr.lm.ngram.arrays import NgramArrays
from asr.lm.ngram.kernel import score_words
from asr.lm.ngram.trie import NgramTrie
from asr.lm.ngram.trie_arpa import read_arpa
from asr.text.vocabulary import BOS_ID, EOS_ID, UNK_ID, Vocabulary

_QUERIES_AT_ONCE = 1 << 16  # on a CPU, so that what is between two steps stays in its cache


class NgramLM:
    """An n-gram language model behind the `LanguageModel` contract; a context index is a state.

    Args:
        vocabulary: the words that `word_id` numbers.
        arrays: the model, all on the device where queries are answered.
        order: length of the longest n-grams.
        name: where the model came from, for reports.
        compiled: whether to run numba's loop on a CPU and Triton's kernel on a GPU, where they are installed; the
            answers are the same.

    Words of the vocabulary that the model does not list are scored as `<unk>`; `num_unlisted_words` says how many.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        arrays: NgramArrays,
        order: int,
        name: str = "n-gram model",
        compiled: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self.arrays = arrays
        self.order = order
        self.name = name
        self._finder = ArcFinder(arrays)
        on_cpu = arrays.label.device.type == "cpu"
        self._loop = compiled_loop(score_words, reorders_sums=False) if compiled and on_cpu else None
        self._kernel = gpu_module("asr.lm.ngram.gpu_kernel", arrays.label.device) if compiled else None
        self._model = arrays.for_loop() if on_cpu else ()
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
    def num_unlisted_words(self) -> int:
        """How many words of the vocabulary the model lacks, the four special ones left out."""
        word_map = self.arrays.word_map[UNK_ID + 1 :]
        return int(torch.sum(word_map == UNK_ID))

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
        if self._loop is not None:
            return self._score_in_loop(self._loop, context_idx, word_id)
        if self._kernel is not None:
            log_prob, next_idx = self._kernel.score_words(self.arrays, context_idx, self._finder.mapped(word_id))
            return log_prob, next_idx
        arc_idx, backoff = self._finder.find(context_idx, word_id)
        next_idx = self.arrays.dst_state.index_select(0, arc_idx).to(torch.int64)
        return backoff + self.arrays.arc_score(arc_idx), next_idx

    def _score_in_loop(self, loop: Callable[..., None], context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, next_idx = torch.empty(len(word_id)), torch.empty(len(word_id), dtype=torch.int64)
        word_id = self._finder.mapped(word_id)
        queries = context_idx.contiguous().numpy(), word_id.contiguous().numpy()
        loop(*queries, self._model, log_prob.numpy(), next_idx.numpy())
        return log_prob, next_idx

    def for_loop(self) -> LoopTables | None:
        """Where words stand in the model's list (V,), what is added to their scores, nothing (0,), and its arrays."""
        if self._loop is None:
            return None
        return self.arrays.word_map.numpy(), np.zeros(0, dtype=np.float32), self._model

    def score_sentence(self, words: Sequence[str]) -> Tensor:
        """log P of each word of a sentence and of its end, (len(words) + 1,): for tests and perplexities."""
        context_idx = self.start(1)
        log_prob = []
        for word_id in self._vocabulary.ids_of([*words, "</s>"]).to(self.device):
            score, context_idx = self.score(context_idx, word_id[None])
            log_prob.append(score)
        return torch.cat(log_prob)
