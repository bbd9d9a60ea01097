"""Scores of the output layer, with a cache of the parts that do not depend on both history and word.

These are the normalizer of a history, the normalizer of a history and class, and sums along the paths of a tree (Huang
et al. 2014 call the first two caches 3 and 4).

Shapes: Q queries, H hidden, M history words, R hidden rows, K tree nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.kernels.hash_table import BYTES_PER_SLOT, MAX_LOAD, HashTable, first_of_each
from asr.lm.cached.approximations import CacheOptions
from asr.lm.interface import StatefulNetwork

_BYTES_OF_GROUPS = 256
_HELD_NODES = 32
"""K: closer to the leaves, paths hardly ever share nodes."""


class OutputCache:
    """Scores (hidden, history, word) with a network's output layer.

    Attributes:
        num_history_normalizers, num_group_normalizers, num_tree_decisions: how many were computed.
    """

    def __init__(
        self,
        network: StatefulNetwork,
        options: CacheOptions,
        device: torch.device,
    ) -> None:
        self.network = network
        terms = network.cacheable_terms
        self._terms = terms
        self.cache_history = options.cache_history_normalizers and terms in ("history", "group")
        self.cache_group = options.cache_group_normalizers and terms == "group"
        self.cache_paths = options.cache_tree_paths and terms == "tree"
        self.device = device
        self.num_history_normalizers = 0
        self.num_group_normalizers = 0
        self.num_tree_decisions = 0
        self._max_groups: int | None = None
        self.clear()

    def clear(self) -> None:
        self._history_normalizer = torch.empty(0, dtype=torch.float32, device=self.device)
        self._group_normalizer = HashTable(1, self.device)
        self._held_paths = torch.empty(
            0, _HELD_NODES if self.cache_paths else 0, dtype=torch.float32, device=self.device
        )

    def limit_groups(self, num_histories: int) -> None:
        """Bounds the normalizers of groups to `bytes_of_groups` for each of `num_histories` histories."""
        most_slots = num_histories * self.bytes_of_groups // BYTES_PER_SLOT
        # A table has a power of two of slots and is filled to MAX_LOAD.
        self._max_groups = int(MAX_LOAD * (1 << most_slots.bit_length() - 1)) if most_slots else 0
        if self._group_normalizer.num_slots > most_slots:
            self._group_normalizer = HashTable(1, self.device)

    @property
    def bytes_of_history(self) -> int:
        """Memory for each history, whether anything is cached for it or not."""
        return 4 * (self.cache_history + self._held_paths.shape[1])

    @property
    def bytes_of_groups(self) -> int:
        """Memory for a history's groups if memory is limited; its successors are in few groups."""
        return _BYTES_OF_GROUPS if self.cache_group else 0

    @property
    def num_bytes(self) -> int:
        return 4 * (self._history_normalizer.numel() + self._held_paths.numel()) + self._group_normalizer.num_bytes

    def score(self, row: Tensor, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """row (Q,), hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,).

        `row` is any number that identifies hidden and history; it is the key of the cache.
        """
        network = self.network
        if self._terms == "none":
            return network.log_prob(hidden, history, word_id)
        if self._terms == "tree":
            log_prob, num_computed = network.path_log_prob(hidden, history, word_id, row, self._held_paths)
            self.num_tree_decisions += num_computed
            return log_prob
        log_prob = network.word_score(hidden, history, word_id)
        log_prob -= self._of_history(row, hidden, history)
        if self._terms == "group":
            log_prob -= self._of_group(row, hidden, history, network.group_of(word_id))
        return log_prob

    def _of_history(self, row: Tensor, hidden: Tensor, history: Tensor) -> Tensor:
        if not self.cache_history:
            self.num_history_normalizers += row.numel()
            return self.network.history_normalizer(hidden, history)
        known = self._history_normalizer.index_select(0, row)
        missing = known.isnan().nonzero().squeeze(1)
        if missing.numel():
            one = missing.index_select(0, first_of_each(row.index_select(0, missing))[0])
            value = self.network.history_normalizer(hidden.index_select(0, one), history.index_select(0, one))
            self._history_normalizer[row.index_select(0, one)] = value.to(self._history_normalizer)
            self.num_history_normalizers += one.numel()
            known = self._history_normalizer.index_select(0, row)
        return known

    def reserve(self, num_histories: int) -> None:
        """Makes room for histories numbered below num_histories."""
        added = num_histories - self._history_normalizer.numel()
        if self.cache_history and added > 0:
            unknown = torch.full((added,), float("nan"), dtype=torch.float32, device=self.device)
            self._history_normalizer = torch.cat((self._history_normalizer, unknown))
        added = num_histories - len(self._held_paths)
        if self.cache_paths and added > 0:
            unknown = torch.full(
                (added, self._held_paths.shape[1]), float("nan"), dtype=torch.float32, device=self.device
            )
            self._held_paths = torch.cat((self._held_paths, unknown))

    def _of_group(self, row: Tensor, hidden: Tensor, history: Tensor, group: Tensor) -> Tensor:
        if not self.cache_group:
            self.num_group_normalizers += row.numel()
            return self.network.group_normalizer(hidden, history, group)
        key = torch.add(group, row, alpha=1 << 32)
        slot, missing = self._group_normalizer.find(key)
        known = self._group_normalizer.values.view(torch.float32)[0::2].index_select(0, slot.clamp(min=0))
        if missing is not None:
            position, which = first_of_each(key.index_select(0, missing))
            one = missing.index_select(0, position)
            value = self.network.group_normalizer(
                hidden.index_select(0, one), history.index_select(0, one), group.index_select(0, one)
            ).float()
            self.num_group_normalizers += one.numel()
            known[missing] = value.index_select(0, which)
            self._keep_groups(key.index_select(0, one), value)
        return known

    def _keep_groups(self, key: Tensor, value: Tensor) -> None:
        """Adds distinct absent keys (D,) with their normalizers (D,); if there is no room, all others are dropped."""
        if self._max_groups is not None and self._group_normalizer.count + key.numel() > self._max_groups:
            self._group_normalizer = HashTable(1, self.device)
            key, value = key[: self._max_groups], value[: self._max_groups]
        slot, one = self._group_normalizer.insert(key)
        self._group_normalizer.values.view(torch.float32)[0::2][slot[one]] = value[one]

    def forget(self, is_dropped: Tensor) -> None:
        """Drops what is cached for the rows marked in is_dropped (rows,), which are freed or overwritten."""
        for held in (self._history_normalizer, self._held_paths):
            held[is_dropped[: len(held)].nonzero().squeeze(1)] = float("nan")
        if self._group_normalizer.count:
            owner = (self._group_normalizer.keys.view(-1) >> 32).clamp_(min=0)
            self._group_normalizer.keep(~is_dropped[owner])
