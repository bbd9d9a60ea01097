"""A table of the recurrent language model larger than it may be on the accelerator, in one of three placements.

Shapes: Q queries, H hidden, M history words, R rows, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.lm.cached_rows import CachedRows, CacheStatistics
from asr.lm.placement import Level, Placement
from asr.lm.rnn.maxent import HashedMaxEnt, hashed_places

_BIT = (1, 2, 4, 8, 16, 32, 64, 128)


class HostTable:
    """Rows of a table by their number, the same bits wherever they lie.

    - `resident`: the table on the device.
    - `index`: (tables with `skips_zeros`) a bit a row on the device says whether it is other than zero; only such rows
      are fetched from the host, and cached.
    - `cache`: only a cache of rows on the device.

    Args:
        table: (R, W) float32 in host memory; kept, not copied.
        device: where rows are wanted.
        device_budget: bytes of device memory that the table may take.
        skips_zeros: whether many rows are zero, as a pruned table's.

    Raises:
        AsrError: the budget is too small for the smallest cache.
    """

    def __init__(self, table: Tensor, device: torch.device | str, device_budget: int, skips_zeros: bool) -> None:
        self._table = table
        self._device = torch.device(device)
        self._bits: Tensor | None = None
        self._cached: CachedRows | None = None
        index_bytes = -(-len(table) // 8) if skips_zeros else None
        place_bytes = CachedRows.place_bytes(table.shape[1], table.dtype)
        placement = Placement.within(device_budget, self.table_bytes, index_bytes, place_bytes, "a table of this width")
        self.placement: Level = placement.level
        if self.placement == "resident":
            self._table = table.to(self._device)
            return
        if self.placement == "index":
            self._bits = _nonzero_bits(table).to(self._device)
        self._cached = CachedRows(self._read, table.shape[1], table.dtype, placement.num_places, self._device)

    @property
    def table_bytes(self) -> int:
        """The size of the whole table."""
        return self._table.numel() * self._table.element_size()

    @property
    def device_bytes(self) -> int:
        """Device memory that the table takes."""
        if self._cached is None:
            return self.table_bytes
        return self._cached.num_bytes + (len(self._bits) if self._bits is not None else 0)

    @property
    def statistics(self) -> CacheStatistics:
        """What the cache has been asked; all zero where everything is resident."""
        return self._cached.statistics if self._cached is not None else CacheStatistics()

    def rows(self, row_idx: Tensor) -> Tensor:
        """row_idx (Q,) on the device -> (Q, W) on the device."""
        if self._cached is None:
            return self._table.index_select(0, row_idx)
        if self._bits is None:
            return self._cached.rows(row_idx)
        byte = self._bits.index_select(0, torch.bitwise_right_shift(row_idx, 3)).to(torch.int64)
        bit = torch.bitwise_and(torch.bitwise_right_shift(byte, torch.bitwise_and(row_idx, 7)), 1)
        stored = torch.nonzero(bit).squeeze(1)
        rows = torch.zeros((len(row_idx), self._table.shape[1]), dtype=self._table.dtype, device=self._device)
        return rows.index_copy_(0, stored, self._cached.rows(row_idx.index_select(0, stored)))

    def _read(self, row_idx: Tensor) -> Tensor:
        return self._table.index_select(0, row_idx)


class HostEmbedding(nn.Module):
    """Word vectors in a `HostTable`, in the place of an `nn.Embedding` that is not trained any more."""

    def __init__(self, table: HostTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, word_id: Tensor) -> Tensor:
        """word_id (any) -> (any, W)."""
        rows = self.table.rows(word_id.reshape(-1))
        return rows.view(*word_id.shape, rows.shape[1])


class HostMaxEnt(nn.Module):
    """n-gram features in a `HostTable` of one column, in the place of a `HashedMaxEnt` that is not trained any more.

    The hashes are computed where the queries are: only weights are fetched.
    """

    def __init__(self, maxent: HashedMaxEnt, table: HostTable) -> None:
        super().__init__()
        self.order = maxent.order
        self.table_size = maxent.table_size
        self.table = table

    def score(self, history: Tensor, word_id: Tensor) -> Tensor:
        """history (Q, M), word_id (Q,) -> sum of the features' weights, (Q,)."""
        return self._take(self._places(history) + word_id[:, None])

    def score_each(self, history: Tensor, word_id: Tensor) -> Tensor:
        """history (Q, M), word_id (K,) -> (Q, K): every word after every history."""
        return self._take(self._places(history)[:, :, None] + word_id)

    def _places(self, history: Tensor) -> Tensor:
        return hashed_places(history, self.order, self.table_size)

    def _take(self, slots: Tensor) -> Tensor:
        return self.table.rows(slots.reshape(-1)).view_as(slots).sum(dim=1)


def _nonzero_bits(table: Tensor) -> Tensor:
    """Bit i % 8 of byte i // 8 says whether row i is other than zero, (ceil(R / 8),) uint8."""
    is_nonzero = torch.any(table != 0, dim=1).to(torch.uint8)
    padded = nn.functional.pad(is_nonzero, (0, -len(is_nonzero) % 8)).view(-1, 8)
    return (padded * torch.tensor(_BIT, dtype=torch.uint8)).sum(dim=1, dtype=torch.uint8)
