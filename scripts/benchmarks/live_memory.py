"""Bytes that a process has allocated and not freed, as the C library counts them.

Resident memory also has the gaps between them, which come and go by megabytes. Python's own small objects are counted
in a process that was started with `ALLOCATOR` in its environment, so that they are allocated one by one.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
from collections.abc import Sequence

ALLOCATOR = {"PYTHONMALLOC": "malloc"}


class _Mallinfo2(ctypes.Structure):
    """The structure of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def live_megabytes() -> float | None:
    """Megabytes allocated now, in all arenas and mappings; None if the C library cannot count them (glibc 2.33 can)."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    gc.collect()
    found = mallinfo2()
    return float(found.uordblks + found.hblkhd) / 1e6


def growth(megabytes: Sequence[float], hours: float) -> float:
    """Megabytes an hour, from the median of the first fifth of the figures to that of the last; at least 0.

    Args:
        megabytes: after each of equal pieces of work.
        hours: what one piece stands for.
    """
    num = max(1, len(megabytes) // 5)
    early, late = statistics.median(megabytes[:num]), statistics.median(megabytes[-num:])
    return max(0.0, (late - early) / (hours * max(1, len(megabytes) - num)))
