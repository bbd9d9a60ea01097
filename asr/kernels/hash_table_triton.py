"""The hash table's operations as Triton kernels, one lane for each key; see `hash_table` for the loops that a CPU runs.

A search walks from the key's home bucket to its place or to the first free one; a new key takes a free place by
compare-and-swap, so that buckets are filled from the left here as well.

Shapes: Q queries, P places of the table, L lanes of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# At least the threads of a program: 128.
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
    """slot (Q,) int64: where each key (Q,) stands in the table (P,), -1 where it is absent."""
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
    """Puts in keys (Q,) -> slot (Q,) int64; value (P,) is raised to `num_keys` less the first query of each new key.

    With SOME_KNOWN, slot says where keys stand that are not new, and is negative for the others.
    """
    # Lanes behind the last key do what the last one does: it changes nothing.
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
        # A lane that has arrived finds its own key and changes nothing. Relaxed, since the place itself is all that
        # programs share: the default would put a device-wide fence around each try.
        held = tl.atomic_cas(table + place, tl.full([L], _EMPTY, tl.int64), wanted, sem="relaxed")
        goes_on = goes_on & (held != wanted) & (held != _EMPTY)
        place = tl.where(goes_on, (place + 1) & (num_places - 1), place)
    tl.atomic_max(value + place, (num_keys - query).to(tl.int64), mask=is_new, sem="relaxed")
    tl.store(slot + query, place)


def find_keys(table: Tensor, key: Tensor, multiplier: int, shift: int) -> tuple[Tensor, Tensor | None]:
    """As `HashTable.find`; the host reads how many keys are absent, and nothing else.

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
    """As `HashTable.insert`, into a table with room for all keys; the host reads how many are new, and nothing else.

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
    """As `HashTable.put`; the host waits for nothing.

    Args:
        table, value, key, multiplier, shift: as of `insert_keys`, but keys may be there.
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
