"""The hash table's operations as loops over single keys: compiled by numba where it is installed, for tables on a CPU.

The tensor form in `HashTable` finds and holds the same keys on any device, if in other slots. Uncompiled they are a
slow oracle of it.

Shapes: Q queries, B buckets, W bucket size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asr.lm.compiled_loop import compiled_loop

_LARGEST = (1 << 63) - 1


def compiled_loops() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """`find_keys` and `insert_keys` compiled, or None where numba is missing."""
    first, second = (compiled_loop(loop, reorders_sums=False) for loop in (find_keys, insert_keys))
    return None if first is None or second is None else (first, second)


def find_keys(table: Any, key: Any, multiplier: int, shift: int, slot: Any, missing: Any) -> int:
    """Fills slot (Q,), -1 where absent, and missing (Q,) from its beginning -> how many keys (Q,) are absent."""
    num_missing = 0
    for query in range(len(key)):
        slot[query] = slot_of(table, key[query], multiplier, shift)
        if slot[query] < 0:
            slot[query] = -1
            missing[num_missing] = query
            num_missing += 1
    return num_missing


def insert_keys(
    table: Any, key: Any, multiplier: int, shift: int, slot: Any, one: Any, num_new: int, most_new: int
) -> int:
    """Puts in keys (Q,), duplicates allowed -> how many have been new, or -1 less that where `most_new` has stopped it.

    Fills slot (Q,), and one (Q,) from `num_new` on with the position of each new key's first query. Begun anew in a
    larger table with what it has returned, it goes on where it stopped.
    """
    width = table.shape[1]
    for query in range(len(key)):
        at = slot_of(table, key[query], multiplier, shift)
        if at < 0:
            if num_new == most_new:
                return -1 - num_new
            at = -1 - at
            table[at // width, at % width] = key[query]
            one[num_new] = query
            num_new += 1
        slot[query] = at
    return num_new


def slot_of(table: Any, key: int, multiplier: int, shift: int) -> int:
    """The slot of a key, or -1 less the one that it would take.

    table (B, W): a bucket is filled from the left, a full one passes keys on to the next.
    """
    num_buckets, width = table.shape
    bucket = home_bucket(key, multiplier, shift)
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


def home_bucket(key: int, multiplier: int, shift: int) -> int:
    """Where the search for a key begins."""
    return ((key * multiplier) & _LARGEST) >> shift
