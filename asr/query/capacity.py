"""A query engine's bound on bytes: which contexts are live, and what is forgotten when room is wanted.

Shapes: Q contexts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from asr.query.eviction import cut_trunk, drop_rows, free_unused_rows, least_used, remove_nodes, with_ancestors
from asr.query.expansion import Expansion
from asr.query.hash_table import MAX_LOAD
from asr.query.normalizer_cache import NormalizerCache
from asr.query.quantized_history import QuantizedHistory
from asr.query.recombination import Recombination
from asr.query.trie import BYTES_PER_NODE

_HIDDEN_SHARE = 0.5
_FEWEST_SLOTS = 256
_FEWEST_ROWS = 16
_FIXED_BYTES = 512
"""For the first nodes and for tables that are hardly used."""


@dataclass(frozen=True)
class Limits:
    """How many edges (and nodes) and hidden rows fit into a number of bytes."""

    max_edges: int
    max_rows: int

    @classmethod
    def of(cls, capacity_bytes: int, bytes_per_row: int, extra_bytes_per_edge: int = 0) -> Limits:
        """Half of the bytes for the trie, as its table has a power of two of slots; what is left for hidden rows."""
        capacity_bytes -= _FIXED_BYTES
        bytes_per_slot = 16 + MAX_LOAD * (BYTES_PER_NODE + extra_bytes_per_edge)
        slots = _FEWEST_SLOTS
        while 2 * slots * bytes_per_slot <= capacity_bytes * (1 - _HIDDEN_SHARE):
            slots *= 2
        rows = int((capacity_bytes - slots * bytes_per_slot) / bytes_per_row)
        return cls(int(MAX_LOAD * slots), max(rows, _FEWEST_ROWS))


class Capacity:
    """Forgets dead contexts when the trie is full, and hidden rows when the store is full.

    Args:
        kept_levels: of the ancestors of live contexts, where all ancestors together would take more than half.
    """

    def __init__(
        self,
        limits: Limits,
        expansion: Expansion,
        output: NormalizerCache,
        recombination: Recombination | None,
        sharing: QuantizedHistory | None,
        kept_levels: int,
    ) -> None:
        self.limits = limits
        self.expansion = expansion
        self.output = output
        self.recombination = recombination
        self.sharing = sharing
        self.kept_levels = kept_levels
        self.counts = expansion.layer.statistics
        self.clear()

    def clear(self) -> None:
        """Every context is live again."""
        self._live: Tensor | None = None
        self._since_marked: list[Tensor] = []

    def mark_live(self, context_idx: Tensor) -> None:
        self._live = context_idx
        self._since_marked = []

    def count_uses(self, node: Tensor) -> None:
        """Nodes (Q,) that are given out: one more use of each, and live until the next mark."""
        self.expansion.trie.num_uses.index_add_(0, node, torch.ones_like(node, dtype=torch.int32))
        if self._live is not None:
            self._since_marked.append(node)

    def make_edge_room(self, num_new: int, in_use: Tensor) -> None:
        """Evicts nodes to make room for so many edges, as far as contexts (Q,) in use and live ones allow."""
        trie, most = self.expansion.trie, self.limits.max_edges
        if trie.edges.count + num_new <= most or self._live is None:
            return
        begin = time.perf_counter()
        live = torch.cat((self._live, *self._since_marked, in_use))
        is_kept = with_ancestors(trie, live)
        if int(is_kept.sum()) > most // 2:
            is_kept = cut_trunk(self.expansion, live, self.kept_levels)
        # Half at once, as an eviction goes over the whole table.
        is_evicted = least_used(trie, is_kept, max(trie.edges.count + num_new - most, trie.num_nodes - most // 2))
        remove_nodes(trie, is_evicted)
        if self.recombination is not None:
            self.recombination.forget(is_evicted)
        if self.sharing is not None:
            # Where rows are shared, normalisers are kept by node.
            self.output.forget(is_evicted)
        self._free_rows()
        self.counts.num_evictions += 1
        self.counts.num_evicted_contexts += int(is_evicted.sum())
        self.counts.seconds_evict += time.perf_counter() - begin

    def make_row_room(self, num_new: int, needed: Tensor) -> bool:
        """Whether so many more hidden rows fit, after dropping others than those of contexts (Q,) where need be."""
        rows, most = self.expansion.hidden.rows, self.limits.max_rows
        if rows.num_used + num_new > most:
            begin = time.perf_counter()
            drop_rows(self.expansion.trie, self.expansion.hidden, needed, min(most // 2, most - num_new))
            self.counts.num_dropped_rows += self._free_rows()
            self.counts.seconds_evict += time.perf_counter() - begin
        return rows.num_used + num_new <= most

    def _free_rows(self) -> int:
        is_freed = free_unused_rows(self.expansion.trie, self.expansion.hidden)
        if self.sharing is None:
            self.output.forget(is_freed)
        else:
            self.sharing.forget(is_freed)
        return int(is_freed.sum())
