"""Takes nodes and hidden rows out of a trie.

Nodes leave as leaves, the least frequently used first, and live contexts and the histories above them never. Hidden
rows leave least recently used first; one that is asked for again is computed again, which costs time only.

Shapes: Q contexts, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.query.distinct import largest_of_each
from asr.query.hidden_store import HiddenStore
from asr.query.trie import BEFORE_START, START, HistoryTrie


def with_ancestors(trie: HistoryTrie, live: Tensor, num_levels: int) -> Tensor:
    """A mask of the nodes (capacity,): the first two, the live ones (Q,), and the ancestors of those, so far up."""
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
    """A mask (capacity,) of at least `num` nodes, or all that are not kept: the least used, longest unused first.

    A node counts as used as often as the most used node below it, so that no node leaves before its descendants.
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
        below = torch.maximum(use, largest_of_each(use.index_select(0, candidate), parent, use.numel()))
        if torch.equal(below, use):
            break
        use = below
    use = use.index_select(0, candidate)
    is_chosen[candidate[use <= use.kthvalue(num).values]] = True
    return is_chosen


def trunk_ends(trie: HistoryTrie, is_kept: Tensor) -> Tensor:
    """Of the nodes kept (capacity,), those whose parents are not (R,)."""
    return (is_kept & ~is_kept.index_select(0, trie.parent.long())).nonzero().squeeze(1)


def drop_rows(trie: HistoryTrie, hidden: HiddenStore, needed: Tensor, num_kept: int) -> None:
    """Leaves about num_kept rows; contexts (Q,) that need theirs now keep them, and so do nodes that have no parent."""
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
    """Gives back the rows that no node has any more: a mask of them (rows,)."""
    row = trie.hidden_row[trie.nodes.is_used()].long()
    is_freed = hidden.rows.is_used()
    is_freed[row[row >= 0]] = False
    hidden.rows.give_back(is_freed.nonzero().squeeze(1))
    return is_freed


def compact_rows(trie: HistoryTrie, hidden: HiddenStore, num_rows: int) -> None:
    """Moves the rows in use together into a store of so many rows; nodes follow."""
    new_row = torch.full((hidden.rows.capacity,), -1, dtype=torch.int32, device=trie.device)
    old_row = hidden.compact(num_rows)
    new_row[old_row] = torch.arange(old_row.numel(), dtype=torch.int32, device=trie.device)
    node = (trie.nodes.is_used() & (trie.hidden_row >= 0)).nonzero().squeeze(1)
    trie.hidden_row[node] = new_row.index_select(0, trie.hidden_row.index_select(0, node).long())


def remove_nodes(trie: HistoryTrie, is_evicted: Tensor) -> None:
    """Takes nodes (capacity,) and all edges from and to them out of the trie, and ages the use counts of the others."""
    context = (trie.edges.keys.view(-1) >> 32).clamp_(min=BEFORE_START)
    is_gone = is_evicted.index_select(0, context) | is_evicted.index_select(0, trie.edge_node.clamp(0).long())
    trie.remove_edges(is_gone)
    node = is_evicted.nonzero().squeeze(1)
    trie.hidden_row[node] = -1
    trie.parent[node] = BEFORE_START  # the arrays may shrink below the parent
    trie.nodes.give_back(node)
    trie.num_uses.bitwise_right_shift_(1)
