"""Sees to it that the nodes which are asked for a successor have their hidden rows.

Shapes: R nodes, S state width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.query.distinct import one_of_each
from asr.query.hidden_layer import HiddenLayer
from asr.query.hidden_store import HiddenStore
from asr.query.quantized_history import QuantizedHistory
from asr.query.trie import START, HistoryTrie

# So many of the newest nodes are looked through for those without a row.
_NEWEST = 256
# From so many rows on it is worth to look for those that follow the same state.
_ROWS_WORTH_BRANCHES = 16


class Expansion:
    """Computes hidden rows from the nearest ancestors that have one.

    An ancestor lacks a row only where a capacity made it drop; its state is then computed on the way, and not kept.

    Args:
        rows_ahead: a run of fewer rows than this takes along nodes that have not been asked yet, the newest, up to so
            many rows.
    """

    def __init__(
        self,
        trie: HistoryTrie,
        hidden: HiddenStore,
        layer: HiddenLayer,
        sharing: QuantizedHistory | None,
        rows_ahead: int = 0,
    ) -> None:
        self.trie = trie
        self.hidden = hidden
        self.layer = layer
        self.sharing = sharing
        self.rows_ahead = rows_ahead

    def lacking(self, context_idx: Tensor) -> Tensor:
        """The distinct ones of contexts (Q,) that have no row, (R,)."""
        is_lacking = self.trie.hidden_row.index_select(0, context_idx) < 0
        where = is_lacking.nonzero().squeeze(1)
        return torch.unique(context_idx.index_select(0, where)) if where.numel() else where

    def compute(self, node: Tensor) -> None:
        """Gives distinct nodes (R,) without a row theirs: in one run of the hidden layer where all parents have one."""
        if node.numel() < self.rows_ahead:
            node = torch.cat([node, self._newest_without_row(self.rows_ahead - node.numel(), node)])
        self.trie.hidden_row.index_copy_(0, node, self._rows(*self.state_before(node)).int())

    def _newest_without_row(self, most: int, others: Tensor) -> Tensor:
        """The newest nodes without a row, but for some others (R,) without one; at most so many.

        Nothing must have been forgotten: nodes are then numbered as they come, and all parents have their rows.
        """
        end = self.trie.num_nodes
        begin = max(START, end - _NEWEST)
        self.trie.hidden_row.index_fill_(0, others, 0)  # for a moment, not to be found
        waiting = (self.trie.hidden_row[begin:end] < 0).nonzero().squeeze(1)
        self.trie.hidden_row.index_fill_(0, others, -1)
        return waiting[-most:].add_(begin)

    def state_before(self, node: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `HiddenLayer.step` reads for nodes (R,): states (R, S), words (R,), and which state each follows."""
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
        known, state = levels[-1][:0], torch.empty(0, self.hidden.state_size, device=self.hidden.device)
        for level in reversed(levels):
            before = self._with_known(self.trie.parent.index_select(0, level).long(), known, state)
            state = self.layer.step(before, self.trie.word.index_select(0, level).long())
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
        """Rows (R,) that hold what follows, arguments as of `HiddenLayer.step`."""
        if self.sharing is None:
            return self.hidden.append(self.layer.step(state, word_id, before))
        key = self.sharing.key(state, word_id)
        row, missing = self.sharing.find(key)
        if missing is not None:
            position, which = one_of_each(key.index_select(0, missing))
            one = missing.index_select(0, position)
            new_row = self.hidden.append(self.layer.step(state.index_select(0, one), word_id.index_select(0, one)))
            self.sharing.store(key.index_select(0, one), new_row)
            row[missing] = new_row.index_select(0, which)
        self.layer.statistics.num_shared_rows += key.numel() - (0 if missing is None else one.numel())
        return row

    def replace(self, node: Tensor, context_idx: Tensor) -> Tensor:
        """Nodes (R,) come from other contexts (R,) from now on -> the rows that were computed anew."""
        row = self.trie.hidden_row.index_select(0, node).long()
        has_row = (row >= 0).nonzero().squeeze(1)
        # A node with descendants keeps its parent, lest the way up became a circle.
        is_parent = torch.zeros(self.trie.nodes.capacity, dtype=torch.bool, device=node.device)
        is_parent[self.trie.parent[self.trie.nodes.is_used()].long()] = True
        leaf = (~is_parent.index_select(0, node)).nonzero().squeeze(1)
        self.trie.parent[node.index_select(0, leaf)] = context_idx.index_select(0, leaf).int()
        if has_row.numel():
            word_id = self.trie.word.index_select(0, node.index_select(0, has_row)).long()
            state = self.layer.step(self._states(context_idx.index_select(0, has_row)), word_id)
            self.hidden.write(row.index_select(0, has_row), state)
        return row.index_select(0, has_row)
