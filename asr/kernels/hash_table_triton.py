"""The hash table's operations as Triton kernels, one lane for each key; `hash_table` has the loops for CPUs.

A search goes from the key's home bucket to its place or to the first free one. A new key takes a free place by
compare-and-swap, so that buckets are filled from the left here as well.

Shapes: Q queries, P places of the table, L lanes of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# At least 128, the threads of a program.
_LANES = 256
_LARGEST = tl.constexpr((1 << 63) - 1)
_EMPTY = tl.constexpr(-1)


@triton.jit(do_not_specialize=["num_keys"])
def _find(
    table: tl.tensor,
    num_places: tl.tensor,
    key: tl.tensor,
    num_keys: tl.tensor,
    multiplier: tl.tensor,
    shift: tl.tensor,
    width: tl.tensor,
    slot: tl.tensor,
    L: tl.constexpr,
) -> None:
    """Fills slot (Q,) int64 with the place of each key (Q,) in the table (P,), -1 where it is absent."""
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_valid = query < num_keys
    wanted = tl.load(key + query, mask=is_valid, other=0)
    place = (((wanted * multiplier) & _LARGEST) >> shift) * width
    found = tl.full([L], -1, tl.int64)
    goes_on = is_valid
    while tl.max(goes_on.to(tl.int32), 0) > 0:
        held = tl.load(table + place, mask=goes_on, other=_EMPTY)
        found = tl.where(goes_on & (held == wanted), place, found)
        goes_on = goes_on & (held != wanted) & (held != _EMPTY)
        place = tl.where(goes_on, (place + 1) & (num_places - 1), place)
    tl.store(slot + query, found, mask=is_valid)


@triton.jit(do_not_specialize=["num_keys"])
def _insert(
    table: tl.tensor,
    num_places: tl.tensor,
    key: tl.tensor,
    num_keys: tl.tensor,
    multiplier: tl.tensor,
    shift: tl.tensor,
    width: tl.tensor,
    slot: tl.tensor,
    value: tl.tensor,
    SOME_KNOWN: tl.constexpr,
    L: tl.constexpr,
) -> None:
    """Inserts keys (Q,) -> slot (Q,) int64; value (P,) is raised to `num_keys` minus the first query of each new key.

    With SOME_KNOWN, slot already has the places of keys that are not new, and is negative for the others.
    """
    # Lanes beyond the last key repeat what the last one does, which changes nothing.
    query = tl.minimum(tl.program_id(0) * L + tl.arange(0, L), num_keys - 1)
    wanted = tl.load(key + query)
    place = (((wanted * multiplier) & _LARGEST) >> shift) * width
    is_new = tl.full([L], 1, tl.int1)
    if SOME_KNOWN:
        known = tl.load(slot + query)
        is_new = known < 0
        place = tl.where(is_new, place, known)
    goes_on = tl.full([L], 1, tl.int1)
    while tl.max(goes_on.to(tl.int32), 0) > 0:
        # A lane that has finished finds its own key and changes nothing. Relaxed, since programs share only the place
        # itself: the default would put a device-wide fence around each attempt.
        held = tl.atomic_cas(table + place, tl.full([L], _EMPTY, tl.int64), wanted, sem="relaxed")
        goes_on = goes_on & (held != wanted) & (held != _EMPTY)
        place = tl.where(goes_on, (place + 1) & (num_places - 1), place)
    tl.atomic_max(value + place, (num_keys - query).to(tl.int64), mask=is_new, sem="relaxed")
    tl.store(slot + query, place)


def find_keys(table: Tensor, key: Tensor, multiplier: int, shift: int) -> tuple[Tensor, Tensor | None]:
    """See `HashTable.find`; the host waits only to read how many keys are absent.

    Args:
        table: (buckets, width) int64.
        key: (Q,) int64.
        multiplier, shift: of the home bucket.
    """
    key, slot = key.contiguous(), torch.empty_like(key, memory_format=torch.contiguous_format)
    if not len(key):
        return slot, None
    _launch_find(table, key, multiplier, shift, slot)
    missing = (slot < 0).nonzero().squeeze(1)
    return slot, (missing if len(missing) else None)


def insert_keys(table: Tensor, value: Tensor, key: Tensor, multiplier: int, shift: int) -> tuple[Tensor, Tensor]:
    """See `HashTable.insert`; the table has room for all keys. The host waits only to read how many are new.

    Args:
        table: (buckets, width) int64.
        value: (buckets * width,) int64, 0 where a place is free.
        key: (Q,) int64, absent.
        multiplier, shift: of the home bucket.
    """
    key, slot = key.contiguous(), torch.empty_like(key, memory_format=torch.contiguous_format)
    if not len(key):
        return slot, slot.clone()
    _launch_insert(table, value, key, multiplier, shift, slot, some_known=False)
    first = len(key) - value.index_select(0, slot)
    one = (first == torch.arange(len(key), device=key.device)).nonzero().squeeze(1)
    value.index_fill_(0, slot.index_select(0, one), 0)
    return slot, one


def put_keys(table: Tensor, value: Tensor, key: Tensor, multiplier: int, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `HashTable.put`; the host does not wait for the device.

    Args:
        table, value, key, multiplier, shift: as for `insert_keys`, but keys may already be in the table.
    """
    key, slot = key.contiguous(), torch.empty_like(key, memory_format=torch.contiguous_format)
    if not len(key):
        return slot, slot < 0, slot < 0
    _launch_find(table, key, multiplier, shift, slot)
    is_absent = slot < 0
    _launch_insert(table, value, key, multiplier, shift, slot, some_known=True)
    first = len(key) - value.index_select(0, slot)
    return slot, is_absent, is_absent & (first == torch.arange(len(key), device=key.device))


def _launch_find(table: Tensor, key: Tensor, multiplier: int, shift: int, slot: Tensor) -> None:
    with torch.cuda.device_of(key):
        _find[(triton.cdiv(len(key), _LANES),)](
            *(table, table.numel(), key, len(key), multiplier, shift, table.shape[1], slot), L=_LANES
        )


def _launch_insert(
    table: Tensor, value: Tensor, key: Tensor, multiplier: int, shift: int, slot: Tensor, some_known: bool
) -> None:
    with torch.cuda.device_of(key):
        _insert[(triton.cdiv(len(key), _LANES),)](
            *(table, table.numel(), key, len(key), multiplier, shift, table.shape[1], slot, value),
            SOME_KNOWN=some_known,
            L=_LANES,
        )
