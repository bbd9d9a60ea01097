"""Hidden rows shared between near histories: where quantised previous state and word are equal (frame-batch).

Shapes: R rows, S state width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.hashing.hash_table import HashTable

_SCALE = {"round-2": 100.0, "round-1": 10.0}
PRECISIONS = (*_SCALE, "sign")


class QuantizedHistory:
    """Finds the hidden row that a near history has already computed for a word.

    Quantised states are compared by a 64-bit hash, so that two different ones are taken for equal once in 2**64 pairs.

    Args:
        precision: "round-2" or "round-1" (decimals kept), or "sign".
        num_columns: of the state, from its beginning: those that the next step reads.
    """

    def __init__(self, precision: str, num_columns: int, device: torch.device) -> None:
        if precision not in PRECISIONS:
            choices = ", ".join(PRECISIONS)
            raise AsrError(f"history_precision: {precision!r} is not one of {choices}; choose one of these.")
        self.precision = precision
        self.device = device
        generator = torch.Generator().manual_seed(0)
        bound = 2**62
        # Odd factors: no column's bits are lost in the products, which wrap around.
        self._factor = (torch.randint(-bound, bound, (num_columns + 1,), generator=generator) * 2 + 1).to(device)
        self.clear()

    def clear(self) -> None:
        self._table = HashTable(4, self.device)

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes

    def key(self, state: Tensor, word_id: Tensor) -> Tensor:
        """Previous state (R, S) and word (R,) -> one key (R,) for all that count as equal."""
        state = state[:, : self._factor.numel() - 1]
        if self.precision == "sign":
            level = (state > 0).long()
        else:
            level = torch.round(state * _SCALE[self.precision]).long()
        mixed = (level * self._factor[:-1]).sum(1) + (word_id + 1) * self._factor[-1]
        # Table keys are not negative.
        return (mixed ^ (mixed >> 31)) & (2**63 - 1)

    def find(self, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """key (R,) -> row (R,), and the positions without one (None where all have one)."""
        slot, missing = self._table.find(key)
        return self._table.values.index_select(0, slot.clamp(min=0)), missing

    def store(self, key: Tensor, row: Tensor) -> None:
        """Distinct absent keys (D,) and their rows (D,)."""
        slot, _ = self._table.insert(key)
        self._table.values[slot] = row

    def forget(self, is_freed: Tensor) -> None:
        """Drops the keys of rows marked in is_freed (rows,)."""
        self._table.keep(~is_freed[self._table.values.clamp(max=is_freed.numel() - 1)])
