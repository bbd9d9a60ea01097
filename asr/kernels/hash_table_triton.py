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

from asr.kernels.hash_table import MULTIPLIER

# At least 128, the threads of a program.
_LANES = 256
_MULTIPLIER = tl.constexpr(MULTIPLIER)
_LARGEST = tl.constexpr((1 << 63) - 1)
_EMPTY = tl.constexpr(-1)


@triton.jit(do_not_specialize=["num_keys"])
def _find(
    table: tl.tensor,
    num_places: tl.tensor,
    key: tl.tensor,
    num_keys: tl.tensor,
    shift: tl.tensor,
    width: tl.tensor,
    slot: tl.tensor,
    L: tl.constexpr,
) -> None:
    """Fills slot (Q,) int64 with the place of each key (Q,) in the table (P,), -1 where it is absent."""
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_valid = query < num_keys
    wanted = tl.load(key + query, mask=is_valid, other=0)
    place = (((wanted * _MULTIPLIER) & _LARGEST) >> shift) * width
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
    shift: tl.tensor,
    width: tl.tensor,
    slot: tl.tensor,
    value: tl.tensor,
    has_room: tl.tensor,
    SOME_KNOWN: tl.constexpr,
    MAY_LACK: tl.constexpr,
    L: tl.constexpr,
) -> None:
    """Inserts keys (Q,) -> slot (Q,) int64; value (P,) is raised to `num_keys` minus the first query of each new key.

    With SOME_KNOWN, slot already has the places of keys that are not new, and is negative for the others. With
    MAY_LACK, nothing is inserted if has_room (1,) int64 is 0: in a full table, the search for a place would not end.
    """
    if MAY_LACK:  # noqa: SIM102, the compiler decides the first condition
        if tl.load(has_room) == 0:
            return
    # Lanes beyond the last key repeat what the last one does, which changes nothing.
    query = tl.minimum(tl.program_id(0) * L + tl.arange(0, L), num_keys - 1)
    wanted = tl.load(key + query)
    place = (((wanted * _MULTIPLIER) & _LARGEST) >> shift) * width
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


def find_keys(table: Tensor, key: Tensor, shift: int) -> tuple[Tensor, Tensor | None]:
    """See `HashTable.find`; the host waits only to read how many keys are absent.

    Args:
        table: (buckets, width) int64.
        key: (Q,) int64.
        shift: of the home bucket.
    """
    if not len(key):
        return torch.empty_like(key), None
    slot = find_places(table, key.contiguous(), shift)
    missing = (slot < 0).nonzero().squeeze(1)
    return slot, (missing if len(missing) else None)


def insert_keys(table: Tensor, value: Tensor, key: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """See `HashTable.insert`; the table has room for all keys. The host waits only to read how many are new.

    Args:
        table: (buckets, width) int64.
        value: (buckets * width,) int64, 0 where a place is free.
        key: (Q,) int64, absent.
        shift: of the home bucket.
    """
    key, slot = key.contiguous(), torch.empty_like(key, memory_format=torch.contiguous_format)
    if not len(key):
        return slot, slot.clone()
    _launch_insert(table, value, key, shift, slot, some_known=False)
    first = len(key) - value.index_select(0, slot)
    one = (first == torch.arange(len(key), device=key.device)).nonzero().squeeze(1)
    value.index_fill_(0, slot.index_select(0, one), 0)
    return slot, one


def put_keys(table: Tensor, value: Tensor, key: Tensor, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `HashTable.put`; the host does not wait for the device.

    Args:
        table, value, key, shift: as for `insert_keys`, but keys may already be in the table.
    """
    if not len(key):
        return torch.empty_like(key), key < 0, key < 0
    key = key.contiguous()
    slot = find_places(table, key, shift)
    is_absent = slot < 0
    _launch_insert(table, value, key, shift, slot, some_known=True)
    first = len(key) - value.index_select(0, slot)
    return slot, is_absent, is_absent & (first == torch.arange(len(key), device=key.device))


@triton.jit(do_not_specialize=["num_keys"])
def _mark_first(
    found: tl.tensor, slot: tl.tensor, value: tl.tensor, num_keys: tl.tensor, is_first: tl.tensor, L: tl.constexpr
) -> None:
    """Writes is_first (Q,) int64: whether each query added its key; found (Q,) is negative for keys that were absent,
    and slot (Q,) has their places, where value (P,) is as `_insert` leaves it."""
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_valid = query < num_keys
    own = tl.load(slot + query, mask=is_valid, other=-1)
    is_new = is_valid & (tl.load(found + query, mask=is_valid, other=0) < 0) & (own >= 0)
    first = num_keys - tl.load(value + own, mask=is_new, other=0)
    tl.store(is_first + query, (is_new & (first == query)).to(tl.int64), mask=is_valid)


def find_places(table: Tensor, key: Tensor, shift: int) -> Tensor:
    """See `HashTable.find_queued`; arguments as for `find_keys`, but key is contiguous and not empty."""
    slot = torch.empty_like(key)
    with torch.cuda.device_of(key):
        _find[(triton.cdiv(len(key), _LANES),)](
            *(table, table.numel(), key, len(key), shift, table.shape[1], slot), L=_LANES
        )
    return slot


def insert_absent(
    table: Tensor, value: Tensor, key: Tensor, shift: int, found: Tensor, has_room: Tensor
) -> tuple[Tensor, Tensor]:
    """See `HashTable.insert_queued`; table to shift as for `put_keys`."""
    slot, is_first = found.clone(), torch.empty_like(found)
    _launch_insert(table, value, key, shift, slot, some_known=True, has_room=has_room)
    with torch.cuda.device_of(key):
        _mark_first[(triton.cdiv(len(key), _LANES),)](found, slot, value, len(key), is_first, L=_LANES)
    return slot, is_first


@triton.jit(do_not_specialize=["num_queries"])
def _store_where(
    is_stored: tl.tensor,
    index: tl.tensor,
    source: tl.tensor,
    num_queries: tl.tensor,
    target: tl.tensor,
    L: tl.constexpr,
) -> None:
    """target[index] = source, (Q,) int64 each, where is_stored (Q,) int64 is not 0."""
    query = tl.program_id(0) * L + tl.arange(0, L)
    is_valid = tl.load(is_stored + query, mask=query < num_queries, other=0) > 0
    place = tl.load(index + query, mask=is_valid, other=0)
    tl.store(target + place, tl.load(source + query, mask=is_valid, other=0), mask=is_valid)


def store_where(is_stored: Tensor, index: Tensor, source: Tensor, target: Tensor) -> None:
    """target[index] = source, (Q,) int64 each, where is_stored (Q,) int64 is not 0; the host does not wait."""
    with torch.cuda.device_of(source):
        _store_where[(triton.cdiv(len(source), _LANES),)](
            is_stored, index, source, len(source), target, L=_LANES
        )  # fmt: skip


def _launch_insert(
    table: Tensor,
    value: Tensor,
    key: Tensor,
    shift: int,
    slot: Tensor,
    some_known: bool,
    has_room: Tensor | None = None,
) -> None:
    with torch.cuda.device_of(key):
        _insert[(triton.cdiv(len(key), _LANES),)](
            *(table, table.numel(), key, len(key), shift, table.shape[1], slot, value),
            slot if has_room is None else has_room,
            SOME_KNOWN=some_known,
            MAY_LACK=has_room is not None,
            L=_LANES,
        )
