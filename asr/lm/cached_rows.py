"""Rows of a table too large for the accelerator: kept in host memory, fetched by the batch, cached on the device.

A batch asks for each row once however often it is wanted, and what is missing comes in one block. The cache is
direct-mapped: a key has one place, and the newcomer overwrites (host n-gram paper, section 2.3).

Shapes: Q queries, K distinct rows fetched, C cache places, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_EMPTY = -1
_MULTIPLIER = -7046029254386353131  # 2**64 / golden ratio, odd


@dataclass
class CacheStatistics:
    """What a cache has been asked and what it had to fetch.

    Attributes:
        num_queries: rows asked for, with duplicates.
        num_distinct: rows asked for, each batch's duplicates left out.
        num_fetched: rows that had to come from the host.
        num_bytes: how much was copied to the device.
    """

    num_queries: int = 0
    num_distinct: int = 0
    num_fetched: int = 0
    num_bytes: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of distinct rows that the device held already."""
        return 1.0 - self.num_fetched / self.num_distinct if self.num_distinct else 0.0


class CachedRows:
    """Serves rows by key on a device.

    Args:
        read: gives the rows of distinct keys, host tensors both: key (K,) int64 -> (K, W).
        num_columns: W.
        dtype: of the rows.
        num_places: C, rounded down to a power of two; 0 caches nothing.
        device: where rows are wanted.
    """

    def __init__(
        self,
        read: Callable[[Tensor], Tensor],
        num_columns: int,
        dtype: torch.dtype,
        num_places: int,
        device: torch.device | str,
    ) -> None:
        self._read = read
        self._device = torch.device(device)
        num_places = 1 << (num_places.bit_length() - 1) if num_places else 0
        self._key = torch.full((num_places,), _EMPTY, dtype=torch.int64, device=device)
        self._row = torch.zeros((num_places, num_columns), dtype=dtype, device=device)
        self.statistics = CacheStatistics()

    @staticmethod
    def place_bytes(num_columns: int, dtype: torch.dtype) -> int:
        """Device bytes of one cache place: the key and the row."""
        return 8 + num_columns * torch.zeros(0, dtype=dtype).element_size()

    @property
    def num_bytes(self) -> int:
        """Device bytes of the whole cache."""
        return 8 * len(self._key) + self._row.numel() * self._row.element_size()

    def rows(self, key: Tensor) -> Tensor:
        """key (Q,) int64, not negative, on the device -> rows (Q, W) on the device."""
        distinct, inverse = torch.unique(key, return_inverse=True)
        self.statistics.num_queries += len(key)
        self.statistics.num_distinct += len(distinct)
        if not len(self._key):
            return self._fetch(distinct).index_select(0, inverse)
        place = self._place(distinct)
        row = self._row.index_select(0, place)
        missing = torch.nonzero(self._key.index_select(0, place).ne(distinct)).squeeze(1)
        if len(missing):
            wanted = distinct.index_select(0, missing)
            fetched = self._fetch(wanted)
            row.index_copy_(0, missing, fetched)
            self._keep(place.index_select(0, missing), wanted, fetched)
        return row.index_select(0, inverse)

    def _fetch(self, key: Tensor) -> Tensor:
        rows = self._read(key.to("cpu"))
        self.statistics.num_fetched += len(rows)
        self.statistics.num_bytes += rows.numel() * rows.element_size()
        if self._device.type == "cuda":
            rows = rows.pin_memory()
        return rows.to(self._device, non_blocking=True)

    def _keep(self, place: Tensor, key: Tensor, row: Tensor) -> None:
        """Stores rows; of several for one place exactly one is kept, key and row alike."""
        self._key[place] = key
        kept = torch.nonzero(self._key.index_select(0, place).eq(key)).squeeze(1)
        self._row.index_copy_(0, place.index_select(0, kept), row.index_select(0, kept))

    def _place(self, key: Tensor) -> Tensor:
        mixed = torch.bitwise_right_shift(torch.mul(key, _MULTIPLIER), 24)
        return torch.bitwise_and(mixed, len(self._key) - 1)
