"""Back-pointers of all partial paths, collected so that memory does not grow with all that the search ever tried.

Shapes: K tokens, R records.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import torch
from torch import Tensor

_FIRST_COLLECTION = 1 << 20


class Backtrace:
    """A record says which record came before it and by which arc; record -1 is the start of a stream.

    Records are appended a frame at a time, so each points to an earlier one. When the store has doubled, records that
    no living token can be traced to are dropped and the others renumbered.

    Args:
        device: where the records live.
        collects: False keeps all records and their numbers.
    """

    def __init__(self, device: torch.device, collects: bool = True) -> None:
        self._previous = torch.empty(0, dtype=torch.int64, device=device)
        self._arc = torch.empty(0, dtype=torch.int64, device=device)
        self._block_begin: list[int] = []
        self._collects = collects
        self._collect_at = _FIRST_COLLECTION
        self.num_records = 0

    def add(self, previous: Tensor, arc: Tensor) -> Tensor:
        """Appends a frame's records, previous (K,), arc (K,) -> their numbers (K,)."""
        begin = self.num_records
        self.add_blocks(previous, arc, [begin])
        return torch.arange(begin, self.num_records, device=arc.device)

    def add_blocks(self, previous: Tensor, arc: Tensor, block_begin: list[int]) -> None:
        """Appends the records of several frames, previous (K,), arc (K,); each frame's begin at these numbers."""
        begin, end = self.num_records, self.num_records + len(arc)
        if end > len(self._arc):
            room = torch.empty(max(end, 2 * len(self._arc)) - self.num_records, dtype=torch.int64, device=arc.device)
            self._previous = torch.cat([self._previous[:begin], room])
            self._arc = torch.cat([self._arc[:begin], room])
        self._previous[begin:end] = previous
        self._arc[begin:end] = arc
        self._block_begin += block_begin
        self.num_records = end

    def records(self) -> tuple[Tensor, Tensor]:
        """All records: the one before each, and the arc, (R,) each."""
        return self._previous[: self.num_records], self._arc[: self.num_records]

    @property
    def is_due(self) -> bool:
        """Whether the store has grown enough for a collection to pay."""
        return self._collects and self.num_records >= self._collect_at

    def collect(self, living: Tensor) -> Tensor:
        """Drops what no living record descends from; (K,) records -> (K,) their new numbers."""
        kept = torch.zeros(self.num_records + 1, dtype=torch.bool, device=living.device)
        kept[living] = True  # -1 marks the spare last place
        block_end = self.num_records
        for block_begin in reversed(self._block_begin):
            record = kept[block_begin:block_end].nonzero().squeeze(1) + block_begin
            kept[self._previous.index_select(0, record)] = True
            block_end = block_begin
        kept[-1] = False
        number = kept.cumsum(0) - kept.to(torch.int64)
        number[-1] = -1
        self._block_begin = sorted(set(number[self._block_begin].tolist()))
        record = kept.nonzero().squeeze(1)
        self._previous = number[self._previous.index_select(0, record)]
        self._arc = self._arc.index_select(0, record)
        self.num_records = len(record)
        self._collect_at = max(_FIRST_COLLECTION, 2 * self.num_records)
        return number[living]

    def path(self, record: int) -> Tensor:
        """The arcs that lead to a record from its stream's start, (L,) int64."""
        records = []
        previous = self._previous[: self.num_records].cpu().numpy()
        while record >= 0:
            records.append(record)
            record = int(previous[record])
        return self._arc[torch.tensor(records[::-1], dtype=torch.int64, device=self._arc.device)]

    def paths(self, record: Tensor) -> list[Tensor]:
        """The arcs that lead to each of some records (N,), (L,) int64 each, on the host."""
        if record.device.type == "cpu":
            return [self.path(int(one)) for one in record]
        return self.paths_together(record)

    def paths_together(self, record: Tensor) -> list[Tensor]:
        """The same, all traced back at once, so that a GPU hands over one table."""
        arcs = [torch.full_like(record, -1)]
        # A block holds no record and its predecessor, so that no path has more arcs than there are blocks.
        for _ in self._block_begin if self.num_records else ():
            known = record.clamp(min=0)
            arcs.append(torch.where(record < 0, record, self._arc[known]))
            record = torch.where(record < 0, record, self._previous[known])
        table = torch.stack(arcs[::-1]).cpu()
        return [column[column >= 0] for column in table.unbind(1)]

    def settle(self, living: Tensor) -> Tensor:
        """What all living paths of a stream share is decided: gives these arcs and forgets them.

        The paths then start behind it, so that a stream that never ends holds no more than what is undecided.

        Args:
            living: (K,) the records of all that is alive in one stream.

        Returns:
            (L,) int64 arcs, in order; none where paths part at once.
        """
        previous = self._previous[: self.num_records].cpu().numpy()
        front = np.unique(living.cpu().numpy())
        while len(front) > 1 and front[0] >= 0:
            # All that stands in the newest block goes a step back; a block holds no record and its predecessor.
            begin = self._block_begin[bisect_right(self._block_begin, int(front[-1])) - 1]
            first = int(np.searchsorted(front, begin))
            front = np.unique(np.concatenate([front[:first], previous[front[first:]]]))
        if len(front) != 1 or front[0] < 0:
            return self._arc[:0].clone()
        shared = int(front[0])
        arc = self.path(int(previous[shared]))
        self._previous[shared] = -1
        return arc

    def descends(self, living: Tensor, record: int, num_steps: int) -> Tensor:
        """Which paths (K,) go through the record that lies so many steps before another; all where there is none."""
        previous = self._previous[: self.num_records].cpu().numpy()
        for _ in range(num_steps):
            record = int(previous[record]) if record >= 0 else record
        current = living.cpu().numpy().copy()
        while record >= 0:
            later = current > record
            if not later.any():
                break
            current[later] = previous[current[later]]
        return torch.from_numpy((current == record) | (record < 0)).to(living.device)
