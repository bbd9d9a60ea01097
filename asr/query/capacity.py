"""A query engine's bound on bytes: which contexts are live, and what is forgotten when room is wanted.

The bound holds as long as the contexts that the search holds, their nearest ancestors and those that a call asks for
fit into it by themselves, with a few hidden rows: these are never forgotten. What more they need is taken from the
hidden rows first. The working memory of a call comes on top.

Shapes: Q contexts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.query.eviction import (
    compact_rows,
    drop_rows,
    free_unused_rows,
    least_used,
    remove_nodes,
    trunk_ends,
    with_ancestors,
)
from asr.query.expansion import Expansion
from asr.query.limits import ByteCosts, Limits
from asr.query.output_cache import OutputCache
from asr.query.quantized_history import QuantizedHistory
from asr.query.recombination import Recombination
from asr.query.trie import START


class Capacity:
    """Forgets dead contexts when the trie is full, and hidden rows when the store is full.

    Args:
        capacity_bytes: the bound.
        costs: what the arrays of this engine take.
        kept_levels: so many generations of the ancestors of live contexts stay; the state of the eldest is kept, so
            that what a stream needs does not grow with its length.
    """

    def __init__(
        self,
        capacity_bytes: int,
        costs: ByteCosts,
        expansion: Expansion,
        output: OutputCache,
        recombination: Recombination | None,
        sharing: QuantizedHistory | None,
        kept_levels: int,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.costs = costs
        self.expansion = expansion
        self.output = output
        self.recombination = recombination
        self.sharing = sharing
        self.kept_levels = kept_levels
        self.counts = expansion.layer.statistics
        self.clock = expansion.layer.clock
        self.clear()

    def clear(self) -> None:
        """Every context is live again."""
        self._live: Tensor | None = None
        self._marked_at = 0
        self._is_tight = False
        self._set(Limits.within(self.capacity_bytes, self.costs))

    def mark_live(self, context_idx: Tensor) -> None:
        """Live are contexts (Q,) and those that are given out from now on."""
        trie = self.expansion.trie
        trie.call += 1
        self._marked_at = trie.call
        self._live = context_idx

    def count_uses(self, node: Tensor) -> None:
        """Nodes (Q,) that are given out: one more use of each, and live until the next mark."""
        trie = self.expansion.trie
        trie.num_uses.index_add_(0, node, torch.ones_like(node, dtype=torch.int32))
        trie.last_given.index_fill_(0, node, trie.call)

    def has_room(self, num_new: int) -> bool:
        """Whether so many more edges fit, and nothing has ever been forgotten or had no room."""
        return not self._is_tight and self._num_held() + num_new <= self.limits.max_edges

    def has_row_room(self, num_new: int) -> bool:
        """Whether so many more hidden rows fit without others being dropped; where they do not, it is remembered."""
        self._is_tight |= self.expansion.hidden.rows.num_used + num_new > self.limits.max_rows
        return not self._is_tight

    def make_edge_room(self, key: Tensor, missing: Tensor) -> None:
        """Evicts nodes to make room for the edges of key (Q,) at the positions missing (R,), as far as need be."""
        trie = self.expansion.trie
        if self._num_held() + missing.numel() <= self.limits.max_edges:
            return
        num_new = torch.unique(key.index_select(0, missing)).numel()
        if self._num_held() + num_new <= self.limits.max_edges:
            return
        self._is_tight = True
        if self._live is None:
            self._fit(trie.edges.count + num_new, trie.num_nodes + num_new)
            return
        begin = self.clock.now()
        found = trie.edge_node.index_select(0, trie.edges.find(key)[0].clamp_(min=0)).long()
        is_given = (trie.last_given >= self._marked_at) & trie.nodes.is_used()
        live = torch.cat((self._live, is_given.nonzero().squeeze(1), key >> 32, found))
        self._evict(live, num_new)
        if trie.edges.count + num_new > self.limits.max_edges:
            # Where several edges lead to a node, scores of old edges are forgotten, too.
            slot, _ = trie.edges.find(key)
            is_gone = torch.ones(trie.edges.num_slots, dtype=torch.bool, device=trie.device)
            is_gone[slot[slot >= 0]] = False
            trie.remove_edges(is_gone)
        self.counts.seconds_evict += self.clock.now() - begin

    def _num_held(self) -> int:
        """Edges or nodes but the first two, whichever are more: several edges may lead to a node, or none."""
        trie = self.expansion.trie
        return max(trie.edges.count, trie.num_nodes - START - 1)

    def _evict(self, live: Tensor, num_new: int) -> None:
        """Forgets enough of what is neither live nor close above what is, for so many new nodes."""
        trie = self.expansion.trie
        is_kept = with_ancestors(trie, live, self.kept_levels)
        self._pin(trunk_ends(trie, is_kept))
        num_needed = int(is_kept.sum()) + num_new
        most = Limits.within(self.capacity_bytes, self.costs, num_needed, num_needed).max_edges
        # Half at once, as an eviction goes over the whole table.
        num_most = max(self._num_held() + num_new - most, trie.num_nodes - most // 2)
        is_evicted = least_used(trie, is_kept, num_most)
        remove_nodes(trie, is_evicted)
        if self._num_held() + num_new > most:
            # Some had no edge of their own, where the trunk above them was cut.
            others = trie.nodes.is_used() & ~is_kept
            remove_nodes(trie, others)
            is_evicted |= others
        if self.recombination is not None:
            self.recombination.forget(is_evicted)
        if self.sharing is not None:
            # Where rows are shared, normalisers are kept by node.
            self.output.forget(is_evicted)
        self._free_rows()
        self._fit(num_needed, trie.num_nodes + num_new)
        self.counts.num_evictions += 1
        self.counts.num_evicted_contexts += int(is_evicted.sum())

    def _pin(self, node: Tensor) -> None:
        """Makes nodes (R,) their own parents: their rows are computed and stay, like the initial state's."""
        lacking = self.expansion.lacking(node)
        if lacking.numel():
            self.make_row_room(lacking.numel(), node)
            self.expansion.compute(lacking)
        self.expansion.trie.parent[node] = node.int()

    def make_row_room(self, num_new: int, needed: Tensor) -> bool:
        """Whether so many more hidden rows fit, after dropping others than those of contexts (Q,) where need be."""
        rows, most = self.expansion.hidden.rows, self.limits.max_rows
        if rows.num_used + num_new > most:
            self._is_tight = True
            begin = self.clock.now()
            drop_rows(self.expansion.trie, self.expansion.hidden, needed, min(most // 2, most - num_new))
            self.counts.num_dropped_rows += self._free_rows()
            self.counts.seconds_evict += self.clock.now() - begin
        return rows.num_used + num_new <= most

    def _free_rows(self) -> int:
        is_freed = free_unused_rows(self.expansion.trie, self.expansion.hidden)
        if self.sharing is None:
            self.output.forget(is_freed)
        else:
            self.sharing.forget(is_freed)
        return int(is_freed.sum())

    def _fit(self, num_edges: int, num_nodes: int) -> None:
        """Divides the bytes anew so that there is room for so many edges and nodes."""
        trie, hidden = self.expansion.trie, self.expansion.hidden
        limits = Limits.within(self.capacity_bytes, self.costs, num_edges, num_nodes)
        if trie.nodes.capacity > limits.max_nodes:
            # Contexts that are held keep their numbers, so that only what lies above all of them can go.
            trie.trim_nodes(limits.max_nodes)
            limits = Limits.within(self.capacity_bytes, self.costs, num_edges, max(num_nodes, trie.nodes.capacity))
        self._set(limits)
        if trie.edges.num_slots > limits.num_slots:
            trie.shrink_edges(limits.num_slots)
        if hidden.rows.capacity > limits.max_rows:
            nothing = torch.empty(0, dtype=torch.int64, device=trie.device)
            drop_rows(trie, hidden, nothing, limits.max_rows)
            self.counts.num_dropped_rows += self._free_rows()
            compact_rows(trie, hidden, limits.max_rows)
            # Both are kept by the rows' old numbers.
            if self.sharing is None:
                self.output.clear()
            else:
                self.sharing.clear()

    def _set(self, limits: Limits) -> None:
        self.limits = limits
        self.expansion.trie.limit_nodes(limits.max_nodes)
        self.expansion.hidden.limit_rows(limits.max_rows)
        self.output.limit_groups(limits.max_rows)
