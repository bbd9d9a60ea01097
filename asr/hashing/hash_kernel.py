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
    """Fills slot (Q,), -1 where absent, and missing (Q,) from its beginning -> how many keys (Q,) are absent.

    table (B, W): a bucket is filled from the left, a full one passes keys on to the next.
    """
    num_buckets, width = table.shape
    num_missing = 0
    for query in range(len(key)):
        wanted = key[query]
        bucket = ((wanted * multiplier) & _LARGEST) >> shift
        place = 0
        while True:
            held = table[bucket, place]
            if held == wanted:
                slot[query] = bucket * width + place
                break
            if held < 0:
                slot[query] = -1
                missing[num_missing] = query
                num_missing += 1
                break
            place += 1
            if place == width:
                place = 0
                bucket = (bucket + 1) & (num_buckets - 1)
    return num_missing


def insert_keys(
    table: Any, key: Any, multiplier: int, shift: int, slot: Any, one: Any, num_new: int, most_new: int
) -> int:
    """Puts in keys (Q,), duplicates allowed -> how many have been new, or -1 less that where `most_new` has stopped it.

    Fills slot (Q,), and one (Q,) from `num_new` on with the position of each new key's first query. Begun anew in a
    larger table with what it has returned, it goes on where it stopped.
    """
    num_buckets, width = table.shape
    for query in range(len(key)):
        wanted = key[query]
        bucket = ((wanted * multiplier) & _LARGEST) >> shift
        place = 0
        while True:
            held = table[bucket, place]
            if held == wanted:
                break
            if held < 0:
                if num_new == most_new:
                    return -1 - num_new
                table[bucket, place] = wanted
                one[num_new] = query
                num_new += 1
                break
            place += 1
            if place == width:
                place = 0
                bucket = (bucket + 1) & (num_buckets - 1)
        slot[query] = bucket * width + place
    return num_new
