"""Language models larger than the accelerator's memory: tables stay in host memory, rows are fetched and cached.

A table has one of three placements: all of it is on the device, or an index that finds its rows, or only a cache of
rows. A batch fetches each missing row once, all in one block. The cache is direct-mapped: each key has one place, and
the newest takes it. `HostNgramLM` keeps n-grams this way, as Fukunaga et al. (2019) do; `with_host_tables` does it for
the big tables of a recurrent language model.

Shapes: Q queries, K distinct rows fetched, C cache places, W columns, S states, A arcs, V words, H hidden, M history
words, R rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asr.errors import AsrError
from asr.lm.interface import LanguageModel
from asr.lm.ngram.model import ArcFinder, NgramArrays, NgramLM, is_narrow, narrow
from asr.lm.rnn.maxent import HashedMaxEnt, hashed_places
from asr.lm.rnn.model import RNNLanguageModel
from asr.lm.rnn.outputs.nce import NceOutput
from asr.lm.rnn.outputs.softmax import FullSoftmaxOutput
from asr.text.symbols import EOS_ID, Vocabulary

_EMPTY = -1
_MULTIPLIER = -7046029254386353131  # 2**64 / golden ratio, odd


@dataclass
class CacheStatistics:
    """What was requested from a cache, and what it had to fetch.

    Attributes:
        num_queries: rows requested, with duplicates.
        num_distinct: rows requested, without duplicates within a batch.
        num_fetched: rows that were fetched from the host.
        num_bytes: bytes copied to the device.
    """

    num_queries: int = 0
    num_distinct: int = 0
    num_fetched: int = 0
    num_bytes: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of distinct rows that were already on the device."""
        return 1.0 - self.num_fetched / self.num_distinct if self.num_distinct else 0.0


