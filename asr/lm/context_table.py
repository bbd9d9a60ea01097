"""Gives int64 keys small dense numbers, in batches.

Shapes: Q queries, K keys held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.hashing.hash_table import HashTable

_FIRST_BUCKETS = 1 << 9


class ContextTable:
    """Numbers keys 0, 1, 2, ... as they first come; equal keys get equal numbers.

    Args:
        device: where the table lives and is asked.
        num_buckets: its first size, a power of two; it grows by doubling.
    """

    def __init__(self, device: torch.device | str = "cpu", num_buckets: int = _FIRST_BUCKETS) -> None:
        self._table = HashTable(num_buckets, torch.device(device))
        self._key_of = torch.zeros(num_buckets, dtype=torch.int64, device=device)
        # Numbers that there is room for, ascending.
        self._free = torch.arange(num_buckets, device=device)

    def __len__(self) -> int:
        return self._table.count

    def key_of(self, idx: Tensor) -> Tensor:
        """The keys of numbers given before, (Q,)."""
        return self._key_of.index_select(0, idx)

    def index_of(self, key: Tensor) -> Tensor:
        """Numbers of keys, which are not negative, (Q,) int64; new keys are taken in, sorted among themselves."""
        slot, missing = self._table.find(key)
        if missing is not None:
            slot = self._insert(key, slot, missing)
        return self._table.values.index_select(0, slot)

    def keep(self, idx: Tensor) -> None:
        """Forgets all keys but those of numbers (K,); the others' numbers are given again."""
        is_kept = torch.zeros(len(self._key_of), dtype=torch.bool, device=self._key_of.device)
        is_kept[idx] = True
        self._table.keep(is_kept.index_select(0, self._table.values))
        self._free = (~is_kept).nonzero().squeeze(1)

    def _insert(self, key: Tensor, slot: Tensor, missing: Tensor) -> Tensor:
        """Takes in the keys at the positions `missing`; slot (Q,) of the others -> slot (Q,) of all."""
        table, num_rebuilds = self._table, self._table.num_rebuilds
        new_slot, one = table.insert(key.index_select(0, missing))
        new_key, order = key.index_select(0, missing.index_select(0, one)).sort()
        while len(new_key) > len(self._free):
            num = len(self._key_of)
            self._key_of = torch.cat([self._key_of, torch.zeros_like(self._key_of)])
            self._free = torch.cat([self._free, torch.arange(num, 2 * num, device=key.device)])
        number, self._free = self._free[: len(new_key)], self._free[len(new_key) :]
        table.values.index_copy_(0, new_slot.index_select(0, one.index_select(0, order)), number)
        self._key_of.index_copy_(0, number, new_key)
        if table.num_rebuilds != num_rebuilds:
            return table.find(key)[0]
        return slot.index_copy_(0, missing, new_slot)
