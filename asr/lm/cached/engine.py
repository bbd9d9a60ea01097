"""Edges that the history trie does not have yet: their scores by the output layer, and the nodes that they lead to.

Shapes: Q queries, R new edges.


Answers an engine's calls by tensor operations, on any device and with any options.

Shapes: Q queries, M missing ones.


`CachedRNNLM`: any stateful network as a language model, behind the history trie.

Shapes: Q queries, R new edges, S state, H hidden, M history words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.hash_table import BYTES_PER_SLOT
from asr.lm.cached.approximations import QuantizedHistory, Recombination
from asr.lm.cached.engine_numba import CachedLMTables, LoopScores, NumbaEngine
from asr.lm.cached.eviction import ByteCosts, Capacity
from asr.lm.cached.outputs import OutputCache
from asr.lm.cached.states import Expansion, HiddenLayer, HiddenStore
from asr.lm.cached.statistics import QueryStatistics, StageClock
from asr.lm.cached.trie import BEFORE_START, BYTES_PER_NODE, START, HistoryTrie
from asr.lm.interface import LanguageModel, StatefulNetwork
from asr.text.symbols import EOS_ID, Vocabulary


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


class TorchEngine:
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
        """As `CachedRNNLM.score`."""
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


_KEPT_LEVELS = 32


class CachedRNNLM(LanguageModel):
    """A `LanguageModel` that does each piece of the network's work once.

    The hidden layer runs once a history, and only when the history is first asked for a successor; all such histories
    of a call go through it in one step. Histories stay over utterances until `reset`, or as long as the capacity lasts.
    With every option at its default, scores equal those of the network run word by word.

    Args:
        network: runs the output layer, on the device that also holds the trie and the hidden rows (home).
        hidden_networks: run the hidden layer, each on its own device; `network` alone if None. The same network twice
            is two workers (threads) that share it.
        search_device: where queries come from and answers go; home if None.
        hidden_dtype: what hidden rows are kept in: float32, float16, bfloat16 or int8.
        cache_scores: cache 1 of four-caches, (history, word) -> score.
        cache_hidden: cache 2; without it (naive) the hidden layer runs for every query anew, from the row before.
        cache_history_normalizers, cache_group_normalizers: caches 3 and 4.
        cache_tree_paths: what takes their place where the output layer is a tree.
        recombination_length: histories that end in the same k words share a context; None keeps all apart.
        recombination: whose hidden state a shared context has: the "first" come or the "best" met in the window.
        recombination_window: calls that a best one stands for at least.
        history_precision: "round-2", "round-1" or "sign": one hidden row where the quantised state before and the word
            are equal; None keeps all apart.
        capacity_bytes: what trie, hidden rows and normalisers may take. Of the contexts only those that `retain`
            left out are forgotten for it; hidden rows are dropped at need, which costs time but changes no score.
            See `asr.lm.cached.eviction` for when it cannot be kept.
        rows_ahead: a run of the hidden layer for fewer histories than this takes along others, the newest, up to so
            many rows, before they are asked for a successor: weights are read once for all of them. None with a
            capacity or without cache 2.
        batching: "frame" runs the hidden layer once a call, "query" once a row.
        synchronize: wait for the device before each reading of the clock, so that the seconds of the stages are true.
    """

    def __init__(
        self,
        network: StatefulNetwork,
        hidden_networks: Sequence[StatefulNetwork] | None = None,
        search_device: torch.device | None = None,
        hidden_dtype: str = "float32",
        cache_scores: bool = True,
        cache_hidden: bool = True,
        cache_history_normalizers: bool = True,
        cache_group_normalizers: bool = True,
        cache_tree_paths: bool = True,
        recombination_length: int | None = None,
        recombination: str = "first",
        recombination_window: int = 50,
        history_precision: str | None = None,
        capacity_bytes: int | None = None,
        rows_ahead: int = 0,
        batching: str = "frame",
        synchronize: bool = False,
    ) -> None:
        self.network = network
        self.device = network.initial_state().device
        # A device without a number is the current one, which tensors tell by its number.
        self.search_device = self.device if search_device is None else torch.empty(0, device=search_device).device
        if history_precision is not None and recombination_length is not None and recombination == "best":
            raise AsrError(
                "history_precision: shared hidden rows and recombination best cannot be combined; use first."
            )
        self._counts = QueryStatistics()
        self.hidden = HiddenStore(network.state_size, hidden_dtype, self.device)
        self.output = OutputCache(
            network, cache_history_normalizers, cache_group_normalizers, cache_tree_paths, self.device
        )
        self.recombination = (
            Recombination(recombination_length, recombination, recombination_window, self.device)
            if recombination_length is not None
            else None
        )
        self.sharing = (
            QuantizedHistory(history_precision, getattr(network, "recurrent_size", network.state_size), self.device)
            if history_precision is not None
            else None
        )
        self.trie = HistoryTrie(self.device)
        hidden_networks = hidden_networks or [network]
        devices = [each.initial_state().device for each in hidden_networks]
        self._clock = StageClock([self.device, self.search_device, *devices], synchronize)
        layer = HiddenLayer(hidden_networks, self.device, batching, self._counts, self._clock)
        ahead = rows_ahead if capacity_bytes is None and cache_hidden else 0
        self.expansion = Expansion(self.trie, self.hidden, layer, self.sharing, ahead)
        self.capacity = self._capacity(capacity_bytes) if capacity_bytes is not None else None
        new_edges = NewEdges(self.expansion, self.output, self.recombination, self.capacity, cache_scores, cache_hidden)
        self._tensor_scores = TorchEngine(new_edges, self.search_device, self.reset)
        is_exact = recombination_length is None and history_precision is None
        is_plain = cache_scores and cache_hidden and hidden_dtype == "float32"
        has_loop = is_exact and is_plain and self.device.type == self.search_device.type == "cpu"
        output = getattr(network, "output_for_loop", None)
        self._loop = NumbaEngine(self.expansion, output, self.capacity) if has_loop and output is not None else None
        self._loop_scores = None if self._loop is None else LoopScores(self._loop, self.expansion, self.capacity)
        self.reset()

    def _capacity(self, capacity_bytes: int) -> Capacity:
        of_history = self.output.bytes_of_history
        of_best = 8 if self.recombination is not None and self.recombination.choice == "best" else 0
        # Tables of keys by node have as many slots as that of the edges; those by row up to four a row.
        costs = ByteCosts(
            BYTES_PER_SLOT * (1 if self.recombination is None else 2),
            BYTES_PER_NODE + of_best + (0 if self.sharing is None else of_history),
            self.hidden.bytes_per_row
            + self.output.bytes_of_groups
            + (of_history if self.sharing is None else 4 * BYTES_PER_SLOT),
        )
        kept_levels = _KEPT_LEVELS + self.network.num_history_words
        return Capacity(
            capacity_bytes, costs, self.expansion, self.output, self.recombination, self.sharing, kept_levels
        )

    def reset(self) -> None:
        """Forgets every history; context indices handed out before mean nothing any more. Statistics go on."""
        for part in (self.trie, self.hidden, self.output, self.recombination, self.sharing, self.capacity):
            if part is not None:
                part.clear()
        with torch.no_grad():
            row = self.hidden.append(self.network.initial_state().unsqueeze(0))
        self.trie.hidden_row[BEFORE_START] = int(row)

    @property
    def vocabulary(self) -> Vocabulary:
        """The network's words."""
        return self.network.vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>` for each stream, context_idx (num_streams,)."""
        return torch.full((num_streams,), START, dtype=torch.int64, device=self.search_device)

    def retain(self, live: Tensor) -> None:
        """See `LanguageModel.retain`. Only an engine with a capacity forgets, and nothing before the first call."""
        if self.capacity is not None:
            self.capacity.retain(live.to(self.device))

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | history) and the history extended by the word: log_prob (Q,), next_idx (Q,)."""
        begin = self._clock.now()
        counts = self._counts
        num_edges = counts.num_edges
        answered = None if self._loop_scores is None else self._loop_scores.score(context_idx, word_id)
        log_prob, next_idx = answered or self._tensor_scores.score(context_idx, word_id)
        if counts.num_edges > num_edges:
            counts.peak_bytes = max(counts.peak_bytes, self._bytes_held())
        if self.capacity is not None:
            self.capacity.count_uses(next_idx.to(self.device))
        counts.seconds_total += self._clock.now() - begin
        return log_prob, next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | history), (Q,)."""
        log_prob, _ = self.score(context_idx, torch.full_like(context_idx, EOS_ID))
        return log_prob

    def lookup_tables(self) -> CachedLMTables | None:
        """The arrays that a loop reads and adds to.

        None if the options or the network do not allow it, or if the capacity is used up.
        """
        return None if self._loop is None else self._loop.tables()

    def expand(self, context_idx: Tensor, live: Tensor) -> None:
        """See `LanguageModel.expand`: computes the hidden rows of contexts (K,) that have none."""
        if self._loop is not None:
            begin = self._clock.now()
            self._loop.take_in(context_idx, live)
            self._counts.seconds_total += self._clock.now() - begin

    def statistics(self) -> QueryStatistics:
        """The record of this engine, brought up to date; it goes on counting."""
        counts = self._counts
        counts.num_history_normalizers = self.output.num_history_normalizers
        counts.num_group_normalizers = self.output.num_group_normalizers
        counts.num_tree_decisions = self.output.num_tree_decisions
        counts.num_contexts = self.trie.num_nodes
        counts.num_hidden_held = self.hidden.rows.num_used
        counts.bytes_held = self._bytes_held()
        return counts

    def _bytes_held(self) -> int:
        parts = (self.trie, self.hidden, self.output, self.recombination, self.sharing)
        return sum(part.num_bytes for part in parts if part is not None)