class CachedRows:
    """Serves rows by key on a device.

    Args:
        read: returns the rows of distinct keys: key (K,) int64 -> (K, W), both on the host.
        num_columns: W.
        dtype: of the rows.
        num_places: C, rounded down to a power of two; 0 caches nothing.
        device: where the rows are used.
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
        """Stores rows; of several for one place exactly one is kept, with its own key."""
        self._key[place] = key
        kept = torch.nonzero(self._key.index_select(0, place).eq(key)).squeeze(1)
        self._row.index_copy_(0, place.index_select(0, kept), row.index_select(0, kept))

    def _place(self, key: Tensor) -> Tensor:
        mixed = torch.bitwise_right_shift(torch.mul(key, _MULTIPLIER), 24)
        return torch.bitwise_and(mixed, len(self._key) - 1)


Level = Literal["resident", "index", "cache"]
LEAST_PLACES = 1024


@dataclass(frozen=True)
class TablePlacement:
    """A level of placement, and the size of the cache that the budget leaves room for.

    Attributes:
        level: `resident`, everything on the device; `index`, only what finds a row; `cache`, not even that.
        num_places: size of the cache of rows; 0 where everything is resident.
    """

    level: Level
    num_places: int

    @classmethod
    def within(
        cls, device_budget: int, resident_bytes: int, index_bytes: int | None, place_bytes: int, what: str
    ) -> TablePlacement:
        """The first level that fits the budget, with as many cache places as it leaves.

        Args:
            device_budget: bytes of device memory to spend.
            resident_bytes: size of the whole table.
            index_bytes: size of the index that finds its rows; None if the table has no such placement.
            place_bytes: size of one row in the cache.
            what: what to call the table in the error message.

        Raises:
            AsrError: the budget is too small for the smallest cache.
        """
        if resident_bytes <= device_budget:
            return cls("resident", 0)
        least = LEAST_PLACES * place_bytes
        if index_bytes is not None and index_bytes + least <= device_budget:
            return cls("index", (device_budget - index_bytes) // place_bytes)
        if least > device_budget:
            raise AsrError(f"A device budget of {device_budget} bytes is too small for {what}; give {least} or more.")
        return cls("cache", device_budget // place_bytes)


_BIT = (1, 2, 4, 8, 16, 32, 64, 128)


class HostTable:
    """Rows of a table by their number, with the same bits in every placement.

    - `resident`: the table on the device.
    - `index`: (tables with `skips_zeros`) one bit per row on the device says whether the row is nonzero; only nonzero
      rows are fetched from the host, and cached.
    - `cache`: only a cache of rows on the device.

    Args:
        table: (R, W) float32 in host memory; kept, not copied.
        device: where the rows are used.
        device_budget: bytes of device memory that the table may take.
        skips_zeros: whether many rows are zero, as in a pruned table.

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
        placement = TablePlacement.within(
            device_budget, self.table_bytes, index_bytes, place_bytes, "a table of this width"
        )
        self.placement: Level = placement.level
        if self.placement == "resident":
            self._table = table.to(self._device)
            return
        if self.placement == "index":
            self._bits = _nonzero_bits(table).to(self._device)
        self._cached = CachedRows(self._read, table.shape[1], table.dtype, placement.num_places, self._device)

    @property
    def table_bytes(self) -> int:
        """Bytes of the whole table."""
        return self._table.numel() * self._table.element_size()

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the table takes."""
        if self._cached is None:
            return self.table_bytes
        return self._cached.num_bytes + (len(self._bits) if self._bits is not None else 0)

    @property
    def statistics(self) -> CacheStatistics:
        """The statistics of the cache; all zero where everything is resident."""
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
    """Word vectors in a `HostTable`, replacing an `nn.Embedding` that is no longer trained."""

    def __init__(self, table: HostTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, word_id: Tensor) -> Tensor:
        """word_id (any) -> (any, W)."""
        rows = self.table.rows(word_id.reshape(-1))
        return rows.view(*word_id.shape, rows.shape[1])


class HostMaxEnt(nn.Module):
    """n-gram features in a `HostTable` of one column, replacing a `HashedMaxEnt` that is no longer trained.

    The hashes are computed where the queries are: only weights are fetched.
    """

    def __init__(self, maxent: HashedMaxEnt, table: HostTable) -> None:
        super().__init__()
        self.order = maxent.order
        self.table_size = maxent.table_size
        self.table = table

    def score(self, history: Tensor, word_id: Tensor) -> Tensor:
        """history (Q, M), word_id (Q,) -> sum of the features' weights, (Q,)."""
        return self._take(hashed_places(history, self.order, self.table_size) + word_id[:, None])

    def score_each(self, history: Tensor, word_id: Tensor) -> Tensor:
        """history (Q, M), word_id (K,) -> (Q, K): every word after every history."""
        return self._take(hashed_places(history, self.order, self.table_size)[:, :, None] + word_id)

    def _take(self, slots: Tensor) -> Tensor:
        return self.table.rows(slots.reshape(-1)).view_as(slots).sum(dim=1)


def _nonzero_bits(table: Tensor) -> Tensor:
    """Bit i % 8 of byte i // 8 says whether row i is nonzero, (ceil(R / 8),) uint8."""
    is_nonzero = torch.any(table != 0, dim=1).to(torch.uint8)
    padded = nn.functional.pad(is_nonzero, (0, -len(is_nonzero) % 8)).view(-1, 8)
    return (padded * torch.tensor(_BIT, dtype=torch.uint8)).sum(dim=1, dtype=torch.uint8)


_COLUMNS = 2


