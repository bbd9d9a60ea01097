"""A bound on the memory of a cached language model: what is forgotten when room is needed.

Nodes are evicted from the leaves up, the least used first; live contexts and their nearest ancestors are never evicted.
Hidden rows are dropped least recently used first; a row that is needed again is computed again, from rows that are
rounded as stored ones are. `CacheOptions.capacity_bytes` says when scores can differ.

The bound holds as long as the contexts of the search, their nearest ancestors, the contexts of a call and a few hidden
rows fit into it, because these are never forgotten. If they need more, hidden rows are dropped first. The working
memory of a call is not included.

Shapes: Q contexts, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asr.kernels.hash_table import MAX_LOAD, segment_max
from asr.lm.cached.approximations import QuantizedHistory, Recombination
from asr.lm.cached.outputs import OutputCache
from asr.lm.cached.states import HiddenStore, HistoryExpansion
from asr.lm.cached.trie import BEFORE_START, START, HistoryTrie


def with_ancestors(trie: HistoryTrie, live: Tensor, num_levels: int) -> Tensor:
    """A mask of nodes (capacity,): the first two, the live ones (Q,), and `num_levels` levels of their ancestors."""
    is_kept = torch.zeros(trie.nodes.capacity, dtype=torch.bool, device=trie.device)
    is_kept[: START + 1] = True
    is_kept[live] = True
    frontier = torch.unique(live)
    for _ in range(num_levels):
        above = torch.unique(trie.parent.index_select(0, frontier).long())
        if torch.equal(above, frontier):
            break
        frontier = above
        is_kept[frontier] = True
    return is_kept


def least_used(trie: HistoryTrie, is_kept: Tensor, num: int) -> Tensor:
    """A mask (capacity,) of at least `num` nodes, or of all that are not kept: the least used, longest unused first.

    A node's use count is that of the most used node below it, so that no node is evicted before its descendants.
    """
    candidate = (trie.nodes.is_used() & ~is_kept).nonzero().squeeze(1)
    is_chosen = torch.zeros_like(is_kept)
    if num <= 0:
        return is_chosen
    if candidate.numel() <= num:
        is_chosen[candidate] = True
        return is_chosen
    use = trie.num_uses.long().bitwise_left_shift_(32).add_(trie.last_given)
    parent = trie.parent.index_select(0, candidate).long()
    while True:
        below = torch.maximum(use, segment_max(use.index_select(0, candidate), parent, use.numel()))
        if torch.equal(below, use):
            break
        use = below
    use = use.index_select(0, candidate)
    is_chosen[candidate[use <= use.kthvalue(num).values]] = True
    return is_chosen


def trunk_ends(trie: HistoryTrie, is_kept: Tensor) -> Tensor:
    """The kept nodes (R,) whose parents are not kept, by a mask (capacity,)."""
    return (is_kept & ~is_kept.index_select(0, trie.parent.long())).nonzero().squeeze(1)


def drop_rows(trie: HistoryTrie, hidden: HiddenStore, needed: Tensor, num_kept: int) -> None:
    """Drops all but about num_kept rows; contexts (Q,), which need theirs now, and nodes without a parent keep them."""
    used = trie.nodes.is_used().nonzero().squeeze(1)
    has_no_parent = trie.parent.index_select(0, used) == used
    pinned = trie.hidden_row.index_select(0, torch.cat((needed, used[has_no_parent]))).long()
    is_droppable = hidden.rows.is_used()
    is_droppable[pinned[pinned >= 0]] = False
    droppable = is_droppable.nonzero().squeeze(1)
    num = min(droppable.numel(), hidden.rows.num_used - num_kept)
    if num <= 0:
        return
    last_used = hidden.last_used.index_select(0, droppable)
    is_dropped = torch.zeros_like(is_droppable)
    is_dropped[droppable[last_used.argsort()[:num]]] = True
    node = used[trie.hidden_row.index_select(0, used) >= 0]
    node = node[is_dropped.index_select(0, trie.hidden_row.index_select(0, node).long())]
    trie.hidden_row[node] = -1


def free_unused_rows(trie: HistoryTrie, hidden: HiddenStore) -> Tensor:
    """Frees the rows that no longer belong to any node; returns a mask of them (rows,)."""
    row = trie.hidden_row[trie.nodes.is_used()].long()
    is_freed = hidden.rows.is_used()
    is_freed[row[row >= 0]] = False
    hidden.rows.give_back(is_freed.nonzero().squeeze(1))
    return is_freed


def compact_rows(trie: HistoryTrie, hidden: HiddenStore, num_rows: int) -> None:
    """Compacts the rows in use into a store of `num_rows` rows, and updates their nodes."""
    new_row = torch.full((hidden.rows.capacity,), -1, dtype=torch.int32, device=trie.device)
    old_row = hidden.compact(num_rows)
    new_row[old_row] = torch.arange(old_row.numel(), dtype=torch.int32, device=trie.device)
    node = (trie.nodes.is_used() & (trie.hidden_row >= 0)).nonzero().squeeze(1)
    trie.hidden_row[node] = new_row.index_select(0, trie.hidden_row.index_select(0, node).long())


def remove_nodes(trie: HistoryTrie, is_evicted: Tensor) -> None:
    """Removes nodes (capacity,) and all edges from and to them from the trie, and ages the others' use counts."""
    context = (trie.edges.keys.view(-1) >> 32).clamp_(min=BEFORE_START)
    is_gone = is_evicted.index_select(0, context) | is_evicted.index_select(0, trie.edge_node.clamp(0).long())
    trie.edges.keep(~is_gone)
    node = is_evicted.nonzero().squeeze(1)
    trie.parent[node] = BEFORE_START  # the arrays may shrink below the parent
    trie.nodes.give_back(node)
    trie.num_uses.bitwise_right_shift_(1)


