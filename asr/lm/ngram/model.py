"""A backoff n-gram model of any size in flat arrays, queried in batches.

`NgramArrays` holds states (word histories), their arcs (n-grams) and backoffs. `ArcFinder` finds the arc that answers a
query, following backoffs. `NgramLM` is the language model.

Shapes: S states, A arcs, V words, Q queries.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.kernels.jit import gpu_module, has_loops, jit_required
from asr.lm.contexts import check_contexts, check_words
from asr.lm.interface import LanguageModel
from asr.lm.ngram.arpa import read_arpa
from asr.lm.ngram.lookup import ArcIndex, NgramTables, look_up_ngrams
from asr.lm.ngram.trie import ROOT, NgramTrie
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID, UNK_ID, Vocabulary

ROOT_STATE = 0
NUM_LEVELS = 256
_EMPTY_INDEX = ArcIndex(torch.zeros(0, dtype=torch.int64), 1, 1, 32)


@dataclass(frozen=True)
class NgramArrays:
    """The model as an acceptor: a state is a word history, an arc a listed n-gram. State 0 has no history.

    A state's arcs are contiguous and sorted by label; state 0 has one arc for each word of the vocabulary, arc w for
    word w. A history is a state only if something depends on it (a longer n-gram begins with it, or it has a backoff
    weight of its own), so histories with equal futures share a state.

    Attributes:
        arc_begin: (S + 1,) int32, first arc of each state.
        label: (A,) int32, word id.
        score: (A,) float32, natural log P(label | state); or uint8, a row of `score_level`.
        dst_state: (A,) int32.
        backoff_state: (S,) int32, the longest shorter history; state 0's own is 0.
        backoff_score: (S,) float32.
        word_map: (V,) int64, the word itself, or `UNK_ID` for words that the model does not list.
        score_level: (256,) float32 where scores are quantized, else empty.
        index: finds arcs by hashing; without it they are found by binary search.
    """

    arc_begin: Tensor
    label: Tensor
    score: Tensor
    dst_state: Tensor
    backoff_state: Tensor
    backoff_score: Tensor
    word_map: Tensor
    score_level: Tensor
    index: ArcIndex | None = None

    def to(self, device: torch.device | str) -> NgramArrays:
        """The same arrays on a device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved, index=self.index.to(device) if self.index is not None else None)

    def tensors(self) -> dict[str, Tensor]:
        """The arrays by name, the index left out."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "index"}

    def num_bytes(self) -> dict[str, int]:
        """The size of each array, and of the index, in bytes."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self.tensors().items()}
        return sizes | {"index": 8 * len(self.index.slot) if self.index is not None else 0}

    def arc_score(self, arc_idx: Tensor) -> Tensor:
        """log P(label | state) of arcs, (Q,) float32."""
        score = self.score.index_select(0, arc_idx)
        if len(self.score_level):
            return self.score_level.index_select(0, score.to(torch.int64))
        return score

    def states_that_back_off(self) -> Tensor:
        """The states with a shorter history and a backoff probability above 0, (B,) int64."""
        backs_off = self.backoff_score > -torch.inf
        backs_off[ROOT_STATE] = False
        return backs_off.nonzero().squeeze(1)

    def lookup_tables(self) -> NgramTables:
        """The arrays, on the host, as compiled loops take them."""
        index = self.index if self.index is not None else _EMPTY_INDEX
        is_mapped = bool(torch.any(torch.ne(self.word_map, torch.arange(len(self.word_map)))))
        names = ("arc_begin", "label", "backoff_state", "backoff_score", "score", "score_level", "dst_state")
        return NgramTables(
            (self.word_map if is_mapped else self.word_map[:0]).numpy(),
            *(index.slot.numpy(), index.num_homes, index.word_bits, index.key_bits),
            *(getattr(self, name).numpy() for name in names),
        )

    def with_index(self, load: float = 0.6) -> NgramArrays:
        """The same arrays with a hash index; `load` is the share of its slots in use."""
        begin = self.arc_begin.numpy()
        num_root_arcs = int(begin[1])
        state = np.repeat(np.arange(1, len(begin) - 1, dtype=np.int32), np.diff(begin[1:]))
        label = self.label[num_root_arcs:].numpy()
        return replace(self, index=ArcIndex.build(state, label, num_root_arcs, len(self.word_map), load))

    def quantized(self) -> NgramArrays:
        """The same model with 1-byte scores: 256 levels, each the mean of an equal share of the scores.

        Scores of -inf keep a level of their own.
        """
        score = self.score.numpy()
        is_finite = np.isfinite(score)
        ordered = np.sort(score[is_finite])
        levels = np.array(
            [part.mean(dtype=np.float64) for part in np.array_split(ordered, NUM_LEVELS - 1) if len(part)]
        )
        levels = np.concatenate([[-np.inf], levels]).astype(np.float32)
        nearest = np.searchsorted((levels[1:-1] + levels[2:]) / 2, score) + 1
        code = np.where(is_finite, nearest, 0).astype(np.uint8)
        levels = np.concatenate([levels, np.full(NUM_LEVELS - len(levels), -np.inf, dtype=np.float32)])
        return replace(self, score=torch.from_numpy(code), score_level=torch.from_numpy(levels))

    @classmethod
    def from_trie(cls, trie: NgramTrie) -> NgramArrays:
        """Turns n-grams into states and arcs: arc p is n-gram p of the trie."""
        num_arcs = len(trie.parent)
        num_children = np.bincount(trie.parent[trie.order_begin[1] :], minlength=num_arcs)
        is_state = (num_children > 0) | (trie.backoff != 0.0)
        is_state[trie.order_begin[-2] :] = False
        suffix = trie.suffixes()
        num_states = 1 + int(is_state.sum())
        own = is_state.cumsum(dtype=np.int32)
        dst_state = np.zeros(num_arcs, dtype=np.int32)
        for order in range(1, trie.order + 1):
            span = trie.span(order)
            shorter = np.where(suffix[span] == ROOT, ROOT_STATE, dst_state[suffix[span]])
            dst_state[span] = np.where(is_state[span], own[span], shorter)
        suffix_of_state = suffix[is_state]
        backoff_state = np.zeros(num_states, dtype=np.int32)
        backoff_state[1:] = np.where(suffix_of_state == ROOT, ROOT_STATE, dst_state[suffix_of_state])
        backoff_score = np.zeros(num_states, dtype=np.float32)
        backoff_score[1:] = trie.backoff[is_state]
        arc_begin = np.zeros(num_states + 1, dtype=np.int32)
        arc_begin[1] = trie.order_begin[1]
        arc_begin[2:] = num_children[is_state]
        np.cumsum(arc_begin, out=arc_begin)
        word_map = np.where(trie.listed(), np.arange(trie.order_begin[1]), UNK_ID)
        word_map[[EPSILON_ID, BOS_ID]] = (EPSILON_ID, BOS_ID)
        return cls(
            arc_begin=torch.from_numpy(arc_begin),
            label=torch.from_numpy(trie.word_id),
            score=torch.from_numpy(trie.score),
            dst_state=torch.from_numpy(dst_state),
            backoff_state=torch.from_numpy(backoff_state),
            backoff_score=torch.from_numpy(backoff_score),
            word_map=torch.from_numpy(word_map),
            score_level=torch.zeros(0, dtype=torch.float32),
        )