class HostNgramLM(LanguageModel):
    """An n-gram model whose scores equal those of `NgramLM` bit for bit, within a budget of device memory.

    Three placements, the first that fits the budget:

    - `resident`: all arrays on the device.
    - `index`: labels (in 16 bits if the vocabulary is small enough), first arcs and backoff states on the device, so
      that arcs are found there; scores, destinations and backoff weights in host memory, fetched once per batch for
      each distinct arc and state backed off from. The rest of the budget is a cache of them.
    - `cache`: only a cache of results on the device; all other queries are looked up on the host, labels included.

    Args:
        lm: the model in host memory; of a memory-mapped one only the pages that queries need are read.
        device: where queries come from and results go.
        device_budget: bytes of device memory that the model may take.

    Attributes:
        device_bytes: those that it takes.

    Raises:
        AsrError: the budget is too small for the smallest cache.
    """

    def __init__(self, lm: NgramLM, device: torch.device | str, device_budget: int) -> None:
        self._host = lm
        self._device = torch.device(device)
        self._rows: CachedRows | None = None
        self._resident: NgramLM | None = None
        self._finder: ArcFinder | None = None
        total_bytes, index_bytes = sum(lm.arrays.num_bytes().values()), bytes_to_find_arcs(lm)
        place_bytes = CachedRows.place_bytes(_COLUMNS, torch.int32)
        placement = TablePlacement.within(device_budget, total_bytes, index_bytes, place_bytes, "an n-gram model")
        self.placement: Level = placement.level
        if self.placement == "resident":
            self._resident = lm.to(self._device)
            self.device_bytes = total_bytes
            return
        if self.placement == "index":
            self._finder = ArcFinder(_what_finds_arcs(lm).to(self._device))
        read = self._read_arcs if self.placement == "index" else self._read_answers
        self._rows = CachedRows(read, _COLUMNS, torch.int32, placement.num_places, self._device)
        self.device_bytes = self._rows.num_bytes + (index_bytes if self._finder is not None else 0)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._host.vocabulary

    @property
    def statistics(self) -> CacheStatistics:
        """The statistics of the cache; all zero where everything is resident."""
        return self._rows.statistics if self._rows is not None else CacheStatistics()

    def start(self, num_streams: int) -> Tensor:
        return self._host.start(num_streams).to(self._device)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        if self._resident is not None:
            return self._resident.score(context_idx, word_id)
        assert self._rows is not None
        if self._finder is None:
            row = self._rows.rows(torch.add(word_id, context_idx, alpha=len(self.vocabulary)))
            return _score_of(row), row[:, 1].to(torch.int64)
        arc_idx, passed = self._finder.follow(context_idx, word_id)
        keys = [arc_idx, *(torch.add(state, self._host.num_arcs) for _, state in passed)]
        rows = self._rows.rows(torch.cat(keys)).split([len(key) for key in keys])
        backoff = torch.zeros(len(word_id), dtype=torch.float32, device=self._device)
        for (query, _), row in zip(passed, rows[1:], strict=True):
            backoff.index_add_(0, query, _score_of(row))
        return backoff + _score_of(rows[0]), rows[0][:, 1].to(torch.int64)

    def final(self, context_idx: Tensor) -> Tensor:
        return self.score(context_idx, torch.full_like(context_idx, EOS_ID))[0]

    def _read_arcs(self, key: Tensor) -> Tensor:
        """Scores (as bits) and destinations of arcs; backoff weights of states, whose keys follow the arcs'; (K, 2)."""
        arrays, num_arcs = self._host.arrays, self._host.num_arcs
        row = torch.zeros((len(key), _COLUMNS), dtype=torch.int32)
        is_arc = key.lt(num_arcs)
        arc_idx, state = key[is_arc], key[is_arc.logical_not()].sub_(num_arcs)
        row[is_arc] = torch.stack(
            [arrays.arc_score(arc_idx).view(torch.int32), arrays.dst_state.index_select(0, arc_idx)], dim=1
        )
        row[is_arc.logical_not(), 0] = arrays.backoff_score.index_select(0, state).view(torch.int32)
        return row

    def _read_answers(self, key: Tensor) -> Tensor:
        """Scores (as bits) and next states of packed (state, word) pairs, (K, 2) int32."""
        state = torch.div(key, len(self.vocabulary), rounding_mode="floor")
        score, next_state = self._host.score(state, torch.sub(key, state, alpha=len(self.vocabulary)))
        return torch.stack([score.view(torch.int32), next_state.to(torch.int32)], dim=1)


def bytes_to_find_arcs(lm: NgramLM) -> int:
    """Bytes of device memory that the placement `index` takes besides its cache."""
    sizes = lm.arrays.num_bytes()
    label_bytes = 2 * lm.num_arcs if is_narrow(len(lm.vocabulary)) else sizes["label"]
    return label_bytes + sizes["arc_begin"] + sizes["backoff_state"] + sizes["word_map"]


