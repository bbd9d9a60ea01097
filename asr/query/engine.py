"""`RnnLM`: any stateful network as a language model, behind the history trie.

Shapes: Q queries, R new edges, S state, H hidden, M history words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.hashing.hash_table import BYTES_PER_SLOT
from asr.lm.contract import LoopTables, StatefulNetwork
from asr.query.capacity import Capacity
from asr.query.expansion import Expansion
from asr.query.hidden_layer import HiddenLayer
from asr.query.hidden_store import HiddenStore
from asr.query.limits import ByteCosts
from asr.query.loop_access import LoopAccess
from asr.query.loop_scores import LoopScores
from asr.query.new_edges import NewEdges
from asr.query.output_cache import OutputCache
from asr.query.quantized_history import QuantizedHistory
from asr.query.recombination import Recombination
from asr.query.stage_clock import StageClock
from asr.query.statistics import QueryStatistics
from asr.query.tensor_scores import TensorScores
from asr.query.trie import BEFORE_START, BYTES_PER_NODE, START, HistoryTrie
from asr.text.vocabulary import EOS_ID

_KEPT_LEVELS = 32


class RnnLM:
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
        capacity_bytes: what trie, hidden rows and normalisers may take. Of the contexts only those that `mark_live`
            left out are forgotten for it; hidden rows are dropped at need, which costs time but changes no score.
            See `asr.query.capacity` for when it cannot be kept.
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
        self.vocabulary = network.vocabulary
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
        self._tensor_scores = TensorScores(new_edges, self.search_device, self.reset)
        is_exact = recombination_length is None and history_precision is None
        is_plain = cache_scores and cache_hidden and hidden_dtype == "float32"
        has_loop = is_exact and is_plain and self.device.type == self.search_device.type == "cpu"
        output = getattr(network, "output_for_loop", None)
        self._loop = LoopAccess(self.expansion, output, self.capacity) if has_loop and output is not None else None
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

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>` for each stream, context_idx (num_streams,)."""
        return torch.full((num_streams,), START, dtype=torch.int64, device=self.search_device)

    def mark_live(self, context_idx: Tensor) -> None:
        """Declares live the contexts (Q,) that the search still holds, and those that `score` returns from now on.

        Until the first call every context is live, and `start`'s always is. Only a capacity makes the engine forget
        those that are not.
        """
        if self.capacity is not None:
            self.capacity.mark_live(context_idx.to(self.device))

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

    def for_loop(self) -> LoopTables | None:
        """What a loop answers from in the place of `score`.

        None where the options or the network are not for that, and when the capacity is used up.
        """
        return None if self._loop is None else self._loop.tables()

    def expand(self, context_idx: Tensor, held: Tensor) -> None:
        """After each run of such a loop: contexts (K,) that lack their hidden rows get them; see `ExpandingLM`."""
        if self._loop is not None:
            begin = self._clock.now()
            self._loop.take_in(context_idx, held)
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
