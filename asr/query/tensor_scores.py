"""Answers an engine's calls by tensor operations, on any device and with any options.

Shapes: Q queries, M missing ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asr.query.new_edges import NewEdges


class TensorScores:
    """Looks edges up, and has those that are missing added.

    Args:
        new_edges: adds them, to the trie of an engine.
        search_device: where queries come from and answers go.
        reset: has the engine forget all, where an edge has been added and could not be scored.
    """

    def __init__(self, new_edges: NewEdges, search_device: torch.device, reset: Callable[[], None]) -> None:
        self._new_edges = new_edges
        self._trie = new_edges.trie
        self._search_device = search_device
        self._reset = reset
        self._counts = new_edges.counts
        self._clock = new_edges.clock

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """As `RnnLM.score`."""
        begin = self._clock.now()
        counts, trie = self._counts, self._trie
        key = trie.edge_key(context_idx, word_id)
        if key.device != trie.device:
            key = self._moved(key, trie.device)
        slot, missing = trie.edges.find(key)
        counts.num_calls += 1
        counts.num_queries += key.numel()
        counts.num_edge_hits += key.numel() - (0 if missing is None else missing.numel())
        counts.seconds_find += self._clock.now() - begin
        if missing is not None:
            slot = self._add_edges(key, slot, missing)
        if not self._new_edges.keeps_scores:
            with torch.no_grad():
                trie.edge_score.index_copy_(0, slot, self._new_edges.log_prob(key >> 32, key & 0xFFFFFFFF))
        if self._search_device == trie.device:
            return trie.edge_score.index_select(0, slot), trie.edge_node.index_select(0, slot).long()
        return trie.unpacked(self._moved(trie.edges.values.index_select(0, slot), self._search_device))

    @torch.no_grad()
    def _add_edges(self, key: Tensor, slot: Tensor, missing: Tensor) -> Tensor:
        """Scores the edges of key (Q,) that are missing (M,) and gives them nodes -> slots (Q,) of all."""
        trie, capacity = self._trie, self._new_edges.capacity
        new_key = key.index_select(0, missing)
        trie.check(new_key >> 32, new_key & 0xFFFFFFFF, len(self._new_edges.output.network.vocabulary))
        trie.call += 1
        num_rebuilds = trie.edges.num_rebuilds
        if capacity is not None:
            capacity.make_edge_room(key, missing)
        try:
            new_slot = self._new_edges.add(new_key)
        except BaseException:
            # Edges without a score must not stay; a caller that goes on begins anew.
            self._reset()
            raise
        if trie.edges.num_rebuilds != num_rebuilds:
            return trie.edges.find(key)[0]
        return slot.index_copy_(0, missing, new_slot)

    def _moved(self, block: Tensor, device: torch.device) -> Tensor:
        begin = self._clock.now()
        moved = block.to(device)
        self._counts.num_transfers += 1
        self._counts.bytes_moved += block.numel() * block.element_size()
        self._counts.seconds_transfer += self._clock.now() - begin
        return moved