def _what_finds_arcs(lm: NgramLM) -> NgramArrays:
    """Only the arrays that finding an arc needs; the others stay on the host."""
    nothing = torch.zeros(0, dtype=torch.float32)
    label = narrow(lm.arrays.label) if is_narrow(len(lm.vocabulary)) else lm.arrays.label
    return replace(
        lm.arrays, label=label, score=nothing, dst_state=nothing, backoff_score=nothing, score_level=nothing, index=None
    )


def _score_of(row: Tensor) -> Tensor:
    """(Q, 2) int32 -> the scores whose bits are in the first column, (Q,) float32."""
    return row[:, 0].contiguous().view(torch.float32)


def table_bytes(network: RNNLanguageModel) -> int:
    """Bytes of the tables that `with_host_tables` can leave in host memory."""
    return sum(_num_bytes(module) for module in _big_modules(network).values())


def with_host_tables(
    network: RNNLanguageModel, device: torch.device | str, device_budget: int
) -> tuple[RNNLanguageModel, dict[str, HostTable]]:
    """A copy of a network on a device, for scoring; its scores equal the original's except for rounding.

    Word vectors have priority, since one of them is as large as hundreds of MaxEnt weights. They are resident if the
    budget allows it; otherwise their cache gets the share of the budget that they have in the size of all tables.

    Args:
        network: in host memory; it keeps its weights, and the copy shares its tables.
        device: where the copy runs.
        device_budget: bytes of device memory that the tables may take; the rest of the network is small.

    Returns:
        the network, and its tables by name (`words`, or `output` and `input`, and `maxent`).

    Raises:
        AsrError: the budget is too small, or the scores are sums over the whole vocabulary.
    """
    output = network.output
    if isinstance(output, FullSoftmaxOutput) or (isinstance(output, NceOutput) and output.normalized):
        raise AsrError(
            "A language model normalized over the whole vocabulary reads all its word vectors for each history; give "
            "no device budget, or use an NCE, class or hierarchical output."
        )
    modules = _big_modules(network)
    least_left = sum(_least_bytes(module) for module in modules.values())
    if device_budget < least_left:
        raise AsrError(
            f"A device budget of {device_budget} bytes is too small for the tables of a recurrent language model; "
            f"give {least_left} or more."
        )
    tables: dict[str, HostTable] = {}
    put_in: dict[int, Any] = {id(network.vocabulary): network.vocabulary}
    left, bytes_left = device_budget, table_bytes(network)
    for name, module in modules.items():
        least_left -= _least_bytes(module)
        share = left - least_left
        if _num_bytes(module) > share:
            share = min(share, max(_least_bytes(module), left * _num_bytes(module) // bytes_left))
        is_features = isinstance(module, HashedMaxEnt)
        table = HostTable(_table(module), device, share, skips_zeros=is_features)
        put_in[id(module)] = HostMaxEnt(module, table) if isinstance(module, HashedMaxEnt) else HostEmbedding(table)
        tables[name] = table
        left -= table.device_bytes
        bytes_left -= _num_bytes(module)
    return copy.deepcopy(network, put_in).to(device), tables


def _big_modules(network: RNNLanguageModel) -> dict[str, nn.Embedding | HashedMaxEnt]:
    """The modules with a table, each once, word vectors first."""
    modules: dict[str, nn.Embedding | HashedMaxEnt] = {"words": network.embedding}
    if network.output.rows is not network.embedding:
        modules = {"output": network.output.rows, "input": network.embedding}
    if network.maxent is not None:
        modules["maxent"] = network.maxent
    return modules


def _table(module: nn.Embedding | HashedMaxEnt) -> Tensor:
    """(R, W), memory shared with the module."""
    weight = module.weight.detach()
    return weight if weight.dim() == 2 else weight[:, None]


def _num_bytes(module: nn.Embedding | HashedMaxEnt) -> int:
    return module.weight.numel() * module.weight.element_size()


def _least_bytes(module: nn.Embedding | HashedMaxEnt) -> int:
    """Bytes of the smallest placement: a cache, or the whole table if that is smaller."""
    cache = LEAST_PLACES * CachedRows.place_bytes(_table(module).shape[1], module.weight.dtype)
    return min(cache, _num_bytes(module))
