"""The flat arrays of an n-gram model: states, their arcs, their backoffs.

Shapes: S states, A arcs, V words, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.lm.ngram.index import MULTIPLIERS, ArcIndex
from asr.lm.ngram.trie import ROOT, NgramTrie
from asr.text.vocabulary import BOS_ID, EPSILON_ID, UNK_ID

ROOT_STATE = 0
NUM_LEVELS = 256
_NO_INDEX = ArcIndex(torch.zeros(0, dtype=torch.int64), 1, 1, 32)


@dataclass(frozen=True)
class NgramArrays:
    """The model as an acceptor: a state is a word history, an arc a listed n-gram. State 0 has no history.

    A state's arcs stand together, sorted by label; state 0 has one arc for each word of the vocabulary, arc w
    for word w. A history is a state only where something depends on it (an n-gram goes on from it or it has a
    backoff weight of its own), so equal futures are one state.

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
        """The size of each array, and of the index."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self.tensors().items()}
        return sizes | {"index": 8 * len(self.index.slot) if self.index is not None else 0}

    def arc_score(self, arc_idx: Tensor) -> Tensor:
        """log P(label | state) of arcs, (Q,) float32."""
        score = self.score.index_select(0, arc_idx)
        if len(self.score_level):
            return self.score_level.index_select(0, score.to(torch.int64))
        return score

    def for_loop(self) -> tuple[Any, ...]:
        """What `asr.lm.ngram.kernel.score_words` reads of the model, as numpy arrays and numbers."""
        index = self.index if self.index is not None else _NO_INDEX
        found = (index.slot.numpy(), index.num_homes, index.word_bits, index.key_bits, *MULTIPLIERS)
        names = ("arc_begin", "label", "backoff_state", "backoff_score", "score", "score_level", "dst_state")
        return (*found, *(getattr(self, name).numpy() for name in names))

    def with_index(self, load: float = 0.6) -> NgramArrays:
        """The same arrays with a hash index; `load` is the share of its slots in use."""
        begin = self.arc_begin.numpy()
        num_root_arcs = int(begin[1])
        state = np.repeat(np.arange(1, len(begin) - 1, dtype=np.int32), np.diff(begin[1:]))
        label = self.label[num_root_arcs:].numpy()
        return replace(self, index=ArcIndex.build(state, label, num_root_arcs, len(self.word_map), load))

    def without_index(self) -> NgramArrays:
        """The same arrays, arcs found by binary search."""
        return replace(self, index=None)

    def quantized(self) -> NgramArrays:
        """The same model with 1-byte scores: 256 levels, each the mean of as many scores as the others.

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
            score_level=torch.zeros(0),
        )
