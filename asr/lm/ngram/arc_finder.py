"""Which arc answers a query to an n-gram model, backoffs followed: what look-up needs of the model, and no more.

Shapes: S states, A arcs, Q queries.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from asr.lm.ngram.arrays import NgramArrays

_NARROW_OFFSET = 1 << 15


def is_narrow(num_words: int) -> bool:
    """Whether labels of so many words fit 16 bits."""
    return num_words <= 2 * _NARROW_OFFSET


def narrow(label: Tensor) -> Tensor:
    """Labels (A,) in 16 bits, less 2^15 so that they sort the same."""
    return torch.sub(label, _NARROW_OFFSET).to(torch.int16)


class ArcFinder:
    """Finds arcs by hashing where the arrays have an index, else by binary search.

    Args:
        arrays: the model; scores and destinations of arcs are not looked at, and backoff weights only by `find`. Labels
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
        """How many steps the longest binary search takes; only asked where arcs are not hashed."""
        num_arcs = self._arc_begin[2:] - self._arc_begin[1:-1]
        return int(num_arcs.max()).bit_length() if len(num_arcs) else 0

    def mapped(self, word_id: Tensor) -> Tensor:
        """The words as the model's labels have them, (Q,): those that it does not list are `<unk>`."""
        return self._word_map.index_select(0, word_id) if self._maps_words else word_id

    def find(self, state: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Follows backoffs until the word is listed: arc_idx (Q,) int64 and the backoff weights passed (Q,)."""
        arc_idx, passed = self.follow(state, word_id)
        backoff = torch.zeros(len(state), dtype=torch.float32, device=state.device)
        for query, passed_state in passed:
            backoff.index_add_(0, query, self._backoff_score.index_select(0, passed_state))
        return arc_idx, backoff

    def follow(self, state: Tensor, word_id: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The same without backoff weights: arc_idx (Q,), and step by step which queries backed off from which states.

        A step is (query (P,), state (P,)); no query occurs twice in one.
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