_NARROW_OFFSET = 1 << 15


def is_narrow(num_words: int) -> bool:
    """Whether the labels of a vocabulary of this size fit 16 bits."""
    return num_words <= 2 * _NARROW_OFFSET


def narrow(label: Tensor) -> Tensor:
    """Labels (A,) in 16 bits, minus 2^15, which keeps their order."""
    return torch.sub(label, _NARROW_OFFSET).to(torch.int16)


class ArcFinder:
    """Finds arcs by hashing where the arrays have an index, else by binary search.

    Args:
        arrays: the model; the scores and destinations of arcs are not read, and backoff weights only by `find`. Labels
            may be `narrow`.
    """

    def __init__(self, arrays: NgramArrays) -> None:
        self._arc_begin = arrays.arc_begin
        self._label = arrays.label
        self._label_offset = _NARROW_OFFSET if arrays.label.dtype == torch.int16 else 0
        self._backoff_state = arrays.backoff_state
        self._backoff_score = arrays.backoff_score
        self._word_map = arrays.word_map
        self._index = arrays.index
        word = torch.arange(len(arrays.word_map), device=arrays.word_map.device)
        self._maps_words = bool(torch.any(torch.ne(arrays.word_map, word)))

    @functools.cached_property
    def _num_halvings(self) -> int:
        """How many steps the longest binary search takes; used only without an index."""
        num_arcs = self._arc_begin[2:] - self._arc_begin[1:-1]
        return int(num_arcs.max()).bit_length() if len(num_arcs) else 0

    def mapped(self, word_id: Tensor) -> Tensor:
        """The words with those that the model does not list replaced by `<unk>`, (Q,)."""
        return self._word_map.index_select(0, word_id) if self._maps_words else word_id

    def find(self, state: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Backs off until the word is listed: arc_idx (Q,) int64, and the sum of the log backoff weights (Q,)."""
        arc_idx, passed = self.follow(state, word_id)
        backoff = torch.zeros(len(state), dtype=torch.float32, device=state.device)
        for query, passed_state in passed:
            backoff.index_add_(0, query, self._backoff_score.index_select(0, passed_state))
        return arc_idx, backoff

    def follow(self, state: Tensor, word_id: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The same without backoff weights: arc_idx (Q,), and for each step which queries back off from which states.

        A step is (query (P,), state (P,)); no query occurs twice in a step.
        """
        word_id = self.mapped(word_id)
        arc_idx = word_id.clone()  # in state 0 the word's arc has its own number
        passed = []
        open_idx = torch.nonzero(state).squeeze(1)
        state, word = state.index_select(0, open_idx), word_id.index_select(0, open_idx)
        while len(open_idx):
            found = self._index.find(state, word) if self._index is not None else self._search(state, word)
            missed = found.lt(0)
            arc_idx.index_copy_(0, open_idx, torch.where(missed, word, found))
            missed = torch.nonzero(missed).squeeze(1)
            open_idx, state = open_idx.index_select(0, missed), state.index_select(0, missed)
            passed.append((open_idx, state))
            state = self._backoff_state.index_select(0, state)
            inner = torch.nonzero(state).squeeze(1)
            open_idx, state = open_idx.index_select(0, inner), state.index_select(0, inner).to(torch.int64)
            word = word_id.index_select(0, open_idx)
        return arc_idx, passed

    def _search(self, state: Tensor, word_id: Tensor) -> Tensor:
        """Binary search among each state's labels: arc_idx (Q,), -1 where the word is not listed."""
        label, word_id = self._label, word_id - self._label_offset
        low = self._arc_begin.index_select(0, state).to(torch.int64)
        end = self._arc_begin.index_select(0, state + 1).to(torch.int64)
        high = end
        for _ in range(self._num_halvings):
            middle = torch.bitwise_right_shift(low + high, 1)
            below = (middle < high) & (label.index_select(0, middle.clamp(max=len(label) - 1)) < word_id)
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
        at_low = label.index_select(0, low.clamp(max=len(label) - 1))
        return torch.where((low < end) & (at_low == word_id), low, torch.full_like(low, -1))


_QUERIES_AT_ONCE = 1 << 16  # on a CPU, so that intermediate results stay in its cache


class NgramLM(LanguageModel):
    """An n-gram language model that implements `LanguageModel`; a context index is a state.

    Args:
        vocabulary: the words that `word_id` numbers.
        arrays: the model, all on the device that runs the queries.
        order: length of the longest n-grams.
        name: where the model came from, for reports.
        compiled: whether to run numba's loop on a CPU and Triton's kernel on a GPU, where they are installed; the
            results are the same.

    Words of the vocabulary that the model does not list are scored as `<unk>`; `num_oov_words` is their number.
    """

    def __init__(
        self, vocabulary: Vocabulary, arrays: NgramArrays, order: int, name: str = "n-gram model", compiled: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self.arrays = arrays
        self.order = order
        self.name = name
        self._is_compiled = compiled
        self._finder = ArcFinder(arrays)
        self._kernel = gpu_module("asr.lm.ngram.lookup_triton", arrays.label.device) if compiled else None
        self._tables = arrays.lookup_tables() if compiled and has_loops(self.device) else None
        self._start_state = int(arrays.dst_state[BOS_ID])

    def __repr__(self) -> str:
        return f"NgramLM(name={self.name!r}, order={self.order}, num_arcs={self.num_arcs})"

    def __reduce__(self) -> tuple[type[NgramLM], tuple[Any, ...]]:
        # The tables for loops share the arrays' memory; copies of both would not.
        return NgramLM, (self._vocabulary, self.arrays, self.order, self.name, self._is_compiled)

    @classmethod
    def from_trie(cls, trie: NgramTrie, name: str = "n-gram model") -> NgramLM:
        """Builds the arrays from n-grams."""
        return cls(trie.vocabulary, NgramArrays.from_trie(trie), trie.order, name)

    @classmethod
    def from_arpa(cls, path: str | Path, vocabulary: Vocabulary | None = None) -> NgramLM:
        """Reads an ARPA file (plain, .gz, .xz).

        Args:
            path: the file.
            vocabulary: the word ids to use; by default those of the file's words, in its order.
        """
        return cls.from_trie(read_arpa(path, vocabulary), str(path))

    def with_index(self, load: float = 0.6) -> NgramLM:
        """The same model with a hash index of 8 / `load` bytes per n-gram: look-ups are several times faster."""
        return NgramLM(self._vocabulary, self.arrays.with_index(load), self.order, self.name)

    def quantized(self) -> NgramLM:
        """The same model with scores of one byte."""
        return NgramLM(self._vocabulary, self.arrays.quantized(), self.order, self.name)

    def to(self, device: torch.device | str) -> NgramLM:
        """The same model on a device."""
        return NgramLM(self._vocabulary, self.arrays.to(device), self.order, self.name)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def device(self) -> torch.device:
        """Where queries run."""
        return torch.device(self.arrays.label.device)

    @property
    def is_listed(self) -> Tensor:
        """Which words of the vocabulary are not scored as `<unk>`, or are `<unk>` itself, (V,) bool."""
        word_map = self.arrays.word_map
        return word_map == torch.arange(len(word_map), device=word_map.device)

    @property
    def num_oov_words(self) -> int:
        """How many words of the vocabulary the model does not list, the four special ones excluded."""
        return int(torch.sum(~self.is_listed[UNK_ID + 1 :]))

    @property
    def num_states(self) -> int:
        """The number of distinct histories."""
        return len(self.arrays.backoff_state)

    @property
    def num_arcs(self) -> int:
        """The number of n-grams of all orders, unigrams of unlisted words included."""
        return len(self.arrays.label)

    def start(self, num_streams: int) -> Tensor:
        return torch.full((num_streams,), self._start_state, dtype=torch.int64, device=self.device)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | state) and the next state: log_prob (Q,), next_idx (Q,).

        Raises:
            AsrError: there is no such state or no such word; on a CPU only, with numba.
        """
        if len(word_id) <= _QUERIES_AT_ONCE or self.device.type != "cpu":
            return self._score(context_idx, word_id)
        log_prob = torch.empty(len(word_id), dtype=torch.float32)
        next_idx = torch.empty(len(word_id), dtype=torch.int64)
        for begin in range(0, len(word_id), _QUERIES_AT_ONCE):
            part = slice(begin, begin + _QUERIES_AT_ONCE)
            log_prob[part], next_idx[part] = self._score(context_idx[part], word_id[part])
        return log_prob, next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        return self.score(context_idx, torch.full_like(context_idx, EOS_ID))[0]

    def _score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        if self._tables is not None:
            return self._score_in_loop(context_idx, word_id)
        if self._kernel is not None:
            log_prob, next_idx = self._kernel.score_words(self.arrays, context_idx, self._finder.mapped(word_id))
            return log_prob, next_idx
        arc_idx, backoff = self._finder.find(context_idx, word_id)
        next_idx = self.arrays.dst_state.index_select(0, arc_idx).to(torch.int64)
        return backoff + self.arrays.arc_score(arc_idx), next_idx

    def _score_in_loop(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        if len(word_id):
            # The loop would read beyond the arrays.
            low, high = torch.aminmax(word_id)
            check_words(int(low), int(high), len(self._vocabulary), f"a language model ({self.name})")
        log_prob, next_idx = torch.empty(len(word_id)), torch.empty(len(word_id), dtype=torch.int64)
        queries = context_idx.contiguous().numpy(), word_id.contiguous().numpy()
        if not jit_required(look_up_ngrams)(*queries, self._tables, log_prob.numpy(), next_idx.numpy()):
            self._check_states(context_idx)
        return log_prob, next_idx

    def expand(self, context_idx: Tensor, live: Tensor) -> None:
        """There is nothing to prepare.

        Raises:
            AsrError: there is no such state; a loop has no answer only then.
        """
        if len(context_idx) and self._tables is not None:
            self._check_states(context_idx)

    def _check_states(self, context_idx: Tensor) -> None:
        low, high = torch.aminmax(context_idx)
        check_contexts(int(low), int(high), self.num_states, f"a language model ({self.name})")

    def reserve(self, num_queries: int) -> tuple[Tensor, ...] | None:
        return None if self._kernel is None else ()

    def lookup_tables(self) -> NgramTables | None:
        return self._tables

    def score_sentence(self, words: Sequence[str]) -> Tensor:
        """log P of each word of a sentence and of its end, (len(words) + 1,): for tests and perplexities."""
        context_idx = self.start(1)
        log_prob = []
        for word_id in self._vocabulary.ids_of([*words, "</s>"]).to(self.device):
            score, context_idx = self.score(context_idx, word_id[None])
            log_prob.append(score)
        return torch.cat(log_prob)
