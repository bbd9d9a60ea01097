"""Hidden state rows, kept in float32, float16, bfloat16 or int8 and read back as float32.

Shapes: R rows, S state width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.query.row_allocator import RowAllocator

HIDDEN_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
_FIRST_ROWS = 16


class HiddenStore:
    """Rows of network states. int8 rows have one scale each, their largest magnitude over 127.

    Attributes:
        state: the rows as they are kept, (capacity, S).
        last_used: the call that last read each row, int32 (capacity,); the engine's, where rows are limited.
    """

    def __init__(self, state_size: int, dtype: str, device: torch.device, max_rows: int | None = None) -> None:
        if dtype not in HIDDEN_DTYPES:
            raise AsrError(f"hidden_dtype: {dtype!r} is not one of {', '.join(HIDDEN_DTYPES)}; choose one of these.")
        self.state_size = state_size
        self.device = device
        self.dtype = HIDDEN_DTYPES[dtype]
        self.max_rows = max_rows
        self.clear()

    def clear(self) -> None:
        self.rows = RowAllocator(_FIRST_ROWS, self.device, self.max_rows)
        self.state = torch.empty(_FIRST_ROWS, self.state_size, dtype=self.dtype, device=self.device)
        self.last_used = torch.zeros(_FIRST_ROWS, dtype=torch.int32, device=self.device)
        self._scale = torch.empty(_FIRST_ROWS if self.dtype == torch.int8 else 0, device=self.device)

    @property
    def bytes_per_row(self) -> int:
        return self.state_size * self.state.element_size() + (8 if self.dtype == torch.int8 else 4)

    @property
    def num_bytes(self) -> int:
        return self.rows.capacity * self.bytes_per_row

    def append(self, state: Tensor) -> Tensor:
        """state (R, S) float32 -> the numbers of the rows that now hold it, (R,)."""
        num = state.shape[0]
        if num > self.rows.num_free:
            self.reserve(num)
        row = self.rows.take(num)
        self.write(row, state)
        return row

    def write(self, row: Tensor, state: Tensor) -> None:
        """Overwrites rows (R,) with state (R, S) float32."""
        if self.dtype == torch.int8:
            scale = state.abs().amax(dim=1).div_(127).clamp_(min=1e-12)
            self._scale[row] = scale
            state = torch.round(state / scale.unsqueeze(1))
        self.state.index_copy_(0, row, state.to(self.dtype))

    def read(self, row: Tensor, first_column: int = 0) -> Tensor:
        """Rows (R,) -> their states from first_column on, (R, S - first_column) float32."""
        state = self.state[:, first_column:].index_select(0, row).float()
        return state.mul_(self._scale.index_select(0, row).unsqueeze(1)) if self.dtype == torch.int8 else state

    def limit_rows(self, max_rows: int) -> None:
        """Where more than so many rows are not in use, the arrays grow no further."""
        self.max_rows = self.rows.limit = max_rows

    def compact(self, capacity: int) -> Tensor:
        """Moves the rows in use together, into arrays of so many rows if these suffice: their old numbers (R,)."""
        kept = self.rows.is_used().nonzero().squeeze(1)
        self.rows = RowAllocator(max(capacity, kept.numel()), self.device, self.max_rows)
        row = self.rows.take(kept.numel())
        for name in ("state", "last_used", "_scale"):
            old = getattr(self, name)
            if old.shape[0]:
                new = old.new_zeros(self.rows.capacity, *old.shape[1:])
                setattr(self, name, new.index_copy_(0, row, old.index_select(0, kept)))
        return kept

    def reserve(self, num_new: int) -> None:
        """Makes room for so many more rows."""
        capacity = self.rows.capacity_for(num_new)
        added = capacity - self.rows.capacity
        # Memory is touched where it is filled: a large array's pages come from the system then, not before.
        state = self.state.new_empty(capacity, self.state_size)
        state[: self.rows.capacity] = self.state
        self.state = state
        self.last_used = torch.cat((self.last_used, self.last_used.new_zeros(added)))
        if self.dtype == torch.int8:
            self._scale = torch.cat((self._scale, self._scale.new_empty(added)))
        self.rows.capacity = capacity
