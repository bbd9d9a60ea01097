"""An open-addressing hash table held in tensors: a whole batch is found or inserted by a handful of tensor operations.

Keys are int64 and lie in buckets of `BUCKET_SIZE` (one cache line), filled from the left. A bucket that is full passes
its keys on to the next one. Keys are never removed one by one (`keep` rebuilds): a bucket with a hole ends a search.

Shapes: Q queries, B buckets, W = BUCKET_SIZE.
"""

from __future__ import annotations

import torch
from torch import Tensor

BUCKET_SIZE = 8
EMPTY = -1
MAX_LOAD = 0.5
# 2**64 / golden ratio, as a signed number: the products' high bits are well mixed (Knuth's multiplicative hashing).
_MULTIPLIER = -7046029254386353131
_BUCKET_SHIFT = 3


class HashTable:
    """Maps int64 keys (not EMPTY) to slots; `values` holds 64 bits a slot, in whatever meaning its owner gives them.

    Slot numbers change whenever the table grows or drops keys; `num_rebuilds` counts how often.
    """

    def __init__(self, num_buckets: int, device: torch.device) -> None:
        self.device = device
        self.count = 0
        self.num_rebuilds = 0
        self._allocate(num_buckets)

    def _allocate(self, num_buckets: int) -> None:
        if num_buckets & (num_buckets - 1):
            raise ValueError(f"num_buckets must be a power of two, not {num_buckets}")
        self.keys = torch.full((num_buckets, BUCKET_SIZE), EMPTY, dtype=torch.int64, device=self.device)
        self.values = torch.zeros(num_buckets * BUCKET_SIZE, dtype=torch.int64, device=self.device)
        self._hash_shift = 63 - (num_buckets - 1).bit_length()
        self._bucket_mask = num_buckets - 1

    @property
    def num_slots(self) -> int:
        return self.values.numel()

    @property
    def num_bytes(self) -> int:
        return 16 * self.num_slots

    def _bucket_of(self, key: Tensor) -> Tensor:
        """The home bucket of each key: (Q,) -> (Q,)."""
        return key.mul(_MULTIPLIER).bitwise_right_shift_(self._hash_shift).bitwise_and_(self._bucket_mask)

    def find(self, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """key (Q,) -> slot (Q,), -1 where absent, and the positions of the absent keys (None where all are there)."""
        bucket = self._bucket_of(key)
        hit = (self.keys.index_select(0, bucket) == key.unsqueeze(1)).view(-1).nonzero().squeeze(1)
        if hit.numel() == key.numel():
            return bucket.bitwise_left_shift_(_BUCKET_SHIFT).add_(hit.bitwise_and_(BUCKET_SIZE - 1)), None
        slot = torch.full_like(key, -1)
        pending: Tensor | None = None
        while True:
            query = hit.bitwise_right_shift(_BUCKET_SHIFT)
            found = (bucket.index_select(0, query) << _BUCKET_SHIFT) + (hit & BUCKET_SIZE - 1)
            slot[query if pending is None else pending.index_select(0, query)] = found
            # Only a full bucket can have passed a key on; its last place tells.
            is_full = self.keys[:, -1].index_select(0, bucket) != EMPTY
            is_absent = (slot if pending is None else slot.index_select(0, pending)) < 0
            on = (is_full & is_absent).nonzero().squeeze(1)
            if on.numel() == 0:
                break
            pending = on if pending is None else pending.index_select(0, on)
            bucket = bucket.index_select(0, on).add_(1).bitwise_and_(self._bucket_mask)
            match = self.keys.index_select(0, bucket) == key.index_select(0, pending).unsqueeze(1)
            hit = match.view(-1).nonzero().squeeze(1)
        missing = (slot < 0).nonzero().squeeze(1)
        return slot, (missing if missing.numel() else None)

    def insert(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Absent keys (Q,), duplicates allowed -> slot (Q,), and a mask (Q,) that marks one query of each new key."""
        self.reserve(key.numel())
        slot = self._claim_slots(key)
        position = torch.arange(key.numel(), device=self.device)
        self.values[slot] = position
        is_first = self.values.index_select(0, slot) == position
        self.count += int(is_first.sum())
        return slot, is_first

    def _claim_slots(self, key: Tensor) -> Tensor:
        """Each round, every pending key writes itself to the first hole of its bucket; who reads itself back has won.

        Equal keys move in step, so that they win together.
        """
        flat = self.keys.view(-1)
        slot = torch.full_like(key, -1)
        pending = torch.arange(key.numel(), device=self.device)
        bucket = self._bucket_of(key)
        while pending.numel():
            num_taken = (self.keys.index_select(0, bucket) != EMPTY).sum(1)
            ready = (num_taken < BUCKET_SIZE).nonzero().squeeze(1)
            claimant = pending.index_select(0, ready)
            target = bucket.bitwise_left_shift(_BUCKET_SHIFT).add_(num_taken).index_select(0, ready)
            own = key.index_select(0, claimant)
            flat[target] = own
            slot[claimant] = target.masked_fill_(flat.index_select(0, target) != own, -1)
            left = (slot.index_select(0, pending) < 0).nonzero().squeeze(1)
            bucket = (bucket + (num_taken == BUCKET_SIZE)).bitwise_and_(self._bucket_mask).index_select(0, left)
            pending = pending.index_select(0, left)
        return slot

    def reserve(self, num_new: int) -> None:
        """Makes room for so many more keys; the table at least doubles where it has to grow."""
        num_slots = self.num_slots
        while self.count + num_new > MAX_LOAD * num_slots:
            num_slots *= 2
        if num_slots > self.num_slots:
            self._rebuild(num_slots // BUCKET_SIZE, (self.keys.view(-1) != EMPTY).nonzero().squeeze(1))

    def keep(self, is_kept: Tensor) -> None:
        """Drops every key whose slot is not marked in is_kept (num_slots,)."""
        self._rebuild(self.keys.shape[0], (is_kept & (self.keys.view(-1) != EMPTY)).nonzero().squeeze(1))

    def _rebuild(self, num_buckets: int, kept_slot: Tensor) -> None:
        key, value = self.keys.view(-1).index_select(0, kept_slot), self.values.index_select(0, kept_slot)
        self._allocate(num_buckets)
        self.num_rebuilds += 1
        self.values[self._claim_slots(key)] = value
        self.count = key.numel()
