"""Which arc answers a query to an n-gram model, backoffs followed: what look-up needs of the model, and no more.

Shapes: S states, A arcs, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asr.lm.ngram_arrays import NgramArrays
from asr.lm.ngram_index import MULTIPLIERS, ArcIndex
from asr.lm.ngram_kernel import compiled_loops

_NARROW_OFFSET = 1 << 15
_NO_INDEX = ArcIndex(torch.zeros(0, dtype=torch.int64), 1, 1, 32)


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
        compiled: on a CPU, whether to run numba's loops where it is installed, instead of tensor operations.
    """

    def __init__(self, arrays: NgramArrays, compiled: bool = True) -> None:
        self._arc_begin = arrays.arc_begin
        self._label = arrays.label
        self._label_offset = _NARROW_OFFSET if arrays.label.dtype == torch.int16 else 0
        self._backoff_state = arrays.backoff_state
        self._backoff_score = arrays.backoff_score
        self._word_map = arrays.word_map
        self._index = arrays.index
        word = torch.arange(len(arrays.word_map), device=arrays.word_map.device)
        self._maps_words = bool(torch.any(torch.ne(arrays.word_map, word)))
        num_arcs = arrays.arc_begin[2:] - arrays.arc_begin[1:-1]
        self._num_halvings = int(num_arcs.max()).bit_length() if len(num_arcs) else 0

        loops = compiled_loops() if compiled and arrays.label.device.type == "cpu" else None
        self._loop = loops[0] if loops else None

    def find(self, state: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Follows backoffs until the word is listed: arc_idx (Q,) int64 and the backoff weights passed (Q,)."""
        if self._maps_words:
            word_id = self._word_map.index_select(0, word_id)
        if self._loop is not None:
            return self._find_in_loop(self._loop, state, word_id)
        arc_idx, passed = self._follow(state, word_id)
        backoff = torch.zeros(len(state), dtype=torch.float32, device=state.device)
        for query, passed_state in passed:
            backoff.index_add_(0, query, self._backoff_score.index_select(0, passed_state))
        return arc_idx, backoff

    def follow(self, state: Tensor, word_id: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The same without backoff weights: arc_idx (Q,), and step by step which queries backed off from which states.

        A step is (query (P,), state (P,)); no query occurs twice in one.
        """
        return self._follow(state, self._word_map.index_select(0, word_id) if self._maps_words else word_id)

    def _follow(self, state: Tensor, word_id: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
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

    def _find_in_loop(self, loop: Callable[..., None], state: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        arc_idx = torch.empty(len(state), dtype=torch.int64)
        backoff = torch.empty(len(state), dtype=torch.float32)
        index = self._index if self._index is not None else _NO_INDEX
        loop(
            state.contiguous().numpy(),
            word_id.contiguous().numpy(),
            index.slot.numpy(),
            index.num_homes,
            index.word_bits,
            index.key_bits,
            *MULTIPLIERS,
            self._arc_begin.numpy(),
            self._label.numpy(),
            self._backoff_state.numpy(),
            self._backoff_score.numpy(),
            arc_idx.numpy(),
            backoff.numpy(),
        )
        return arc_idx, backoff

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
