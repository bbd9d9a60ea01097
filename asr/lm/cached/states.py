"""Hidden rows of histories: storage, computation by the hidden layer, the choice of rows to compute, and counts.

`HiddenStore` stores rows in float32, float16, bfloat16 or int8. `HiddenLayer` runs the network's step on the home
device, on another device or in several workers. `HistoryExpansion` computes missing rows of histories, all of a call
together. `QueryStatistics` counts what was computed, and what the caches saved.

Shapes: R rows, S state width, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.hash_table import first_of_each
from asr.kernels.jit import arrays_of, jit_for
from asr.kernels.linear import byte_products
from asr.kernels.simd import as_float32
from asr.lm.cached.approximations import HIDDEN_DTYPES, QuantizedHistory
from asr.lm.cached.trie import HistoryTrie, RowAllocator
from asr.lm.interface import StatefulNetwork

_FIRST_ROWS = 16

NOT_PROJECTED = -(1 << 62)

# On a CPU, the system provides the pages of a large array when they are first used, so room takes no memory. Rows get
# room for this many times their number, so that they are rarely copied, and then grow by this share.
_ROOM, _GROWTH = 4, 1 / 32


class HiddenStore:
    """Rows of network states.

    int8 rows have a scale for the columns that the output layer reads and one for all others: the largest magnitude
    among them over 127. If it reads a projection instead, they have one scale.

    Args:
        state_size: S.
        output_size: how many columns, the last ones, the output layer reads; None if it reads a projection.
        dtype: one of `HIDDEN_DTYPES`.
        device: where the rows are.

    Attributes:
        state: the stored rows, (capacity, S), the beginning of an array that may be larger.
        scale: (capacity, P) float32, for int8 rows; otherwise P is 0.
        last_used: the call that last read each row, int32 (capacity,); maintained by the engine if rows are limited.
        projected: the number of each row's last projection, see `ProjectionCache`, int64 (capacity, 1); (capacity, 0)
            if there are none.
        first_output: the first column that the output layer, or its projection, reads.
    """

    def __init__(self, state_size: int, output_size: int | None, dtype: str, device: torch.device) -> None:
        self.state_size = state_size
        self.device = device
        self.dtype = HIDDEN_DTYPES[dtype]
        self.max_rows: int | None = None
        self._has_projection = output_size is None
        begin = 0 if output_size is None else state_size - output_size
        parts = (slice(0, begin), slice(begin, state_size)) if begin else (slice(0, state_size),)
        self._parts: tuple[slice, ...] = parts if self.dtype == torch.int8 else ()
        self.first_output = begin
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        state = self.state.clone()  # views are pickled apart from what they are views of
        return {**self.__dict__, "state": state, "_room": state}

    def clear(self) -> None:
        self.rows = self._allocator(_FIRST_ROWS)
        self._room = self.state = torch.empty(_FIRST_ROWS, self.state_size, dtype=self.dtype, device=self.device)
        self.last_used = torch.zeros(_FIRST_ROWS, dtype=torch.int32, device=self.device)
        self.scale = torch.empty(_FIRST_ROWS, len(self._parts), dtype=torch.float32, device=self.device)
        shape = _FIRST_ROWS, int(self._has_projection)
        self.projected = torch.full(shape, NOT_PROJECTED, dtype=torch.int64, device=self.device)

    def _allocator(self, capacity: int) -> RowAllocator:
        own_growth = {"growth": _GROWTH} if self.device.type == "cpu" else {}
        return RowAllocator(capacity, self.device, self.max_rows, **own_growth)

    @property
    def bytes_per_row(self) -> int:
        return self.state_size * self.state.element_size() + 4 * len(self._parts) + 8 * self.projected.shape[1] + 4

    @property
    def num_bytes(self) -> int:
        return self.rows.capacity * self.bytes_per_row

    def append(self, state: Tensor) -> Tensor:
        """state (R, S) float32 -> the numbers of the rows that now hold it, (R,)."""
        self.reserve(len(state))
        row = self.rows.take(len(state))
        self.write(row, state)
        return row

    def write(self, row: Tensor, state: Tensor) -> None:
        """Overwrites rows (R,) with state (R, S) float32."""
        self.projected.index_fill_(0, row, NOT_PROJECTED)
        if not self._parts:
            self.state.index_copy_(0, row, state.to(self.dtype))
            return
        loop = jit_for(store_bytes, state)
        if loop is not None:
            loop(*arrays_of(self.state, self.scale, row, state), self.first_output)
            return
        stored, scale = self._bytes(state)
        self.scale.index_copy_(0, row, scale)
        self.state.index_copy_(0, row, stored)

    def rounded(self, state: Tensor) -> Tensor:
        """State (R, S) float32 as `read` gives it back once it is stored."""
        if not self._parts:
            return state.to(self.dtype).float()
        stored, scale = self._bytes(state)
        return self._scaled(stored.float(), scale)

    def _bytes(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """State (R, S) as int8, and its scales (R, P)."""
        scale = torch.stack([state[:, part].abs().amax(1) for part in self._parts], dim=1).div_(127).clamp_(min=1e-12)
        stored = torch.empty(state.shape, dtype=torch.int8, device=state.device)
        for number, part in enumerate(self._parts):
            stored[:, part] = (state[:, part] / scale[:, number, None]).round_()
        return stored, scale

    def _scaled(self, state: Tensor, scale: Tensor, first_column: int = 0) -> Tensor:
        """State (R, S - first_column) in units of the scales (R, P), multiplied in place."""
        for number, part in enumerate(self._parts):
            if part.stop > first_column:
                state[:, part.start - first_column : part.stop - first_column].mul_(scale[:, number, None])
        return state

    def read(self, row: Tensor, first_column: int = 0) -> Tensor:
        """Rows (R,) -> their states from first_column on, (R, S - first_column) float32.

        `first_column` is 0 or the first that the output layer reads.
        """
        loop = jit_for(load_bytes, self.scale) if self._parts else None
        if loop is not None:
            state = self.scale.new_empty(len(row), self.state_size - first_column)
            loop(*arrays_of(state, self.state, self.scale, row), self.first_output)
            return state
        state = self.state[:, first_column:].index_select(0, row).float()
        return self._scaled(state, self.scale.index_select(0, row), first_column) if self._parts else state

    def limit_rows(self, max_rows: int) -> None:
        """Lets the arrays grow beyond `max_rows` only if more rows are in use."""
        self.max_rows = self.rows.limit = max_rows

    def compact(self, capacity: int) -> Tensor:
        """Compacts the rows in use, into arrays of `capacity` rows if these suffice -> their old numbers (R,)."""
        kept = self.rows.is_used().nonzero().squeeze(1)
        self.rows = self._allocator(max(capacity, kept.numel()))
        row = self.rows.take(kept.numel())
        for name in ("state", "last_used", "scale", "projected"):
            old = getattr(self, name)
            new = old.new_zeros(self.rows.capacity, *old.shape[1:])
            setattr(self, name, new.index_copy_(0, row, old.index_select(0, kept)))
        self._room = self.state
        return kept

    def reserve(self, num_new: int) -> None:
        """Makes room for `num_new` more rows."""
        capacity = self.rows.capacity_for(num_new)
        added = capacity - self.rows.capacity
        if not added:
            return
        if capacity > len(self._room):
            room = capacity * (_ROOM if self.device.type == "cpu" else 1)
            if self.max_rows is not None:
                room = max(capacity, min(room, self.max_rows))
            self._room = self.state.new_empty(room, self.state_size)
            self._room[: self.rows.capacity] = self.state
        self.state = self._room[:capacity]
        self.last_used = torch.cat((self.last_used, self.last_used.new_zeros(added)))
        self.scale = torch.cat((self.scale, self.scale.new_empty(added, len(self._parts))))
        not_yet = self.projected.new_full((added, self.projected.shape[1]), NOT_PROJECTED)
        self.projected = torch.cat((self.projected, not_yet))
        self.rows.capacity = capacity


def store_bytes(stored: Any, scale: Any, row: Any, state: Any, second: Any) -> None:
    """Writes state (R, S) to rows (R,) of stored (N, S) int8 and scale (N, P), see `HiddenStore`; for `jit`.

    `second` is where the second part of the columns begins, or 0 if there is one.
    """
    for i in range(len(row)):
        begin, last = 0, scale.shape[1] - 1
        for part in range(last + 1):
            end = state.shape[1] if part == last else second
            values, target = state[i, begin:end], stored[row[i], begin:end]
            # Of magnitudes without signs, the order is that of their bits as integers, with NaN above all.
            bits, largest = values.view(np.int32), np.int32(0)
            for j in range(len(bits)):
                largest = max(largest, np.int32(bits[j] & np.int32(0x7FFFFFFF)))
            own = as_float32(largest) / np.float32(127.0)
            own = np.float32(1e-12) if own < np.float32(1e-12) else own  # unlike max, this keeps NaN
            scale[row[i], part] = own
            for j in range(len(values)):
                target[j] = np.int8(np.int32(np.rint(values[j] / own)))
            begin = end


def load_bytes(state: Any, stored: Any, scale: Any, row: Any, second: Any) -> None:
    """Fills state (R, W) with the last W columns of what `store_bytes` has written; for `jit`."""
    width = state.shape[1]
    first = stored.shape[1] - width
    for i in range(len(row)):
        values, of_first, of_last = stored[row[i], first:], scale[row[i], 0], scale[row[i], -1]
        for j in range(width):
            state[i, j] = np.float32(values[j]) * (of_first if first + j < second else of_last)


BATCHINGS = ("frame", "query")


class _Run(NamedTuple):
    """The result of one run of a network: the next states (R, S) on the home device, and the cost of sending rows."""

    state: Tensor
    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class HiddenLayer:
    """Runs the network's step; all rows of a call are sent in one block and returned in one.

    Args:
        networks: the networks to run, each on the device of its own initial state; the rows of a call are divided among
            them. The same network twice means two workers (threads) that share it.
        home_network: on the device that rows come from and return to; computes the projections.
        batching: "frame", all rows of a call in one run, or "query", one row per run (to compare with the papers).
        products: numbers that are multiplied, float32 or int8; see `CacheOptions.hidden_products`.
        statistics: where runs, blocks and seconds are counted.
        clock: gives seconds since an arbitrary moment.
    """

    def __init__(
        self,
        networks: Sequence[StatefulNetwork],
        home_network: StatefulNetwork,
        batching: str,
        products: str,
        statistics: QueryStatistics,
        clock: Callable[[], float],
    ) -> None:
        if batching not in BATCHINGS:
            raise AsrError(f"batching: {batching!r} is not one of {', '.join(BATCHINGS)}; choose one of these.")
        self.networks = list(networks)
        self.home_network = home_network
        self.home = home = home_network.initial_state().device
        self.batching = batching
        self.are_bytes = products == "int8"
        self.statistics = statistics
        self.clock = clock
        self._devices = [network.initial_state().device for network in self.networks]
        self._workers: ThreadPoolExecutor | None = None  # if several networks have run
        is_at_home = len(self.networks) == 1 and batching == "frame" and self._devices[0] == home
        # On a GPU, the host would have to wait to find equal states.
        self.branches = is_at_home and home.type == "cpu"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": None}  # a copy starts threads of its own

    def step(self, state: Tensor, word_id: Tensor, before: Tensor | None = None) -> Tensor:
        """state (R, S), word_id (R,) on the home device -> next state (R, S) on the home device.

        With before (R,), which is accepted only if `branches`, row r follows state[before[r]], and there may be fewer
        states.
        """
        begin = self.clock()
        num_rows = word_id.numel()
        if before is not None:
            with torch.no_grad(), byte_products(self.are_bytes):
                runs = [_Run(self.networks[0].branch(state, before, word_id))]
        elif self.batching == "query":
            runs = [self._run(0, *row) for row in zip(state.split(1), word_id.split(1), strict=True)]
        elif len(self.networks) == 1 or num_rows < 2 * len(self.networks):
            runs = [self._run(0, state, word_id)]
        else:
            self._workers = self._workers or ThreadPoolExecutor(len(self.networks))
            pieces = zip(state.chunk(len(self.networks)), word_id.chunk(len(self.networks)), strict=True)
            runs = list(self._workers.map(lambda item: self._run(item[0], *item[1]), enumerate(pieces)))
        counts = self.statistics
        counts.num_hidden_rows += num_rows
        counts.num_hidden_calls += len(runs)
        for run in runs:
            counts.largest_hidden_batch = max(counts.largest_hidden_batch, len(run.state))
            counts.num_transfers += run.num_blocks
            counts.bytes_moved += run.num_bytes
            counts.seconds_transfer += run.seconds
        counts.seconds_hidden += self.clock() - begin
        return runs[0].state if len(runs) == 1 else torch.cat([run.state for run in runs])

    def project(self, state: Tensor) -> Tensor:
        """What the output layer reads of state (R, S) on the home device, (R, H)."""
        with torch.no_grad(), byte_products(self.are_bytes):
            return self.home_network.project(state)

    def _run(self, worker: int, state: Tensor, word_id: Tensor) -> _Run:
        network, device = self.networks[worker], self._devices[worker]
        with torch.no_grad(), byte_products(self.are_bytes):  # both modes are a thread's own
            if device == self.home:
                return _Run(network.step(state, word_id))
            begin = self.clock()
            block = _packed(state, word_id).to(device)
            arrived = self.clock()
            following = network.step(*_unpacked(block))
            leaves = self.clock()
            back = following.to(self.home)
            seconds = self.clock() - leaves + arrived - begin
        return _Run(back, 2, 4 * (block.numel() + back.numel()), seconds)


def _packed(state: Tensor, word_id: Tensor) -> Tensor:
    """state (R, S) float32, word_id (R,) -> one block (R, S + 1), with the words' bits in its last column."""
    return torch.cat((state, word_id.int().view(torch.float32).unsqueeze(1)), dim=1)


