"""Edges that the history trie does not have yet: their scores by the output layer, and the nodes that they lead to.

Shapes: Q queries, R new edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.query.capacity import Capacity
from asr.query.expansion import Expansion
from asr.query.output_cache import OutputCache
from asr.query.recombination import Recombination


class NewEdges:
    """Adds edges to the trie of an engine, of which the arguments are the parts.

    Args:
        keeps_scores: without it (cache 1 off) an edge is added without a score, which its owner asks for each time.
        keeps_hidden: without it (naive cache 2) the hidden layer runs for every score anew, from the row before.
    """

    def __init__(
        self,
        expansion: Expansion,
        output: OutputCache,
        recombination: Recombination | None,
        capacity: Capacity | None,
        keeps_scores: bool,
        keeps_hidden: bool,
    ) -> None:
        self.expansion = expansion
        self.trie = expansion.trie
        self.hidden = expansion.hidden
        self.output = output
        self.recombination = recombination
        self.capacity = capacity
        self.keeps_scores = keeps_scores
        self.keeps_hidden = keeps_hidden
        self.counts = expansion.layer.statistics
        self.clock = expansion.layer.clock

    def add(self, key: Tensor) -> Tensor:
        """Adds absent edges (Q,) with their scores and nodes -> their slots (Q,)."""
        slot, one = self.trie.add_edges(key)
        new, new_key = slot.index_select(0, one), key.index_select(0, one)
        context_idx, word_id = new_key >> 32, new_key & 0xFFFFFFFF
        self.counts.num_edges += one.numel()
        if self.keeps_scores or self.recombination is not None:
            log_prob = self.log_prob(context_idx, word_id)
        else:
            log_prob = torch.zeros(one.numel(), device=key.device)
        if self.recombination is None:
            node = self.trie.new_nodes(context_idx, word_id)
        else:
            node = self.recombination.nodes(self.trie, context_idx, word_id)
            if self.recombination.choice == "best":
                self._prefer_best(self.recombination, node, context_idx, log_prob)
        self.trie.edge_node.index_copy_(0, new, node.int())
        self.trie.edge_score.index_copy_(0, new, log_prob)
        return slot

    def _prefer_best(self, recombination: Recombination, node: Tensor, context_idx: Tensor, log_prob: Tensor) -> None:
        better = recombination.better(node, log_prob, self.trie.call, self.trie.nodes.capacity)
        row = self.expansion.replace(node.index_select(0, better), context_idx.index_select(0, better))
        if row.numel():
            is_written = torch.zeros(self.hidden.rows.capacity, dtype=torch.bool, device=row.device)
            is_written[row] = True
            self.output.forget(is_written)

    def log_prob(self, context_idx: Tensor, word_id: Tensor) -> Tensor:
        """The output layer's scores of any contexts and words, (R,)."""
        lacking = self.expansion.lacking(context_idx)
        if lacking.numel():
            num = context_idx.numel()
            is_room = self.capacity is None or self.capacity.make_row_room(lacking.numel(), context_idx)
            if not is_room and num > 1:
                halves = zip(context_idx.split((num + 1) // 2), word_id.split((num + 1) // 2), strict=True)
                return torch.cat([self.log_prob(*half) for half in halves])
            self.expansion.compute(lacking)
        begin = self.clock.now()
        network = self.output.network
        row = self.trie.hidden_row.index_select(0, context_idx).long()
        if self.capacity is not None:
            self.hidden.last_used.index_fill_(0, row, self.trie.call)
        first_column = network.state_size - network.hidden_size
        if self.keeps_hidden:
            hidden = self.hidden.read(row, first_column)
        else:
            hidden = self.expansion.layer.step(*self.expansion.state_before(context_idx))[:, first_column:]
        history = self.trie.history(context_idx, network.num_history_words)
        if self.expansion.sharing is None:
            owner, num_owners = row, self.hidden.rows.capacity
        else:
            # Where rows are shared, equal rows can stand for different histories.
            owner, num_owners = context_idx, self.trie.nodes.capacity
        self.output.reserve(num_owners)
        log_prob = self.output.score(owner, hidden, history, word_id)
        self.counts.num_outputs += word_id.numel()
        self.counts.seconds_output += self.clock.now() - begin
        return log_prob
