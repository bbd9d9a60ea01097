"""Hands out row numbers of growing arrays, freed ones first."""

from __future__ import annotations

import torch
from torch import Tensor


class RowAllocator:
    """Row numbers 0 .. capacity - 1; the owner of the arrays extends them whenever `capacity` has grown.

    Args:
        limit: a capacity that is passed only where more rows than that are in use.
    """

    def __init__(self, capacity: int, device: torch.device, limit: int | None = None) -> None:
        self.capacity = capacity
        self.device = device
        self.limit = limit
        self._num_started = 0
        self._freed = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def num_used(self) -> int:
        return self._num_started - self._freed.numel()

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_used

    def is_used(self) -> Tensor:
        """A mask of the rows in use, (capacity,)."""
        is_used = torch.zeros(self.capacity, dtype=torch.bool, device=self.device)
        is_used[: self._num_started] = True
        is_used[self._freed] = False
        return is_used

    def capacity_for(self, num_new: int) -> int:
        """The capacity to grow to for so many more rows: at least double, within the limit where that is enough."""
        needed = self.num_used + num_new
        if needed <= self.capacity:
            return self.capacity
        doubled = max(2 * self.capacity, needed)
        return doubled if self.limit is None else max(needed, min(doubled, self.limit))

    def take(self, num: int) -> Tensor:
        """The numbers of so many free rows, (num,); the caller has seen to it that there are as many."""
        if num > self.num_free:
            raise IndexError(f"{num} rows asked for, {self.num_free} of {self.capacity} free")
        reused, self._freed = self._freed[:num], self._freed[num:]
        first = self._num_started
        self._num_started += num - reused.numel()
        fresh = torch.arange(first, self._num_started, device=self.device)
        return torch.cat((reused, fresh)) if reused.numel() else fresh

    def give_back(self, rows: Tensor) -> None:
        """rows (R,), each in use and given once. The lowest are taken again first."""
        self._freed = torch.cat((self._freed, rows)).sort().values

    def trim(self, capacity: int) -> None:
        """Lowers the capacity; no row from there on may be in use."""
        self._freed = self._freed[self._freed < capacity]
        self._num_started = min(self._num_started, capacity)
        self.capacity = capacity
