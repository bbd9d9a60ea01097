"""Options of a cached language model: the caches that it keeps, the memory they take, and approximations of scores.

Recombination follows Huang et al. (2014), "Cache based recurrent neural network language model inference for first pass
speech recognition"; quantized histories follow Lee et al. (2018), "Accelerating recurrent neural network language model
based online speech recognition system". docs/references.md has the full citations.

Shapes: R rows or new edges, S state width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.hash_table import HashTable, first_of_each, segment_max
from asr.lm.cached.trie import HistoryTrie
from asr.options import check_options, option

CHOICES = {
    "first": "the one that came first",
    "best": "the one whose last word is most probable",
}
"""`recombination` -> whose hidden state a shared context has."""

_LARGEST = 2**63 - 1  # keys of tables are not negative
_MAX_RECOMBINATION_LENGTH = 1000

_SCALE = {"round-2": 100.0, "round-1": 10.0}

PRECISIONS = {
    "round-2": "two decimals",
    "round-1": "one decimal",
    "sign": "the sign alone",
}
"""`history_precision` -> what is kept of each number of a state."""

HIDDEN_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}

_LOOP_DTYPES = ("float32", "int8")
_NORMALIZERS = ("cache_history_normalizers", "cache_group_normalizers", "cache_tree_paths")


@dataclass(frozen=True)
class CacheOptions:
    """By default, scores equal those of the network run word by word. Only the options marked as approximations change
    scores.

    Attributes:
        hidden_dtype: type in which hidden rows are stored: float32; or as an approximation float16, bfloat16 or int8.
        cache_scores: keep the score of each (history, word).
        cache_hidden: keep hidden rows. Without it the hidden layer runs again for every query, from the previous row.
        cache_history_normalizers, cache_group_normalizers: keep the output layer's normalizer of each history, and of
            each (history, class).
        cache_tree_paths: the same for the inner nodes of an output layer that is a tree.
        recombination_length: approximation: histories that end in the same k words share a context. None keeps all
            histories apart.
        recombination: whose hidden state a shared context has: the "first" history's or the "best" one's.
        recombination_window: the minimum number of calls for which the best history is kept.
        history_precision: approximation: "round-2", "round-1" or "sign". Two histories share a hidden row if their
            quantized previous states and their last words are equal. None shares no rows.
        hidden_products: numbers that the hidden layer multiplies: float32; or as an approximation int8, on a CPU that
            has the instruction (`asr.kernels.linear`).
        capacity_bytes: memory for histories, hidden rows and normalizers. Contexts are forgotten only if `retain` did
            not name them; hidden rows are computed again when needed, which costs time. That changes scores only in
            their last digits, or by a rounding step of `hidden_dtype`, since a matrix product may depend on how many
            rows it has. But with `recombination_length` or `history_precision`, another history may come first after
            one was forgotten. See `asr.lm.cached.eviction` for when the bound cannot be kept. None is unlimited.
        batching: "frame" runs the hidden layer once for each call, "query" once for each row (for comparison).
        compiled: whether to use numba's loops on a CPU, where numba is installed.
        loop_room: the minimum number of new edges for which there is room when a loop begins.
        held_projections: how many projections of states a loop keeps; others are computed again (`ProjectionCache`).
    """

    hidden_dtype: str = option(
        "float32", "approximation: how hidden states are stored", choices=(*HIDDEN_DTYPES,), needs="recurrent model"
    )
    cache_scores: bool = True
    cache_hidden: bool = True
    cache_history_normalizers: bool = True
    cache_group_normalizers: bool = True
    cache_tree_paths: bool = True
    recombination_length: int | None = option(
        None, "approximation: histories that end in the same K words are one", kind=int, needs="recurrent model"
    )
    recombination: str = option(
        "first", "whose hidden state such a history has", choices=CHOICES, needs="recombination length"
    )
    recombination_window: int = option(
        50, "for how many calls of the model the best history stays at least", needs="recombination best"
    )
    history_precision: str | None = option(
        None,
        "approximation: histories with the same rounded state and last word share a hidden state",
        kind=str,
        choices=PRECISIONS,
        needs="recurrent model",
    )
    hidden_products: str = option(
        "float32",
        "approximation: numbers that the hidden layer multiplies, where the processor can",
        choices=("float32", "int8"),
        needs="recurrent model",
    )
    capacity_bytes: int | None = None
    batching: str = "frame"
    compiled: bool = True
    loop_room: int = 1024
    held_projections: int = 256

    def __post_init__(self) -> None:
        check_options(self, "cached language model")
        if self.recombination_length is not None and not 1 <= self.recombination_length <= _MAX_RECOMBINATION_LENGTH:
            raise AsrError(
                f"recombination_length is {self.recombination_length}; it must be between 1 and "
                f"{_MAX_RECOMBINATION_LENGTH:,}."
            )
        for name in ("cache_scores", "cache_hidden", *_NORMALIZERS, "compiled"):
            if not isinstance(getattr(self, name), bool):
                raise AsrError(f"cached language model: {name} is {getattr(self, name)!r}; it must be true or false.")
        for name in ("capacity_bytes", "loop_room", "held_projections"):
            value = getattr(self, name)
            is_count = isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
            if not is_count and (name != "capacity_bytes" or value is not None):
                raise AsrError(f"cached language model: {name} is {value!r}; it must be a whole number above 0.")
        if self.recombination_window < 0:
            raise AsrError(f"recombination_window is {self.recombination_window}; it must be 0 or more.")
        if self.history_precision and self.recombination_length and self.recombination == "best":
            raise AsrError(
                "history_precision: shared hidden rows and recombination best cannot be combined; use first."
            )

    def exact(self) -> CacheOptions:
        """The options without those that round states."""
        return replace(self, hidden_dtype="float32", history_precision=None)

    def require_exact(self) -> None:
        """Checks that no option rounds states.

        Raises:
            AsrError: one does.
        """
        if self != self.exact():
            raise AsrError(
                "hidden_dtype and history_precision round states, and those of this network have numbers of words or "
                "tokens in them; leave both out."
            )

    @property
    def allows_loops(self) -> bool:
        """Whether compiled loops can be used: they need cached scores, and for each context a row of its own that is
        never replaced."""
        keeps_rows = self.recombination_length is None or self.recombination == "first"
        has_own_rows = self.cache_hidden and self.history_precision is None
        return self.compiled and self.cache_scores and has_own_rows and keeps_rows and self.hidden_dtype in _LOOP_DTYPES


def _as_key(mixed: Any) -> Any:
    """The key of a `HashTable`, which is not negative, from a sum of products, which wraps around; for `jit`, too."""
    return (mixed ^ (mixed >> 31)) & _LARGEST


def _odd_factors(num: int, seed: int, device: torch.device) -> Tensor:
    """The factors of such a sum, (num,); odd ones lose no bits."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-(2**62), 2**62, (num,), generator=generator) * 2 + 1).to(device)


