"""`CachedRNNLM`: a recurrent language model with caches, so that no part of the network's work is done twice.

Every word history that has been queried is a node of a trie (`HistoryTrie`); a context index is a node's number. An
edge (history, word) has the word's score and leads to the longer history. A history gets its hidden row when its first
successor is queried; all histories of a call without a hidden row go through the hidden layer together.

`TorchEngine` answers calls on any device and with any options; on CPUs `NumbaEngine` replaces it where it can, and
on a GPU `TritonEngine` while a search reserves calls.

Shapes: Q queries, M missing queries, R new edges or nodes, S state, H hidden, M history words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asr.kernels.hash_table import BYTES_PER_SLOT, marked_positions
from asr.kernels.jit import gpu_module, has_loops
from asr.kernels.memory import no_autograd
from asr.lm.cached.approximations import CacheOptions, QuantizedHistory, Recombination
from asr.lm.cached.engine_numba import CachedLMTables, NumbaEngine
from asr.lm.cached.eviction import ByteCosts, Capacity
from asr.lm.cached.outputs import OutputCache, ProjectionCache
from asr.lm.cached.states import HiddenLayer, HiddenStore, HistoryExpansion, QueryStatistics
from asr.lm.cached.trie import BEFORE_START, BYTES_PER_NODE, START, HistoryTrie
from asr.lm.interface import LanguageModel, StatefulNetwork
from asr.text.symbols import BOS_ID, EOS_ID, Vocabulary

if TYPE_CHECKING:
    from asr.lm.cached.engine_triton import TritonEngine


class TorchEngine:
    """Looks up edges and adds missing ones, with tensor operations.

    Args:
        expansion: the trie, the hidden rows and the hidden layer.
        output: scores new edges.
        recombination: which histories share contexts, or None.
        capacity: the bound on memory, or None.
        options: which caches are kept.
        reset: called when a new edge could not be scored, so that no edge without a score remains.
    """

    def __init__(
        self,
        expansion: HistoryExpansion,
        output: OutputCache,
        recombination: Recombination | None,
        capacity: Capacity | None,
        options: CacheOptions,
        reset: Callable[[], None],
    ) -> None:
        self._expansion = expansion
        self._trie = expansion.trie
        self._hidden = expansion.hidden
        self._output = output
        self._recombination = recombination
        self._capacity = capacity
        self._keeps_scores = options.cache_scores
        self._keeps_hidden = options.cache_hidden
        self._reset = reset
        self._counts = expansion.layer.statistics
        self._clock = expansion.layer.clock

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """See `CachedRNNLM.score`."""
        begin = self._clock()
        counts, trie = self._counts, self._trie
        key = trie.edge_key(context_idx, word_id)
        if self._can_put(len(key)):
            with self._none_without_score():
                slot = self._put_edges(key)
            counts.seconds_find += self._clock() - begin
            return trie.edge_score.index_select(0, slot), trie.edge_node.index_select(0, slot).long()
        slot, missing = trie.edges.find(key)
        counts.num_calls += 1
        counts.num_queries += key.numel()
        counts.num_edge_hits += key.numel() - (0 if missing is None else missing.numel())
        counts.seconds_find += self._clock() - begin
        if missing is not None:
            slot = self._add_edges(key, slot, missing)
        if not self._keeps_scores:
            with torch.no_grad():
                trie.edge_score.index_copy_(0, slot, self._log_prob(key >> 32, key & 0xFFFFFFFF))
        return trie.edge_score.index_select(0, slot), trie.edge_node.index_select(0, slot).long()

    def _can_put(self, num_queries: int) -> bool:
        """Whether `_put_edges` may be used."""
        return (
            self._keeps_scores
            and self._recombination is None
            and (self._capacity is None or self._capacity.has_room(num_queries))
            and self._trie.edges.can_put
        )

    @contextmanager
    def _none_without_score(self) -> Iterator[None]:
        """Within the block, edges are added and then scored. If that fails, or a user interrupts it, none may remain:
        a caller that continues starts with an empty cache."""
        try:
            yield
        except BaseException:
            self._reset()
            raise

    @no_autograd()
    def _put_edges(self, key: Tensor) -> Tensor:
        """Finds or adds the edges of key (Q,) -> their slots (Q,); the host waits for a GPU once, new edges or not."""
        trie, counts = self._trie, self._counts
        context_idx, word_id = key >> 32, key & 0xFFFFFFFF
        num_words, num_nodes = len(self._output.network.vocabulary), trie.nodes.num_started
        slot, is_new, is_first = trie.edges.put(key)
        is_outside = (word_id >= num_words) | (context_idx < 0) | (context_idx >= num_nodes)
        node = context_idx.clamp(0, num_nodes - 1)
        needs_row = is_first & (trie.hidden_row.index_select(0, node) < 0)
        # The last entry is for all queries that need no row.
        lacks_row = torch.zeros(num_nodes + 1, dtype=torch.bool, device=key.device)
        lacks_row.index_fill_(0, torch.where(needs_row, node, num_nodes), True)
        lacks_row = lacks_row[:num_nodes]
        found = torch.stack([part.sum() for part in (is_new, is_first, lacks_row, is_outside)])
        num_absent, num_new, num_lacking, num_outside = found.tolist()
        counts.num_calls += 1
        counts.num_queries += len(key)
        counts.num_edge_hits += len(key) - num_absent
        if not num_new and not num_outside:
            return slot
        if num_outside:
            trie.check(context_idx, word_id, num_words)
        trie.call += 1
        one = marked_positions(is_first, num_new)
        new = slot.index_select(0, one)
        trie.edges.added(new)
        counts.num_edges += num_new
        context_idx, word_id = context_idx.index_select(0, one), word_id.index_select(0, one)
        log_prob = self._log_prob(context_idx, word_id, marked_positions(lacks_row, num_lacking))
        trie.edge_node.index_copy_(0, new, trie.new_nodes(context_idx, word_id).int())
        trie.edge_score.index_copy_(0, new, log_prob)
        return slot

    @no_autograd()
    def _add_edges(self, key: Tensor, slot: Tensor, missing: Tensor) -> Tensor:
        """Scores the edges of key (Q,) that are missing (M,) and gives them nodes -> slots (Q,) of all."""
        trie, capacity = self._trie, self._capacity
        new_key = key.index_select(0, missing)
        trie.check(new_key >> 32, new_key & 0xFFFFFFFF, len(self._output.network.vocabulary))
        trie.call += 1
        num_rebuilds = trie.edges.num_rebuilds
        if capacity is not None:
            capacity.make_edge_room(key, missing)
        with self._none_without_score():
            new_slot = self._new_slots(new_key)
        if trie.edges.num_rebuilds != num_rebuilds:
            return trie.edges.find(key)[0]
        return slot.index_copy_(0, missing, new_slot)

    def _new_slots(self, key: Tensor) -> Tensor:
        """Adds absent edges (Q,) with their scores and nodes -> their slots (Q,)."""
        slot, one = self._trie.edges.insert(key)
        new, new_key = slot.index_select(0, one), key.index_select(0, one)
        context_idx, word_id = new_key >> 32, new_key & 0xFFFFFFFF
        self._counts.num_edges += one.numel()
        if self._keeps_scores or self._recombination is not None:
            log_prob = self._log_prob(context_idx, word_id)
        else:
            log_prob = torch.zeros(one.numel(), dtype=torch.float32, device=key.device)
        if self._recombination is None:
            node = self._trie.new_nodes(context_idx, word_id)
        else:
            node = self._recombination.nodes(self._trie, context_idx, word_id)
            if self._recombination.choice == "best":
                self._prefer_best(self._recombination, node, context_idx, log_prob)
        self._trie.edge_node.index_copy_(0, new, node.int())
        self._trie.edge_score.index_copy_(0, new, log_prob)
        return slot

    def _prefer_best(self, recombination: Recombination, node: Tensor, context_idx: Tensor, log_prob: Tensor) -> None:
        better = recombination.better(node, log_prob, self._trie.call, self._trie.nodes.capacity)
        row = self._expansion.replace(node.index_select(0, better), context_idx.index_select(0, better))
        if row.numel():
            is_written = torch.zeros(self._hidden.rows.capacity, dtype=torch.bool, device=row.device)
            is_written[row] = True
            self._output.forget(is_written)

    def _log_prob(self, context_idx: Tensor, word_id: Tensor, lacking: Tensor | None = None) -> Tensor:
        """The output layer's scores of any contexts and words, (R,); `lacking` may give the contexts without a row."""
        if lacking is None:
            lacking = self._expansion.lacking(context_idx)
        if lacking.numel():
            num = context_idx.numel()
            is_room = self._capacity is None or self._capacity.make_row_room(lacking.numel(), context_idx)
            if not is_room and num > 1:
                halves = zip(context_idx.split((num + 1) // 2), word_id.split((num + 1) // 2), strict=True)
                return torch.cat([self._log_prob(*half) for half in halves])
            self._expansion.compute(lacking)
        begin = self._clock()
        network = self._output.network
        row = self._trie.hidden_row.index_select(0, context_idx).long()
        if self._capacity is not None:
            self._hidden.last_used.index_fill_(0, row, self._trie.call)
        if not self._keeps_hidden:
            state = self._expansion.layer.step(*self._expansion.state_before(context_idx))
            hidden = self._expansion.layer.project(state)
        elif network.has_projection:
            hidden = self._expansion.layer.project(self._hidden.read(row))
        else:
            hidden = self._hidden.read(row, self._hidden.first_output)
        history = self._trie.history(context_idx, network.num_history_words)
        if self._expansion.sharing is None:
            owner, num_owners = row, self._hidden.rows.capacity
        else:
            # If rows are shared, equal rows can belong to different histories.
            owner, num_owners = context_idx, self._trie.nodes.capacity
        self._output.reserve(num_owners)
        log_prob = self._output.score(owner, hidden, history, word_id)
        self._counts.num_outputs += word_id.numel()
        self._counts.seconds_output += self._clock() - begin
        return log_prob


_KEPT_LEVELS = 32


class CachedRNNLM(LanguageModel):
    """A recurrent language model that keeps what it has computed, across calls and utterances.

    Histories are kept until `reset`, or within the capacity of the options. With the default options, scores equal
    those of the network run word by word.

    Args:
        network: runs the output layer, on the device that also holds the trie and the hidden rows (home).
        options: caches, memory and approximations; the defaults if None.
        hidden_networks: run the hidden layer, each on its own device; only `network` if None. The same network twice
            means two worker threads that share it.
        clock: gives seconds since an arbitrary moment, for the times of stages. On a GPU, one that does not wait for
            the device measures the time to launch the work.

    Raises:
        AsrError: an option rounds states, and those of the network must be exact.
    """

    @no_autograd()
    def __init__(
        self,
        network: StatefulNetwork,
        options: CacheOptions | None = None,
        *,
        hidden_networks: Sequence[StatefulNetwork] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options = options = options or CacheOptions()
        if network.has_exact_states:
            options.require_exact()
        self.network = network
        self.device = network.initial_state().device
        self._counts = QueryStatistics()
        output_size = None if network.has_projection else network.hidden_size
        self.hidden = HiddenStore(network.state_size, output_size, options.hidden_dtype, self.device)
        self.output = OutputCache(network, options, self._counts)
        self.recombination: Recombination | None = None
        if options.recombination_length is not None:
            window = options.recombination_window
            self.recombination = Recombination(options.recombination_length, options.recombination, window, self.device)
        self.sharing: QuantizedHistory | None = None
        if options.history_precision is not None:
            self.sharing = QuantizedHistory(options.history_precision, network.recurrent_size, self.device)
        self.trie = HistoryTrie(self.device)
        self._clock = clock
        networks = hidden_networks or [network]
        layer = HiddenLayer(networks, network, options.batching, options.hidden_products, self._counts, self._clock)
        self.expansion = HistoryExpansion(self.trie, self.hidden, layer, self.sharing)
        self.projections: ProjectionCache | None = None
        uses_loops = options.allows_loops and has_loops(self.device) and network.output_tables() is not None
        if network.has_projection and uses_loops:
            places = options.held_projections, options.capacity_bytes
            self.projections = ProjectionCache(self.hidden, layer, network.hidden_size, *places)
        self.capacity = self._capacity(options.capacity_bytes) if options.capacity_bytes is not None else None
        self._torch_engine = TorchEngine(
            self.expansion, self.output, self.recombination, self.capacity, options, self.reset
        )
        self._numba_engine: NumbaEngine | None = None
        if uses_loops:
            self._numba_engine = NumbaEngine(
                self.expansion, self.projections, self.recombination, self.capacity, options.loop_room
            )
        self._triton_engine: TritonEngine | None = None
        kernels = gpu_module("asr.lm.cached.engine_triton", self.device)
        if kernels is not None and self._can_queue(network, networks, options):
            self._triton_engine = kernels.TritonEngine(self.expansion, network, self.capacity)
        self.reset()

    @staticmethod
    def _can_queue(network: StatefulNetwork, hidden_networks: Sequence[StatefulNetwork], options: CacheOptions) -> bool:
        """Whether calls can leave everything to the device: no approximation that shares or drops rows, one network."""
        keeps_all = options.cache_scores and options.cache_hidden and options.batching == "frame"
        is_plain = options.recombination_length is None and options.history_precision is None
        is_plain = is_plain and options.hidden_products == "float32" and list(hidden_networks) == [network]
        return keeps_all and is_plain and network.can_be_captured and network.cacheable_terms == "none"

    def _capacity(self, capacity_bytes: int) -> Capacity:
        of_history = self.output.bytes_of_history
        of_best = 8 if self.recombination is not None and self.recombination.choice == "best" else 0
        # Tables with a key per node have as many slots as the table of edges; those with one per row up to four a row.
        costs = ByteCosts(
            BYTES_PER_SLOT * (1 if self.recombination is None else 2),
            BYTES_PER_NODE + of_best + (0 if self.sharing is None else of_history),
            self.hidden.bytes_per_row
            + self.output.bytes_of_groups
            + (of_history if self.sharing is None else 4 * BYTES_PER_SLOT),
        )
        if self.projections is not None:
            capacity_bytes -= self.projections.max_bytes
        kept_levels = _KEPT_LEVELS + self.network.num_history_words
        return Capacity(
            capacity_bytes, costs, self.expansion, self.output, self.recombination, self.sharing, kept_levels
        )

    @no_autograd()
    def reset(self) -> None:
        """Forgets every history; earlier context indices become invalid. Statistics are kept."""
        parts = self.trie, self.hidden, self.output, self.recombination, self.sharing, self.projections, self.capacity
        for part in (*parts, self._triton_engine):
            if part is not None:
                part.clear()
        row = self.hidden.append(self.network.initial_state().unsqueeze(0))
        self.trie.hidden_row[BEFORE_START] = int(row)

    @property
    def vocabulary(self) -> Vocabulary:
        return self.network.vocabulary

    def start(self, num_streams: int) -> Tensor:
        return torch.full((num_streams,), START, dtype=torch.int64, device=self.device)

    def first_state(self, num_streams: int) -> Tensor:
        return self.network.initial_state().repeat(num_streams, 1)

    @no_autograd()
    def start_from(self, state: Tensor) -> Tensor:
        """See `LanguageModel.start_from`; each start has a node of its own, except after the initial state."""
        context_idx = self.start(len(state))
        later = (state != self.first_state(1)).any(1).nonzero().squeeze(1)
        if later.numel():
            context_idx[later] = self._new_starts(state[later])
        return context_idx

    def _new_starts(self, state: Tensor) -> Tensor:
        """Nodes (R,) for `<s>` after sentences that left state (R, S): copies of the trie's first two nodes."""
        if self.capacity is not None:
            self.capacity.make_row_room(len(state), self.trie.parent[:0].long())
        before = self.trie.new_roots(len(state))
        self.trie.hidden_row.index_copy_(0, before, self.hidden.append(state).int())
        return self.trie.new_nodes(before, torch.full_like(before, BOS_ID))

    @no_autograd()
    def state_after(self, state: Tensor, sentences: Sequence[Sequence[int]]) -> Tensor:
        """See `LanguageModel.state_after`; `<s>` is read in place of the last `</s>`, as in training (`carry_state`).

        The network reads the words themselves, without the trie, so caches and approximations of histories do not
        matter.
        """
        begin = self._clock()
        state = state.clone()
        words = [[BOS_ID, *sentence] if len(sentence) else [] for sentence in sentences]
        for place in range(max(map(len, words), default=0)):
            row = [row for row, own in enumerate(words) if len(own) > place]
            word_id = torch.tensor([words[each][place] for each in row], device=self.device)
            state[row] = self.expansion.layer.step(state[row], word_id)
        self._counts.seconds_total += self._clock() - begin
        return state

    @no_autograd()
    def retain(self, live: Tensor) -> None:
        """See `LanguageModel.retain`. Only an engine with a capacity forgets, and nothing before the first call.

        If nothing is live and half of the capacity is used, everything is forgotten: compiled loops can be used only
        while there is room, and they save more time than the histories of earlier utterances.
        """
        if self.capacity is None:
            return
        has_fast_engine = self._numba_engine is not None or self._triton_engine is not None
        if live.numel() == 0 and has_fast_engine and self.capacity.is_half_used():
            self._counts.num_evictions += 1
            self._counts.num_evicted_contexts += self.trie.num_nodes
            self.reset()
        else:
            self.capacity.retain(live)

    @no_autograd()
    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        if self._triton_engine is not None and self._triton_engine.num_reservations:
            return self._triton_engine.score(context_idx, word_id)
        begin = self._clock()
        counts = self._counts
        num_edges = counts.num_edges
        answered = None if self._numba_engine is None else self._numba_engine.score(context_idx, word_id)
        log_prob, next_idx = answered or self._torch_engine.score(context_idx, word_id)
        if counts.num_edges > num_edges:
            counts.peak_bytes = max(counts.peak_bytes, self._bytes_held())
        if self.capacity is not None:
            self.capacity.count_uses(next_idx)
        counts.seconds_total += self._clock() - begin
        return log_prob, next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        log_prob, _ = self.score(context_idx, torch.full_like(context_idx, EOS_ID))
        return log_prob

    def reserve(self, num_queries: int) -> tuple[Tensor, ...] | None:
        return None if self._triton_engine is None else self._triton_engine.reserve(num_queries)

    def release(self, num_queries: int) -> bool:
        engine = self._triton_engine
        assert engine is not None
        try:
            had_room = engine.release(num_queries)
        except BaseException:
            # What the device has added is not known.
            self.reset()
            raise
        if engine.was_interrupted and not engine.num_reservations:
            self.reset()
        self._counts.peak_bytes = max(self._counts.peak_bytes, self._bytes_held())
        return had_room

    def lookup_tables(self) -> CachedLMTables | None:
        """The arrays that a compiled loop reads and adds to.

        None if the options or the network do not allow it, or if the capacity is used up.
        """
        return None if self._numba_engine is None else self._numba_engine.tables()

    @no_autograd()
    def expand(self, context_idx: Tensor, live: Tensor) -> None:
        """See `LanguageModel.expand`: computes the hidden rows of those contexts (K,) that have none."""
        if self._numba_engine is not None:
            begin = self._clock()
            self._numba_engine.take_in(context_idx, live)
            self._counts.seconds_total += self._clock() - begin

    def statistics(self) -> QueryStatistics:
        """The up-to-date record of this engine, which continues to count."""
        counts = self._counts
        counts.num_contexts = self.trie.num_nodes
        counts.num_hidden_held = self.hidden.rows.num_used
        counts.bytes_held = self._bytes_held()
        return counts

    def _bytes_held(self) -> int:
        parts = (self.trie, self.hidden, self.output, self.recombination, self.sharing, self.projections)
        return sum(part.num_bytes for part in parts if part is not None)
