"""A hash table in tensors that finds or inserts a whole batch of keys at once.

Keys are in buckets of `BUCKET_SIZE`, each one cache line, filled from the left. A full bucket passes keys on to the
next one. Keys are never removed one by one, since a hole in a bucket would end a search; `keep` rebuilds the table.

On a CPU numba's loops do the work, on a GPU Triton's kernels. Where these are not installed, tensor operations do it,
and put keys into other slots. `first_of_each`, `segment_max` and `distinct_values` work on batches with repeated keys.

Shapes: Q queries, B buckets, W bucket size, D distinct keys.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.kernels.jit import gpu_module, has_loops, jit_required, kernel

BUCKET_SIZE = 8
BYTES_PER_SLOT = 16
EMPTY = -1
MAX_LOAD = 0.5

# 2**64 / golden ratio, as a signed number: the products' high bits are well mixed (Knuth's multiplicative hashing).
MULTIPLIER = -7046029254386353131
_LARGEST = (1 << 63) - 1
_BUCKET_SHIFT = 3


@kernel(fastmath=False)
def find_keys(table: Any, key: Any, shift: int, slot: Any, missing: Any) -> int:
    """Fills slot (Q,), -1 where absent, and the beginning of missing (Q,) -> how many keys (Q,) are absent."""
    num_missing = 0
    for query in range(len(key)):
        slot[query] = slot_of(table, key[query], shift)
        if slot[query] < 0:
            slot[query] = -1
            missing[num_missing] = query
            num_missing += 1
    return num_missing


@kernel(fastmath=False)
def insert_keys(table: Any, key: Any, shift: int, slot: Any, one: Any, num_new: int, most_new: int) -> int:
    """Inserts keys (Q,), duplicates allowed -> n, how many were new; -1 - n if it stopped at `most_new` new keys.

    Fills slot (Q,), and one (Q,) from `num_new` on with the position of each new key's first query. Called again with a
    larger table and what it has returned, it continues where it stopped.
    """
    width = table.shape[1]
    for query in range(len(key)):
        at = slot_of(table, key[query], shift)
        if at < 0:
            if num_new == most_new:
                return -1 - num_new
            at = -1 - at
            table[at // width, at % width] = key[query]
            one[num_new] = query
            num_new += 1
        slot[query] = at
    return num_new


def slot_of(table: Any, key: int, shift: int) -> int:
    """The slot of a key; -1 - s for an absent key that would take slot s.

    table (B, W): a bucket is filled from the left, a full one passes keys on to the next.
    """
    num_buckets, width = table.shape
    bucket = home_bucket(key, shift)
    place = 0
    while True:
        held = table[bucket, place]
        if held == key:
            return bucket * width + place
        if held < 0:
            return -1 - (bucket * width + place)
        place += 1
        if place == width:
            place = 0
            bucket = (bucket + 1) & (num_buckets - 1)


def home_bucket(key: int, shift: int) -> int:
    """The bucket in which the search for a key begins."""
    return ((key * MULTIPLIER) & _LARGEST) >> shift


class HashTable:
    """Maps non-negative int64 keys to slots; `values` has 64 bits per slot, whose meaning is up to the table's owner.

    Slot numbers change whenever the table grows or drops keys; `num_rebuilds` counts how often.

    Args:
        compiled: whether to run numba's loops on a CPU and Triton's kernels on a GPU, where they are installed.
    """

    def __init__(self, num_buckets: int, device: torch.device, compiled: bool = True) -> None:
        self._has_loops = compiled and has_loops(device)
        self._kernels = gpu_module("asr.kernels.hash_table_triton", device) if compiled else None
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
    def num_free(self) -> int:
        """How many more keys there is room for."""
        return int(MAX_LOAD * self.num_slots) - self.count

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_SLOT * self.num_slots

    def _mixed(self, key: Tensor) -> Tensor:
        """Mixes keys one-to-one; neither keys nor results are negative: (Q,) -> (Q,)."""
        return key.mul(MULTIPLIER).bitwise_and_(_LARGEST)

    def _bucket_of(self, key: Tensor) -> Tensor:
        """The home bucket of each key, the high bits of its mixed form: (Q,) -> (Q,)."""
        return self._mixed(key).bitwise_right_shift_(self._hash_shift)

    def find(self, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """key (Q,) -> slot (Q,), -1 where absent, and the positions of the absent keys (None where all are there)."""
        if self._kernels is not None:
            return self._kernels.find_keys(self.keys, key, self._hash_shift)
        if self._has_loops:
            slot, missing = torch.empty_like(key), torch.empty_like(key)
            num_missing = jit_required(find_keys)(*self._arrays(key), slot.numpy(), missing.numpy())
            return slot, (missing[:num_missing] if num_missing else None)
        bucket = self._bucket_of(key)
        hit = self._hits(key, bucket)
        if hit.numel() == key.numel():
            return bucket.bitwise_left_shift_(_BUCKET_SHIFT).add_(hit.bitwise_and_(BUCKET_SIZE - 1)), None
        slot = torch.full_like(key, -1)
        query = hit.bitwise_right_shift(_BUCKET_SHIFT)
        slot.index_copy_(0, query, self._slot(bucket.index_select(0, query), hit))
        missing = (slot < 0).nonzero().squeeze(1)
        pending, bucket = missing, bucket.index_select(0, missing)
        while True:
            # Only a full bucket, whose last place is taken, can have passed a key on.
            full = (self.keys[:, -1].index_select(0, bucket) != EMPTY).nonzero().squeeze(1)
            if full.numel() == 0:
                break
            pending = pending.index_select(0, full)
            bucket = bucket.index_select(0, full).add_(1).bitwise_and_(self._bucket_mask)
            hit = self._hits(key.index_select(0, pending), bucket)
            query = hit.bitwise_right_shift(_BUCKET_SHIFT)
            slot.index_copy_(0, pending.index_select(0, query), self._slot(bucket.index_select(0, query), hit))
            absent = (slot.index_select(0, pending) < 0).nonzero().squeeze(1)
            pending, bucket = pending.index_select(0, absent), bucket.index_select(0, absent)
        missing = missing[slot.index_select(0, missing) < 0]
        return slot, (missing if missing.numel() else None)

    def _hits(self, key: Tensor, bucket: Tensor) -> Tensor:
        """Positions of the keys (Q,) found in their buckets (Q,): W times the query plus the place, ascending."""
        return (self.keys.index_select(0, bucket) == key.unsqueeze(1)).view(-1).nonzero().squeeze(1)

    @staticmethod
    def _slot(bucket: Tensor, hit: Tensor) -> Tensor:
        return bucket.bitwise_left_shift(_BUCKET_SHIFT).add_(hit & BUCKET_SIZE - 1)

    def insert(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Absent keys (Q,), duplicates allowed -> slot (Q,), and the position of one query of each new key (D,)."""
        if self._kernels is not None:
            if self.count + key.numel() > MAX_LOAD * self.num_slots:
                self.reserve(torch.unique(key).numel())
            slot, one = self._kernels.insert_keys(self.keys, self.values, key, self._hash_shift)
            self.count += one.numel()
            return slot, one
        if self._has_loops:
            return self._insert_in_loop(key)
        # Sorting by the mixed form sorts keys by bucket, with equal ones next to each other.
        mixed, order = self._mixed(key).sort()
        is_new = torch.ones_like(mixed, dtype=torch.bool)
        torch.ne(mixed[1:], mixed[:-1], out=is_new[1:])
        where = is_new.nonzero().squeeze(1)
        self.reserve(where.numel())
        one = order.index_select(0, where)
        distinct_slot = self._place(key.index_select(0, one), mixed.index_select(0, where))
        self.count += one.numel()
        slot = torch.empty_like(key)
        slot.index_copy_(0, order, distinct_slot.index_select(0, is_new.cumsum(0).sub_(1)))
        return slot, one

    @property
    def can_put(self) -> bool:
        """Whether `put` can be used: on a GPU with Triton."""
        return self._kernels is not None

    def put(self, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Finds or adds keys (Q,) -> slot (Q,), whether each is new (Q,), and the first of its kind (Q,) bool.

        The host waits for the device only if the table must grow. Once the host has read which queries added keys, it
        must call `added`.
        """
        assert self._kernels is not None
        self.reserve(key.numel())
        return self._kernels.put_keys(self.keys, self.values, key, self._hash_shift)

    def find_queued(self, key: Tensor) -> Tensor:
        """key (Q,) -> slot (Q,), -1 where absent, on a GPU with Triton; the host does not wait for the device."""
        assert self._kernels is not None
        return self._kernels.find_places(self.keys, key, self._hash_shift)

    def insert_queued(self, key: Tensor, found: Tensor, has_room: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of the keys (Q,) that `find_queued` did not find; the host does not wait for the device.

        The caller writes the values of new slots. It must set `count` once it knows how many keys are new.

        Args:
            key: (Q,).
            found: (Q,), the result of `find_queued`.
            has_room: (1,) int64; if it is 0, nothing is added, and absent keys get no slot.

        Returns:
            slot (Q,), and is_first (Q,) int64, 1 for the first query of each new key.
        """
        assert self._kernels is not None
        return self._kernels.insert_absent(self.keys, self.values, key, self._hash_shift, found, has_room)

    def store_queued(self, is_first: Tensor, index: Tensor, source: Tensor, target: Tensor) -> None:
        """target[index] = source, (Q,) int64 each, for the keys that `insert_queued` has added."""
        assert self._kernels is not None
        self._kernels.store_where(is_first, index, source, target)

    def added(self, slot: Tensor) -> None:
        """Registers the new keys, which are in these slots (D,)."""
        self.values.index_fill_(0, slot, 0)
        self.count += slot.numel()

    def _insert_in_loop(self, key: Tensor) -> tuple[Tensor, Tensor]:
        slot, one = torch.empty_like(key), torch.empty_like(key)
        count, num_new = self.count, 0
        while True:
            most_new = int(MAX_LOAD * self.num_slots) - count
            num_new = jit_required(insert_keys)(*self._arrays(key), slot.numpy(), one.numpy(), num_new, most_new)
            if num_new >= 0:
                break
            num_new = -1 - num_new
            self._rebuild(2 * self.keys.shape[0], (self.keys.view(-1) != EMPTY).nonzero().squeeze(1))
        self.count = count + num_new
        return slot, one[:num_new]

    def for_loop(self) -> tuple[Any, int]:
        """The keys (B, W) and the shift of their hashes, as `slot_of` takes them."""
        return self.keys.numpy(), self._hash_shift

    def _arrays(self, key: Tensor) -> tuple[Any, Any, int]:
        return self.keys.numpy(), key.contiguous().numpy(), self._hash_shift

    def _place(self, key: Tensor, mixed: Tensor) -> Tensor:
        """Distinct absent keys (D,), ascending by their mixed form (D,), take the first free places -> slot (D,)."""
        bucket = mixed >> self._hash_shift
        position = torch.arange(key.numel(), device=self.device)
        # A key's rank within its bucket is its distance from the first key of the bucket.
        is_first = torch.ones_like(bucket, dtype=torch.bool)
        torch.ne(bucket[1:], bucket[:-1], out=is_first[1:])
        rank = position - (position * is_first).cummax(0).values
        place = (self.keys.index_select(0, bucket) != EMPTY).sum(1).add_(rank)
        slot = bucket.bitwise_left_shift(_BUCKET_SHIFT).add_(place)
        passed_on = (place >= BUCKET_SIZE).nonzero().squeeze(1)
        if passed_on.numel() == 0:
            self.keys.view(-1).index_copy_(0, slot, key)
            return slot
        home = (place < BUCKET_SIZE).nonzero().squeeze(1)
        self.keys.view(-1).index_copy_(0, slot.index_select(0, home), key.index_select(0, home))
        slot[passed_on] = self._claim(key.index_select(0, passed_on), bucket.index_select(0, passed_on))
        return slot

    def _claim(self, key: Tensor, bucket: Tensor) -> Tensor:
        """Distinct keys (D,) take places after their full buckets (D,) -> slot (D,).

        In each round, every remaining key writes itself to the first free place; a key that reads itself back has won.
        """
        flat = self.keys.view(-1)
        slot = torch.full_like(key, -1)
        pending = torch.arange(key.numel(), device=self.device)
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
        """Makes room for `num_new` more keys; if the table must grow, its size at least doubles."""
        num_slots = self.num_slots
        while self.count + num_new > MAX_LOAD * num_slots:
            num_slots *= 2
        if num_slots > self.num_slots:
            self._rebuild(num_slots // BUCKET_SIZE, (self.keys.view(-1) != EMPTY).nonzero().squeeze(1))

    def clear(self) -> None:
        """Drops every key, in place."""
        self.keys.fill_(EMPTY)
        self.values.zero_()
        self.count = 0

    def keep(self, is_kept: Tensor) -> None:
        """Drops every key whose slot is not marked in is_kept (num_slots,)."""
        self._rebuild(self.keys.shape[0], (is_kept & (self.keys.view(-1) != EMPTY)).nonzero().squeeze(1))

    def shrink(self, num_slots: int) -> None:
        """Reduces the number of slots to `num_slots`, a power of two into which the keys fit."""
        self._rebuild(num_slots // BUCKET_SIZE, (self.keys.view(-1) != EMPTY).nonzero().squeeze(1))

    def _rebuild(self, num_buckets: int, kept_slot: Tensor) -> None:
        key, value = self.keys.view(-1).index_select(0, kept_slot), self.values.index_select(0, kept_slot)
        self._allocate(num_buckets)
        self.num_rebuilds += 1
        self.count = key.numel()
        if self._kernels is not None:
            slot, _ = self._kernels.insert_keys(self.keys, self.values, key, self._hash_shift)
            self.values.index_copy_(0, slot, value)
            return
        if self._has_loops:
            slot, one = torch.empty_like(key), torch.empty_like(key)
            jit_required(insert_keys)(*self._arrays(key), slot.numpy(), one.numpy(), 0, key.numel())
            self.values.index_copy_(0, slot, value)
            return
        mixed, order = self._mixed(key).sort()
        self.values.index_copy_(0, self._place(key.index_select(0, order), mixed), value.index_select(0, order))


# torch 1.13 warns that the function is in beta; what is used of it here has not changed since.
warnings.filterwarnings("ignore", message=r"scatter_reduce\(\) is in beta")


def first_of_each(key: Tensor) -> tuple[Tensor, Tensor]:
    """key (Q,) -> the position of one query of each distinct key (D,), ascending, and the index of each query (Q,)."""
    distinct, which = torch.unique(key, return_inverse=True)
    position = torch.arange(key.numel(), device=key.device)
    # With copies to the same place it would be undefined which one stays.
    return torch.zeros_like(distinct).scatter_reduce_(0, which, position, "amax"), which


def marked_positions(mask: Tensor, num: int) -> Tensor:
    """Where a mask (Q,) bool is true, ascending (num,) int64; the host must know their number, and does not wait."""
    place = torch.where(mask, mask.cumsum(0) - 1, num)
    found = torch.empty(num + 1, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, place, torch.arange(len(mask), device=mask.device))[:num]


def segment_max(values: Tensor, index: Tensor, num: int) -> Tensor:
    """values (Q,), index (Q,) in 0 .. num - 1 -> the largest value of each index (num,); lowest possible if none."""
    least = -torch.inf if values.is_floating_point() else torch.iinfo(values.dtype).min
    return torch.full((num,), least, dtype=values.dtype, device=values.device).scatter_reduce_(
        0, index, values, reduce="amax"
    )


def distinct_values(values: Any) -> Any:
    """The distinct values among values (Q,), in order of first occurrence (D,), and the index of each (Q,)."""
    num_slots = 16
    while num_slots < 2 * len(values):
        num_slots *= 2
    table = np.full(num_slots, -1, dtype=np.int64)
    distinct, which = np.empty(len(values), dtype=np.int64), np.empty(len(values), dtype=np.int64)
    num = 0
    for i in range(len(values)):
        slot = (values[i] * 0x1E3779B97F4A7C15 >> 20) & (num_slots - 1)
        while table[slot] >= 0 and distinct[table[slot]] != values[i]:
            slot = (slot + 1) & (num_slots - 1)
        if table[slot] < 0:
            table[slot], distinct[num] = num, values[i]
            num += 1
        which[i] = table[slot]
    return distinct[:num], which
