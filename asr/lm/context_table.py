"""Gives int64 keys small dense numbers: an open-addressing hash table in tensors, filled and asked in batches.

Shapes: Q queries, B slots, K keys held.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EMPTY = -1
_MULTIPLIER = -7046029254386353131  # 2**64 / golden ratio, odd
_LARGEST = (1 << 63) - 1


class ContextTable:
    """Numbers keys 0, 1, 2, ... as they first come; equal keys get equal numbers.

    Args:
        device: where the table lives and is asked.
        num_slots: first size, a power of two; the table doubles whenever it is half full.
    """

    def __init__(self, device: torch.device | str = "cpu", num_slots: int = 1 << 12) -> None:
        self._slot_key = torch.full((num_slots,), _EMPTY, dtype=torch.int64, device=device)
        self._slot_idx = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._key_of = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    def key_of(self, idx: Tensor) -> Tensor:
        """The keys of numbers given before, (Q,)."""
        return torch.index_select(self._key_of, 0, idx)

    def index_of(self, key: Tensor) -> Tensor:
        """Numbers of keys, which are not negative, (Q,) int64; new keys are taken in, sorted among themselves."""
        if len(key) == 0:
            return torch.zeros_like(key)
        while 2 * (self._num_keys + len(key)) > len(self._slot_key):
            self._double()
        slot, is_new = self._place(key)
        new_key = torch.unique(key[is_new])
        if len(new_key):
            new_slot, _ = self._place(new_key)
            new_idx = torch.arange(self._num_keys, self._num_keys + len(new_key), device=key.device)
            self._slot_idx[new_slot] = new_idx
            self._key_of[new_idx] = new_key
            self._num_keys += len(new_key)
        return torch.index_select(self._slot_idx, 0, slot)

    def _home(self, key: Tensor) -> Tensor:
        """The slot where the search for each key begins, (Q,): by the product's high bits, which all bits decide."""
        mixed = torch.bitwise_and(torch.mul(key, _MULTIPLIER), _LARGEST)
        return torch.bitwise_right_shift(mixed, 63 - (len(self._slot_key) - 1).bit_length())

    def _place(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The slot of every key, taken where it was free, and whether it was: (Q,), (Q,) bool."""
        mask = len(self._slot_key) - 1
        slot = self._home(key)
        is_new = torch.zeros(len(key), dtype=torch.bool, device=key.device)
        pending = torch.arange(len(key), device=key.device)
        while len(pending):
            at, wanted = slot[pending], key[pending]
            free = self._slot_key[at].eq(_EMPTY)
            self._slot_key[at[free]] = wanted[free]  # of different keys for one slot any one wins, the others move on
            is_new[pending[free]] = True
            pending = pending[self._slot_key[at].ne(wanted)]
            slot[pending] = torch.bitwise_and(slot[pending] + 1, mask)
        return slot, is_new

    def _double(self) -> None:
        num_slots = 2 * len(self._slot_key)
        key = self._key_of[: self._num_keys]
        self._slot_key = torch.full((num_slots,), _EMPTY, dtype=torch.int64, device=key.device)
        self._slot_idx = torch.zeros(num_slots, dtype=torch.int64, device=key.device)
        self._key_of = torch.cat([self._key_of, torch.zeros_like(self._key_of)])
        slot, _ = self._place(key)
        self._slot_idx[slot] = torch.arange(self._num_keys, device=key.device)