def key_of_ending(context: int, word: int, parent: Any, last_word: Any, factors: Any) -> int:
    """The key of a history's last k words in the table of `Recombination`; the history is that of a context and a word.

    Args:
        context, word: the context and the word after it.
        parent, last_word: (nodes,) of the trie.
        factors: (k,) int64, odd.
    """
    mixed, node = word * factors[0], np.int64(context)
    for age in range(1, len(factors)):
        last = np.int64(last_word[node])
        mixed += (last if last else -node) * factors[age]  # as in `HistoryTrie.ending`
        node = np.int64(parent[node])
    return _as_key(mixed)


class Recombination:
    """Gives new edges the node that represents their last k words.

    Word sequences are compared by a 63-bit hash, so one in 2**63 pairs of different sequences is taken for equal. They
    do not reach back beyond `<s>`, so up to there, sentences with different carried states share nothing.

    Args:
        length: k.
        choice: the history whose hidden state a node gets: the "first" one, or the "best" one (with the highest
            log P(last word)) of those seen within `window` calls; the best replaces a row already computed.

    Attributes:
        table: the node of each sequence of k words, by a hash of the words.
        factors: of the hash (k,), see `key_of_ending`.
    """

    def __init__(self, length: int, choice: str, window: int, device: torch.device) -> None:
        self.length = length
        self.choice = choice
        self.window = window
        self.device = device
        self.factors = _odd_factors(length, 1, device)
        self.clear()

    def clear(self) -> None:
        self.table = HashTable(16, self.device)
        self._best_score = torch.empty(0, dtype=torch.float32, device=self.device)
        self._best_call = torch.empty(0, dtype=torch.int32, device=self.device)

    @property
    def num_bytes(self) -> int:
        return self.table.num_bytes + 8 * self._best_score.numel()

    def nodes(self, trie: HistoryTrie, context_idx: Tensor, word_id: Tensor) -> Tensor:
        """The node of each edge (R,): an existing one, or a new one with the first context that led to it as parent."""
        words = torch.cat((word_id.unsqueeze(1), trie.ending(context_idx, self.length - 1)), dim=1)
        key = _as_key((words * self.factors).sum(1))  # as `key_of_ending`
        slot, missing = self.table.find(key)
        if missing is not None:
            new, first = self.table.insert(key.index_select(0, missing))
            one = missing.index_select(0, first)
            self.table.values[new[first]] = trie.new_nodes(
                context_idx.index_select(0, one), word_id.index_select(0, one)
            )
            slot, _ = self.table.find(key)
        return self.table.values.index_select(0, slot)

    def better(self, node: Tensor, score: Tensor, call: int, num_nodes: int) -> Tensor:
        """Positions (B,) of the edges, one per node, that by score (R,) now represent their node (R,) < num_nodes."""
        missing = num_nodes - self._best_score.numel()
        if missing > 0:
            self._best_score = torch.cat(
                (self._best_score, torch.full((missing,), -torch.inf, dtype=torch.float32, device=self.device))
            )
            self._best_call = torch.cat((self._best_call, self._best_call.new_zeros(missing)))
        distinct, which = torch.unique(node, return_inverse=True)
        best = segment_max(score, which, distinct.numel())
        is_stale = self._best_call.index_select(0, distinct) < call - self.window
        is_better = (best > self._best_score.index_select(0, distinct)) | is_stale
        stands = (is_better.index_select(0, which) & (score == best.index_select(0, which))).nonzero().squeeze(1)
        position = stands.index_select(0, first_of_each(which.index_select(0, stands))[0])
        self._best_score[node.index_select(0, position)] = score.index_select(0, position)
        self._best_call[node.index_select(0, position)] = call
        return position

    def forget(self, is_evicted: Tensor) -> None:
        """Drops the nodes marked in is_evicted (nodes,)."""
        self.table.keep(~is_evicted[self.table.values.clamp(max=is_evicted.numel() - 1)])
        known = is_evicted[: self._best_score.numel()].nonzero().squeeze(1)
        self._best_score[known] = -torch.inf


