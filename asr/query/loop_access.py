"""Lends an engine's arrays to compiled loops, which look scores up and add new ones without a call for each.

Shapes: Q queries, K contexts, V words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.hashing.hash_table import MAX_LOAD
from asr.lm.compiled_loop import compiled_loop, existing_loop
from asr.lm.contract import LoopTables
from asr.lm.loop_answer import answers_from
from asr.query.capacity import Capacity
from asr.query.expansion import Expansion
from asr.query.known_kernel import (
    ANSWERS,
    EDGES,
    MOST_EDGES,
    NODES,
    NUM_COUNTS,
    QUERIES,
    SCORED,
    TOO_MANY,
    score_known,
    waiting_nodes,
)

# There is room for so many new edges at least before a loop begins.
_ROOM = 1024


class HistoryTables(NamedTuple):
    """What `score_known` reads and writes.

    Attributes:
        edges: the table's keys, its hashes' multiplier and shift, and the edges' scores and nodes.
    """

    edges: tuple[Any, int, int, Any, Any]
    parent: Any
    last_word: Any
    hidden_row: Any
    hidden: Any
    counts: Any
    output: tuple[Any, ...]


answers_from(HistoryTables, score_known, reorders_sums=True)


class LoopAccess:
    """What a loop does stands for calls of `RnnLM.score`: the same edges, nodes and scores.

    It serves engines on a CPU that are exact, as long as they need not forget; the output layer's scores must take no
    more than a loop.

    Args:
        expansion: the engine's trie, hidden rows and hidden layer.
        output: makes the output layer's tables, see `NceOutput.output_for_loop`.
        capacity: the engine's bound, if it has one.
    """

    def __init__(self, expansion: Expansion, output: Any, capacity: Capacity | None = None) -> None:
        self._expansion = expansion
        self._capacity = capacity
        self._make_output = output
        self._lent: tuple[tuple[Tensor, ...], HistoryTables] | None = None
        self.words = np.arange(len(expansion.layer.networks[0].vocabulary))
        self._nothing = np.empty(0, dtype=np.float32)
        self._counts = np.zeros(NUM_COUNTS, dtype=np.int64)

    def tables(self, most_new: int | None = None) -> LoopTables | None:
        """The words themselves (V,), nothing to be added to their scores, and `HistoryTables` with room in them.

        None where there cannot be room within the engine's bound. `most_new` edges are all that will be added, if that
        is known.
        """
        trie, counts = self._expansion.trie, self._counts
        room = max(_ROOM, int(counts[TOO_MANY])) if most_new is None else min(_ROOM, most_new)
        if self._capacity is not None and not self._capacity.has_room(room):
            return None
        if trie.edges.count + room > MAX_LOAD * trie.edges.num_slots:
            trie.reserve_edges(room)
        if trie.nodes.num_free < room:
            trie.reserve_nodes(room)
        counts[:] = 0
        counts[NODES], counts[EDGES] = trie.num_nodes, trie.edges.count
        counts[MOST_EDGES] = min(int(MAX_LOAD * trie.edges.num_slots), trie.edges.count + trie.nodes.num_free)
        lent = self.lent()
        return None if lent is None else (self.words, self._nothing, lent)

    def lent(self) -> HistoryTables | None:
        """The arrays as they are now; None where a word's score takes more than a loop."""
        trie, state = self._expansion.trie, self._expansion.hidden.state
        grown = trie.edges.keys, trie.parent, state
        if self._lent is None or any(now is not before for now, before in zip(grown, self._lent[0], strict=True)):
            network, output = self._expansion.layer.networks[0], self._make_output()
            if output is None or compiled_loop(score_known) is None:
                return None
            hidden = state[:, network.state_size - network.hidden_size :]
            edges = *trie.edges.for_loop(), trie.edge_score.numpy(), trie.edge_node.numpy()
            parent, word, hidden_row = (column.numpy() for column in (trie.parent, trie.word, trie.hidden_row))
            self._lent = grown, HistoryTables(edges, parent, word, hidden_row, hidden.numpy(), self._counts, output)
        return self._lent[1]

    def take_in(self, context_idx: Tensor, held: Tensor) -> None:
        """What the loop has added since `tables` is counted; those of contexts (K,) without a hidden row get theirs.

        The search holds the contexts (H,).
        """
        self.take_nodes()
        counts, statistics = self._counts, self._expansion.layer.statistics
        statistics.num_calls += int(counts[ANSWERS])
        statistics.num_queries += int(counts[QUERIES])
        statistics.num_edge_hits += int(counts[QUERIES] - counts[SCORED])
        if self._capacity is not None:
            self._capacity.count_uses(held)
        if len(context_idx):
            self.expand(context_idx)

    def take_nodes(self) -> None:
        """The nodes and edges that a loop has added since `tables` become the trie's."""
        trie, counts = self._expansion.trie, self._counts
        num_new = int(counts[NODES]) - trie.num_nodes
        if num_new:
            trie.nodes.take(num_new)
            trie.edges.count = int(counts[EDGES])
        statistics = self._expansion.layer.statistics
        statistics.num_edges += int(counts[SCORED])
        statistics.num_outputs += int(counts[SCORED])

    @torch.no_grad()
    def expand(self, context_idx: Tensor) -> bool:
        """As `Expansion` does for contexts (K,), where all parents have their rows -> whether there was room for it."""
        trie, hidden = self._expansion.trie, self._expansion.hidden
        loop = existing_loop(waiting_nodes)
        nodes = (part.numpy() for part in (trie.parent, trie.word, trie.hidden_row))
        node, before, which, word = map(torch.from_numpy, loop(context_idx.contiguous().numpy(), *nodes))
        if self._capacity is not None and not self._capacity.has_row_room(len(node)):
            return False
        if 0 < len(node) < self._expansion.rows_ahead:
            self._expansion.compute(node)
        elif len(node):
            layer = self._expansion.layer
            if layer.branches:
                state = layer.step(hidden.read(before), word, which)
            else:
                state = layer.step(hidden.read(before[which]), word)
            row = hidden.append(state)
            trie.hidden_row.index_copy_(0, node, row.int())
            hidden.last_used.index_fill_(0, row, trie.call)
        return True
