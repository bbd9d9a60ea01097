"""Answers an engine's calls by compiled loops, where `LoopAccess` can lend them its arrays.

Shapes: Q queries, M missing ones.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.lm.compiled_loop import compiled_loop
from asr.query.capacity import Capacity
from asr.query.expansion import Expansion
from asr.query.known_kernel import answer_missing, find_edges
from asr.query.loop_access import LoopAccess


class LoopScores:
    """The same edges, nodes and scores as those of tensor operations, in fewer passes and without copies.

    Args:
        access: lends the arrays.
        expansion: the engine's trie, hidden rows and hidden layer.
        capacity: the engine's bound, if it has one.
    """

    def __init__(self, access: LoopAccess, expansion: Expansion, capacity: Capacity | None) -> None:
        self._access = access
        self._expansion = expansion
        self._capacity = capacity
        self._find = compiled_loop(find_edges)
        self._answer = compiled_loop(answer_missing)

    @torch.no_grad()
    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `RnnLM.score`; None where there may be no room within the engine's bound."""
        begin = time.perf_counter()
        lent = self._access.lent()
        if lent is None or self._find is None or (self._capacity is not None and not self._capacity.has_room(0)):
            return None
        log_prob, next_idx = torch.empty(len(word_id)), torch.empty_like(context_idx)
        missing = np.empty(len(word_id), dtype=np.int64)
        arrays = (tensor.contiguous().numpy() for tensor in (context_idx, word_id, log_prob, next_idx))
        contexts, words, *answers = arrays
        missing = missing[: self._find(contexts, words, lent.edges, *answers, missing)]
        counts = self._expansion.layer.statistics
        counts.seconds_find += time.perf_counter() - begin
        if len(missing) and not self._add(contexts, words, missing, answers):
            return None
        counts.num_calls += 1
        counts.num_queries += len(words)
        counts.num_edge_hits += len(words) - len(missing)
        return log_prob, next_idx

    def _add(self, contexts: Any, words: Any, missing: Any, answers: list[Any]) -> bool:
        """Adds and answers what is missing (M,) -> whether that, and hidden rows for it, had room."""
        trie, lacking = self._expansion.trie, torch.from_numpy(contexts[missing])
        trie.check(lacking, torch.from_numpy(words[missing]), len(self._access.words))
        trie.call += 1
        is_room = self._capacity is None or self._capacity.has_room(len(missing))
        if not is_room or not self._access.expand(lacking):
            return False
        begin = time.perf_counter()
        first, new_slot, is_done = trie.num_nodes, np.empty_like(missing), False
        assert self._answer is not None
        while not is_done:
            # Each new edge has a node of its own.
            tables = self._access.tables(len(missing) - (trie.num_nodes - first))
            assert tables is not None
            is_done = self._answer(contexts, words, missing, tables[2], first, new_slot, *answers)
            self._access.take_nodes()
        if self._capacity is not None:
            row = trie.hidden_row.index_select(0, lacking).long()
            self._expansion.hidden.last_used.index_fill_(0, row, trie.call)
        self._expansion.layer.statistics.seconds_output += time.perf_counter() - begin
        return True