def _unpacked(block: Tensor) -> tuple[Tensor, Tensor]:
    return block[:, :-1], block[:, -1].contiguous().view(torch.int32).long()


# From this many rows on, it pays to look for rows that follow the same state.
_ROWS_WORTH_BRANCHES = 16


class HistoryExpansion:
    """Computes hidden rows from the nearest ancestors that have one.

    An ancestor has no row only if it was dropped because of a capacity; its state is then computed on the way, but not
    kept.
    """

    def __init__(
        self, trie: HistoryTrie, hidden: HiddenStore, layer: HiddenLayer, sharing: QuantizedHistory | None
    ) -> None:
        self.trie = trie
        self.hidden = hidden
        self.layer = layer
        self.sharing = sharing

    def lacking(self, context_idx: Tensor) -> Tensor:
        """The distinct contexts among (Q,) that have no row, (R,)."""
        is_lacking = self.trie.hidden_row.index_select(0, context_idx) < 0
        where = is_lacking.nonzero().squeeze(1)
        return torch.unique(context_idx.index_select(0, where)) if where.numel() else where

    def compute(self, node: Tensor) -> None:
        """Computes rows of distinct nodes (R,) without one; in one run of the hidden layer if all parents have one."""
        self.trie.hidden_row.index_copy_(0, node, self._rows(*self.state_before(node)).int())

    def state_before(self, node: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Arguments of `HiddenLayer.step` for nodes (R,): states (R, S), words (R,), and which state each follows."""
        parent, before = self.trie.parent.index_select(0, node).long(), None
        if self.layer.branches and self.sharing is None and node.numel() >= _ROWS_WORTH_BRANCHES:
            parent, before = torch.unique(parent, return_inverse=True)
        return self._states(parent), self.trie.word.index_select(0, node).long(), before

    def _states(self, node: Tensor) -> Tensor:
        """States (R, S) of nodes (R,); those without a row are computed level by level, the oldest first."""
        row = self.trie.hidden_row.index_select(0, node).long()
        lacking = (row < 0).nonzero().squeeze(1)
        if lacking.numel() == 0:
            return self.hidden.read(row)
        levels = [torch.unique(node.index_select(0, lacking))]
        while True:
            above = torch.unique(self.trie.parent.index_select(0, levels[-1]).long())
            above = above[self.trie.hidden_row.index_select(0, above) < 0]
            if above.numel() == 0:
                break
            levels.append(above)
        known, state = node[:0], torch.empty(0, self.hidden.state_size, device=self.hidden.device)
        for level in reversed(levels):
            before = self._with_known(self.trie.parent.index_select(0, level).long(), known, state)
            state = self.hidden.rounded(self.layer.step(before, self.trie.word.index_select(0, level).long()))
            known = level
        return self._with_known(node, known, state)

    def _with_known(self, node: Tensor, known: Tensor, known_state: Tensor) -> Tensor:
        """States (R, S) of nodes (R,) that have a row or are among the known ones (ascending)."""
        row = self.trie.hidden_row.index_select(0, node).long()
        state = self.hidden.read(row.clamp(min=0))
        lacking = (row < 0).nonzero().squeeze(1)
        if lacking.numel():
            state[lacking] = known_state[torch.searchsorted(known, node.index_select(0, lacking))]
        return state

    def _rows(self, state: Tensor, word_id: Tensor, before: Tensor | None) -> Tensor:
        """The rows (R,) with the next states; arguments as for `HiddenLayer.step`."""
        if self.sharing is None:
            return self.hidden.append(self.layer.step(state, word_id, before))
        key = self.sharing.key(state, word_id)
        row, missing = self.sharing.find(key)
        if missing is not None:
            position, which = first_of_each(key.index_select(0, missing))
            one = missing.index_select(0, position)
            new_row = self.hidden.append(self.layer.step(state.index_select(0, one), word_id.index_select(0, one)))
            self.sharing.store(key.index_select(0, one), new_row)
            row[missing] = new_row.index_select(0, which)
        self.layer.statistics.num_shared_rows += key.numel() - (0 if missing is None else one.numel())
        return row

    def replace(self, node: Tensor, context_idx: Tensor) -> Tensor:
        """Changes the parents of nodes (R,) to contexts (R,) -> the rows that were computed again."""
        row = self.trie.hidden_row.index_select(0, node).long()
        has_row = (row >= 0).nonzero().squeeze(1)
        # A node with descendants keeps its parent; otherwise there could be a cycle.
        is_parent = torch.zeros(self.trie.nodes.capacity, dtype=torch.bool, device=node.device)
        is_parent[self.trie.parent[self.trie.nodes.is_used()].long()] = True
        leaf = (~is_parent.index_select(0, node)).nonzero().squeeze(1)
        self.trie.parent[node.index_select(0, leaf)] = context_idx.index_select(0, leaf).int()
        if has_row.numel():
            word_id = self.trie.word.index_select(0, node.index_select(0, has_row)).long()
            state = self.layer.step(self._states(context_idx.index_select(0, has_row)), word_id)
            self.hidden.write(row.index_select(0, has_row), state)
        return row.index_select(0, has_row)


@dataclass
class QueryStatistics:
    """Counts since the record was created; `num_contexts`, `num_hidden_held` and `bytes_held` are current values.

    Attributes:
        num_calls, num_queries: of `score` and `final`.
        num_edge_hits: queries answered from a stored score (cache 1).
        num_edges: distinct (context, word) scored and stored.
        num_hidden_rows, num_hidden_calls, largest_hidden_batch: rows that went through the hidden layer, its number of
            runs, and the largest number of rows in one run.
        num_shared_rows: rows taken from a similar history instead (quantized history vectors).
        num_outputs, num_history_normalizers, num_group_normalizers, num_tree_decisions: what the output layer
            computed.
        num_transfers, bytes_moved: blocks sent between devices, counted in each direction.
        num_contexts, num_hidden_held, bytes_held, peak_bytes: contexts, hidden rows, and bytes of all arrays, without
            room for more hidden rows that has not been touched.
        num_evictions, num_evicted_contexts, num_dropped_rows: effects of the capacity.
        seconds_find, seconds_hidden, seconds_output, seconds_evict, seconds_transfer, seconds_total: by the engine's
            clock; on a GPU the time to launch the work, unless the clock waits for it. The time to send the hidden
            layer's rows is part of `seconds_hidden`, too; that of several workers is added up.
    """

    num_calls: int = 0
    num_queries: int = 0
    num_edge_hits: int = 0
    num_edges: int = 0
    num_hidden_rows: int = 0
    num_hidden_calls: int = 0
    largest_hidden_batch: int = 0
    num_shared_rows: int = 0
    num_outputs: int = 0
    num_history_normalizers: int = 0
    num_group_normalizers: int = 0
    num_tree_decisions: int = 0
    num_transfers: int = 0
    bytes_moved: int = 0
    num_contexts: int = 0
    num_hidden_held: int = 0
    bytes_held: int = 0
    peak_bytes: int = 0
    num_evictions: int = 0
    num_evicted_contexts: int = 0
    num_dropped_rows: int = 0
    seconds_find: float = 0.0
    seconds_hidden: float = 0.0
    seconds_output: float = 0.0
    seconds_evict: float = 0.0
    seconds_transfer: float = 0.0
    seconds_total: float = 0.0

    @property
    def edge_hit_ratio(self) -> float:
        """Share of queries answered from a stored score."""
        return self.num_edge_hits / max(self.num_queries, 1)

    @property
    def hit_ratio(self) -> float:
        """The same as if queries came one by one: repeated queries of a call count as hits (Lee et al. 2015)."""
        return 1.0 - self.num_edges / max(self.num_queries, 1)

    @property
    def answered_without_hidden(self) -> float:
        """Share of queries that needed no run of the hidden layer, assuming that each computed row is for one query."""
        return 1.0 - self.num_hidden_rows / max(self.num_queries, 1)

    @property
    def mean_hidden_batch(self) -> float:
        return self.num_hidden_rows / max(self.num_hidden_calls, 1)

    @property
    def bytes_per_context(self) -> float:
        return self.bytes_held / max(self.num_contexts, 1)

    @property
    def queries_per_s(self) -> float:
        return self.num_queries / self.seconds_total if self.seconds_total else 0.0

    def as_dict(self) -> dict[str, int | float]:
        """All counts and ratios, for a line of JSON."""
        ratios = "edge_hit_ratio hit_ratio answered_without_hidden mean_hidden_batch bytes_per_context queries_per_s"
        return {**asdict(self), **{name: getattr(self, name) for name in ratios.split()}}

    def __add__(self, other: QueryStatistics) -> QueryStatistics:
        """The sum of two engines' counts."""
        summed = QueryStatistics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})
        summed.largest_hidden_batch = max(self.largest_hidden_batch, other.largest_hidden_batch)
        return summed