_TRIE_SHARE = 0.5
_MIN_SLOTS = 256
_MIN_ROWS = 16
_FIXED_BYTES = 512
"""For tables that are hardly used."""


@dataclass(frozen=True)
class ByteCosts:
    """Bytes of the arrays for each slot of the table of edges, each node and each hidden row."""

    per_slot: int
    per_node: int
    per_row: int


@dataclass(frozen=True)
class Limits:
    """The maximum sizes of the arrays: slots of the table of edges (a power of two), nodes, hidden rows."""

    num_slots: int
    max_nodes: int
    max_rows: int

    @property
    def max_edges(self) -> int:
        return int(MAX_LOAD * self.num_slots)

    @classmethod
    def within(cls, capacity_bytes: int, costs: ByteCosts, num_edges: int = 0, num_nodes: int = 0) -> Limits:
        """At most half of the bytes are for the trie, whose table has a power of two of slots; the rest is for rows.

        Args:
            num_edges, num_nodes: there is always room for these. If half of the bytes is too little for them, rows get
                less; if all bytes are too little, the bound is exceeded.
        """
        capacity_bytes -= _FIXED_BYTES
        bytes_per_slot = costs.per_slot + MAX_LOAD * costs.per_node
        num_slots = _MIN_SLOTS
        while 2 * num_slots * bytes_per_slot <= capacity_bytes * _TRIE_SHARE:
            num_slots *= 2
        while MAX_LOAD * num_slots < num_edges:
            num_slots *= 2
        max_nodes = max(int(MAX_LOAD * num_slots) + START + 1, num_nodes)
        left = capacity_bytes - costs.per_slot * num_slots - costs.per_node * max_nodes
        return cls(num_slots, max_nodes, max(left // costs.per_row, _MIN_ROWS))


class Capacity:
    """Forgets dead contexts when the trie is full, and hidden rows when the store is full.

    Args:
        capacity_bytes: the bound.
        costs: the bytes of this engine's arrays.
        kept_levels: how many generations of ancestors of live contexts are kept. The state of the oldest one is kept,
            so that the memory of a stream does not grow with its length.
    """

    def __init__(
        self,
        capacity_bytes: int,
        costs: ByteCosts,
        expansion: HistoryExpansion,
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

    def retain(self, context_idx: Tensor) -> None:
        """Makes contexts (Q,) live, and those that are returned from now on; all others may be forgotten."""
        trie = self.expansion.trie
        trie.call += 1
        self._marked_at = trie.call
        self._live = context_idx

    def count_uses(self, node: Tensor) -> None:
        """Counts a use of nodes (Q,), which are returned to the search and live until the next `retain`."""
        trie = self.expansion.trie
        trie.num_uses.index_add_(0, node, torch.ones_like(node, dtype=torch.int32))
        trie.last_given.index_fill_(0, node, trie.call)

    def has_room(self, num_new: int) -> bool:
        """Whether this many more edges fit, and so far nothing has been forgotten and there was always room."""
        return not self._is_tight and num_new <= self.num_free_edges

    def has_row_room(self, num_new: int) -> bool:
        """Whether this many more hidden rows fit without dropping others; remembers if they do not."""
        self._is_tight |= num_new > self.num_free_rows
        return not self._is_tight

    def set_tight(self) -> None:
        """Says that something did not fit, so that compiled loops are no longer used."""
        self._is_tight = True

    @property
    def num_free_edges(self) -> int:
        """How many more edges fit without forgetting others."""
        return self.limits.max_edges - self._num_held()

    @property
    def num_free_rows(self) -> int:
        """How many more hidden rows fit without dropping others."""
        return self.limits.max_rows - self.expansion.hidden.rows.num_used

    def is_half_used(self) -> bool:
        """Whether half of the edges or hidden rows that fit are in use, or something has been forgotten."""
        num_rows = self.expansion.hidden.rows.num_used
        is_half_used = 2 * num_rows > self.limits.max_rows or 2 * self._num_held() > self.limits.max_edges
        return self._is_tight or is_half_used

    def make_edge_room(self, key: Tensor, missing: Tensor) -> None:
        """Evicts nodes if necessary, to make room for the edges of key (Q,) at the positions missing (R,)."""
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
        begin = self.clock()
        found = trie.edge_node.index_select(0, trie.edges.find(key)[0].clamp_(min=0)).long()
        is_given = (trie.last_given >= self._marked_at) & trie.nodes.is_used()
        live = torch.cat((self._live, is_given.nonzero().squeeze(1), key >> 32, found))
        self._evict(live, key, num_new)
        self.counts.seconds_evict += self.clock() - begin

    def _num_held(self) -> int:
        """The larger of the numbers of edges and of nodes without the first two: several edges may lead to a node."""
        trie = self.expansion.trie
        return max(trie.edges.count, trie.num_nodes - START - 1)

    def _evict(self, live: Tensor, key: Tensor, num_new: int) -> None:
        """Forgets enough nodes that are neither live nor close ancestors of live ones, to make room for new ones.

        The edges of key (Q,), of which num_new are new, lead from and to live nodes.
        """
        trie = self.expansion.trie
        is_kept = with_ancestors(trie, live, self.kept_levels)
        self._pin(trunk_ends(trie, is_kept))
        num_needed = int(is_kept.sum()) + num_new
        most = Limits.within(self.capacity_bytes, self.costs, num_needed, num_needed).max_edges
        # Half at once, since an eviction reads the whole table.
        num_most = max(self._num_held() + num_new - most, trie.num_nodes - most // 2)
        is_evicted = least_used(trie, is_kept, num_most)
        remove_nodes(trie, is_evicted)
        if trie.edges.count + num_new > most:
            # If several edges lead to a node, scores of existing edges are forgotten, too.
            slot, _ = trie.edges.find(key)
            is_gone = torch.ones(trie.edges.num_slots, dtype=torch.bool, device=trie.device)
            is_gone[slot[slot >= 0]] = False
            trie.edges.keep(~is_gone)
        if self.recombination is not None:
            self.recombination.forget(is_evicted)
        if self.sharing is not None:
            # If rows are shared, normalizers are stored by node.
            self.output.forget(is_evicted)
        self._free_rows()
        self._fit(max(num_needed, trie.edges.count + num_new), trie.num_nodes + num_new)
        self.counts.num_evictions += 1
        self.counts.num_evicted_contexts += int(is_evicted.sum())

    def _pin(self, node: Tensor) -> None:
        """Makes nodes (R,) their own parents: their rows are computed and kept, like that of the initial state."""
        lacking = self.expansion.lacking(node)
        if lacking.numel():
            self.make_row_room(lacking.numel(), node)
            self.expansion.compute(lacking)
        self.expansion.trie.parent[node] = node.int()

    def make_row_room(self, num_new: int, needed: Tensor) -> bool:
        """Whether this many more hidden rows fit, after dropping rows of contexts not in `needed` (Q,) if necessary."""
        rows, most = self.expansion.hidden.rows, self.limits.max_rows
        if rows.num_used + num_new > most:
            self._is_tight = True
            begin = self.clock()
            drop_rows(self.expansion.trie, self.expansion.hidden, needed, min(most // 2, most - num_new))
            self.counts.num_dropped_rows += self._free_rows()
            self.counts.seconds_evict += self.clock() - begin
        return rows.num_used + num_new <= most

    def _free_rows(self) -> int:
        is_freed = free_unused_rows(self.expansion.trie, self.expansion.hidden)
        if self.sharing is None:
            self.output.forget(is_freed)
        else:
            self.sharing.forget(is_freed)
        return int(is_freed.sum())

    def _fit(self, num_edges: int, num_nodes: int) -> None:
        """Divides the bytes again so that there is room for this many edges and nodes."""
        trie, hidden = self.expansion.trie, self.expansion.hidden
        limits = Limits.within(self.capacity_bytes, self.costs, num_edges, num_nodes)
        if trie.nodes.capacity > limits.max_nodes:
            # Contexts in use keep their numbers, so only the memory above all of them can be freed.
            trie.trim_nodes(limits.max_nodes)
            limits = Limits.within(self.capacity_bytes, self.costs, num_edges, max(num_nodes, trie.nodes.capacity))
        self._set(limits)
        if trie.edges.num_slots > limits.num_slots:
            trie.edges.shrink(limits.num_slots)
        if hidden.rows.capacity > limits.max_rows:
            nothing = torch.empty(0, dtype=torch.int64, device=trie.device)
            drop_rows(trie, hidden, nothing, limits.max_rows)
            self.counts.num_dropped_rows += self._free_rows()
            compact_rows(trie, hidden, limits.max_rows)
            # Both were stored under the rows' old numbers.
            if self.sharing is None:
                self.output.clear()
            else:
                self.sharing.clear()

    def _set(self, limits: Limits) -> None:
        self.limits = limits
        self.expansion.trie.limit_nodes(limits.max_nodes)
        self.expansion.hidden.limit_rows(limits.max_rows)
        self.output.limit_groups(limits.max_rows)
