"""The output layer's inputs of the rows that were queried last, for compiled loops.

A projection is read mostly while its history is new: when the bundle's network decodes 41 utterances, 97 % of the reads
are of the last 1,024 rows. So hidden rows hold states alone, and a projection that was overwritten is computed again.

Shapes: R rows, S state, H hidden, P places.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from asr.lm.cached.states import NOT_PROJECTED, HiddenLayer, HiddenStore

_FIRST_PLACES = 64
_SHARE = 16  # of the bytes of all caches


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
            self._max_places = max(1, capacity_bytes // (_SHARE * 4 * size))
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
