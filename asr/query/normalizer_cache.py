"""Output scores with the normalisers of a history, and of a (history, class), kept (caches 3 and 4 of four-caches).

Shapes: Q queries, H hidden, M history words, R hidden rows.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from asr.lm.contract import StatefulNetwork
from asr.query.distinct import one_of_each
from asr.query.hash_table import HashTable

_BYTES_OF_GROUPS = 256


@runtime_checkable
class HistoryNormalized(Protocol):
    """An output layer whose log_prob is word_score - history_normalizer (- group_normalizer, if GroupNormalized)."""

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor: ...

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor: ...


@runtime_checkable
class GroupNormalized(Protocol):
    """An output layer that normalises within the group (class, inner tree node) of a word as well."""

    def group_of(self, word_id: Tensor) -> Tensor: ...

    def group_normalizer(self, hidden: Tensor, history: Tensor, group: Tensor) -> Tensor: ...


class NormalizerCache:
    """Scores (hidden, history, word) with a network's output layer.

    Attributes:
        num_history_normalizers, num_group_normalizers: how many have been computed.
    """

    def __init__(self, network: StatefulNetwork, cache_history: bool, cache_group: bool, device: torch.device) -> None:
        self.network = network
        self.cache_history = cache_history and isinstance(network, HistoryNormalized)
        self.cache_group = cache_group and isinstance(network, GroupNormalized)
        self.device = device
        self.num_history_normalizers = 0
        self.num_group_normalizers = 0
        self.clear()

    def clear(self) -> None:
        self._history_normalizer = torch.empty(0, device=self.device)
        self._group_normalizer = HashTable(1, self.device)

    @property
    def bytes_per_row(self) -> int:
        """About what is kept of a history; a history's successors fall into few groups."""
        return (4 if self.cache_history else 0) + (_BYTES_OF_GROUPS if self.cache_group else 0)

    @property
    def num_bytes(self) -> int:
        return 4 * self._history_normalizer.numel() + self._group_normalizer.num_bytes

    def score(self, row: Tensor, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """row (Q,), hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,).

        `row` is any number that stands for hidden and history: what is kept is kept under it.
        """
        network = self.network
        if not isinstance(network, HistoryNormalized):
            return network.log_prob(hidden, history, word_id)
        log_prob = network.word_score(hidden, history, word_id) - self._of_history(row, hidden, history)
        if isinstance(network, GroupNormalized):
            log_prob -= self._of_group(row, hidden, history, network.group_of(word_id))
        return log_prob

    def _of_history(self, row: Tensor, hidden: Tensor, history: Tensor) -> Tensor:
        assert isinstance(self.network, HistoryNormalized)
        if not self.cache_history:
            self.num_history_normalizers += row.numel()
            return self.network.history_normalizer(hidden, history)
        self._reserve_rows(row)
        known = self._history_normalizer.index_select(0, row)
        missing = known.isnan().nonzero().squeeze(1)
        if missing.numel():
            one = missing.index_select(0, one_of_each(row.index_select(0, missing))[0])
            value = self.network.history_normalizer(hidden.index_select(0, one), history.index_select(0, one))
            self._history_normalizer[row.index_select(0, one)] = value.to(self._history_normalizer)
            self.num_history_normalizers += one.numel()
            known = self._history_normalizer.index_select(0, row)
        return known

    def _reserve_rows(self, row: Tensor) -> None:
        num = int(row.max()) + 1
        if num > self._history_normalizer.numel():
            added = max(num, 2 * self._history_normalizer.numel()) - self._history_normalizer.numel()
            self._history_normalizer = torch.cat(
                (self._history_normalizer, torch.full((added,), float("nan"), device=self.device))
            )

    def _of_group(self, row: Tensor, hidden: Tensor, history: Tensor, group: Tensor) -> Tensor:
        assert isinstance(self.network, GroupNormalized)
        if not self.cache_group:
            self.num_group_normalizers += row.numel()
            return self.network.group_normalizer(hidden, history, group)
        key = torch.add(group, row, alpha=1 << 32)
        slot, missing = self._group_normalizer.find(key)
        if missing is not None:
            new, first = self._group_normalizer.insert(key.index_select(0, missing))
            one = missing.index_select(0, first)
            value = self.network.group_normalizer(
                hidden.index_select(0, one), history.index_select(0, one), group.index_select(0, one)
            )
            self._group_normalizer.values.view(torch.float32)[0::2][new[first]] = value.float()
            self.num_group_normalizers += one.numel()
            slot, _ = self._group_normalizer.find(key)
        return self._group_normalizer.values.view(torch.float32)[0::2].index_select(0, slot)

    def forget(self, is_dropped: Tensor) -> None:
        """Drops what is kept of the rows marked in is_dropped (rows,): they are given back or overwritten."""
        num_known = self._history_normalizer.numel()
        self._history_normalizer[is_dropped[:num_known].nonzero().squeeze(1)] = float("nan")
        if self._group_normalizer.count:
            owner = (self._group_normalizer.keys.view(-1) >> 32).clamp_(min=0)
            self._group_normalizer.keep(~is_dropped[owner])