class QuantizedHistory:
    """Finds the hidden row that was already computed for a similar history and the same word.

    Quantized states are compared by a 63-bit hash, so one in 2**63 pairs of different states is taken for equal.

    Args:
        precision: "round-2" or "round-1" (decimals kept), or "sign".
        num_columns: number of the state's first columns, which the next step reads.
    """

    def __init__(self, precision: str, num_columns: int, device: torch.device) -> None:
        self.precision = precision
        self.device = device
        self._factor = _odd_factors(num_columns + 1, 0, device)
        self.clear()

    def clear(self) -> None:
        self._table = HashTable(4, self.device)

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes

    def key(self, state: Tensor, word_id: Tensor) -> Tensor:
        """Previous state (R, S) and word (R,) -> key (R,), the same for all that count as equal."""
        state = state[:, : self._factor.numel() - 1]
        if self.precision == "sign":
            level = (state > 0).long()
        else:
            level = torch.round(state * _SCALE[self.precision]).long()
        return _as_key((level * self._factor[:-1]).sum(1) + word_id * self._factor[-1])

    def find(self, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """key (R,) -> row (R,), and the positions without one (None if all have one)."""
        slot, missing = self._table.find(key)
        return self._table.values.index_select(0, slot.clamp(min=0)), missing

    def store(self, key: Tensor, row: Tensor) -> None:
        """Adds distinct absent keys (D,) with their rows (D,)."""
        slot, _ = self._table.insert(key)
        self._table.values[slot] = row

    def forget(self, is_freed: Tensor) -> None:
        """Drops the keys of rows marked in is_freed (rows,)."""
        self._table.keep(~is_freed[self._table.values.clamp(max=is_freed.numel() - 1)])
