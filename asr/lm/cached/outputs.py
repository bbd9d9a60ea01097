"""What is kept of the output layer's work: parts of its scores and, for compiled loops, its inputs.

The parts of scores are those that do not depend on both history and word: the normalizer of a history, the normalizer
of a history and class, and sums along the paths of a tree (Huang et al. 2014 call the first two caches 3 and 4).

A network may project states to the output layer's inputs. A projection is read mostly while its history is new: when
the bundle's network decodes 41 utterances, 97 % of the reads are of the last 1,024 rows. So hidden rows hold states
alone, and a projection that was overwritten is computed again.

Shapes: Q queries, S state, H hidden, M history words, R hidden rows, K tree nodes, P places.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from asr.kernels.hash_table import BYTES_PER_SLOT, MAX_LOAD, HashTable, first_of_each
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.states import NOT_PROJECTED, HiddenLayer, HiddenStore, QueryStatistics
from asr.lm.interface import StatefulNetwork

_BYTES_OF_GROUPS = 256
_HELD_NODES = 32
"""K: closer to the leaves, paths hardly ever share nodes."""

_FIRST_PLACES = 64
_PROJECTIONS_SHARE = 16  # of the bytes of all caches


class OutputCache:
    """Scores (hidden, history, word) with a network's output layer, and counts what it computes."""

    def __init__(self, network: StatefulNetwork, options: CacheOptions, counts: QueryStatistics) -> None:
        self.network = network
        self._counts = counts
        self._terms = terms = network.cacheable_terms
        self.cache_history = options.cache_history_normalizers and terms in ("history", "group")
        self.cache_group = options.cache_group_normalizers and terms == "group"
        self.cache_paths = options.cache_tree_paths and terms == "tree"
        self.device = network.initial_state().device
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
            self._counts.num_tree_decisions += num_computed
            return log_prob
        log_prob = network.word_score(hidden, history, word_id)
        log_prob -= self._of_history(row, hidden, history)
        if self._terms == "group":
            log_prob -= self._of_group(row, hidden, history, network.group_of(word_id))
        return log_prob

    def _of_history(self, row: Tensor, hidden: Tensor, history: Tensor) -> Tensor:
        if not self.cache_history:
            self._counts.num_history_normalizers += row.numel()
            return self.network.history_normalizer(hidden, history)
        known = self._history_normalizer.index_select(0, row)
        missing = known.isnan().nonzero().squeeze(1)
        if missing.numel():
            one = missing.index_select(0, first_of_each(row.index_select(0, missing))[0])
            value = self.network.history_normalizer(hidden.index_select(0, one), history.index_select(0, one))
            self._history_normalizer[row.index_select(0, one)] = value.to(self._history_normalizer)
            self._counts.num_history_normalizers += one.numel()
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
            self._counts.num_group_normalizers += row.numel()
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
            self._counts.num_group_normalizers += one.numel()
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


class ProjectionCache:
    """Projections of hidden rows, numbered as they are computed; the n-th is at place n modulo P.

    `HiddenStore.projected` has the number of each row's last projection. It is held until P more are computed.

    Args:
        store: the states.
        layer: computes projections.
        size: H.
        most_places: P grows up to this number with the number of rows, and beyond it for calls with more rows.
        capacity_bytes: the bound on the memory of all caches, if any; at most a sixteenth is for projections.

    Attributes:
        hidden: (P, H) float32.
        num_computed: (1,) int64, how many projections have been computed; a compiled loop counts its own, too.
    """

    def __init__(
        self, store: HiddenStore, layer: HiddenLayer, size: int, most_places: int, capacity_bytes: int | None = None
    ) -> None:
        self._store = store
        self._layer = layer
        self._size = size
        self._most_places = most_places
        self._max_places = sys.maxsize
        if capacity_bytes is not None:
            self._max_places = max(1, capacity_bytes // (_PROJECTIONS_SHARE * 4 * size))
        self.num_computed = torch.zeros(1, dtype=torch.int64)
        self.clear()

    def clear(self) -> None:
        """Holds no projections, in an array of the first size."""
        self._allocate(min(_FIRST_PLACES, self._most_places, self._max_places))

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return 4 * self.hidden.numel()

    @property
    def max_bytes(self) -> int:
        """The most bytes that the array takes if memory is limited."""
        return 4 * self._max_places * self._size

    def grow(self, num_rows: int, num_needed: int = 0) -> bool:
        """Makes P as large as is useful for this many rows in the store -> whether it is at least `num_needed`."""
        num_places = min(max(min(num_rows, self._most_places), num_needed), self._max_places)
        if num_places > len(self.hidden):
            self._reserve(num_places)
        return num_needed <= len(self.hidden)

    def hold(self, row: Tensor) -> bool:
        """Computes the projections of rows (R,) that are not held -> whether there was room to hold all."""
        row = torch.unique(row)
        if len(row) > len(self.hidden) and not self._reserve(len(row)):
            return False
        num = int(self.num_computed)
        age, num_before, num_missing = num - self._store.projected[row, 0], -1, 0
        while num_missing > num_before:
            # Those that the missing ones would overwrite are missing, too.
            num_before, is_missing = num_missing, age > len(self.hidden) - num_missing
            num_missing = int(is_missing.sum())
        row = row[is_missing]
        number = torch.arange(num, num + num_missing)
        self.hidden[number % len(self.hidden)] = self._layer.project(self._store.read(row))
        self._store.projected[row, 0] = number
        self.num_computed += num_missing
        return True

    def _reserve(self, num_places: int) -> bool:
        """Makes P at least this number if there is room -> whether there was; what is held is still held."""
        before, projected = self.hidden, self._store.projected
        self._allocate(min(max(num_places, len(before) + len(before) // 4), self._max_places))
        num = int(self.num_computed)
        number = torch.arange(max(0, num - len(before)), num)
        self.hidden[number % len(self.hidden)] = before[number % len(before)]
        projected[num - projected > len(before)] = NOT_PROJECTED
        return num_places <= len(self.hidden)

    def _allocate(self, num_places: int) -> None:
        self.hidden = torch.empty(num_places, self._size, dtype=torch.float32)
