"""`RnnLM`: any stateful network as a language model, behind the history trie.

Shapes: Q queries, R new edges, S state, H hidden, M history words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.lm.contract import StatefulNetwork
from asr.query.hidden_store import HiddenStore
from asr.query.normalizer_cache import NormalizerCache
from asr.query.trie import BEFORE_START, START, HistoryTrie
from asr.text.vocabulary import EOS_ID


class RnnLM:
    """A `LanguageModel` that does each piece of the network's work once.

    The hidden layer runs once a history, and only when the history is first asked for a successor; all such histories
    of a call go through it in one step.
    """

    def __init__(
        self,
        network: StatefulNetwork,
        hidden_dtype: str = "float32",
        cache_history_normalizers: bool = True,
        cache_group_normalizers: bool = True,
    ) -> None:
        self.network = network
        self.vocabulary = network.vocabulary
        self.device = network.initial_state().device
        self.trie = HistoryTrie(self.device)
        self.hidden = HiddenStore(network.state_size, hidden_dtype, self.device)
        self.output = NormalizerCache(network, cache_history_normalizers, cache_group_normalizers, self.device)
        self.reset()

    def reset(self) -> None:
        """Forgets every history; context indices handed out before mean nothing any more."""
        self.trie.clear()
        self.hidden.clear()
        self.output.clear()
        with torch.no_grad():
            row = self.hidden.append(self.network.initial_state().unsqueeze(0))
        self.trie.hidden_row[BEFORE_START] = int(row)

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>` for each stream, context_idx (num_streams,)."""
        return torch.full((num_streams,), START, dtype=torch.int64, device=self.device)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | history) and the history extended by the word: log_prob (Q,), next_idx (Q,)."""
        slot, missing = self.trie.find(context_idx, word_id)
        if missing is not None:
            self._add_edges(context_idx.index_select(0, missing), word_id.index_select(0, missing))
            # The table may have grown: slots are looked up again.
            slot, _ = self.trie.find(context_idx, word_id)
        return self.trie.edge_score.index_select(0, slot), self.trie.edge_node.index_select(0, slot).long()

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | history), (Q,)."""
        log_prob, _ = self.score(context_idx, torch.full_like(context_idx, EOS_ID))
        return log_prob

    @torch.no_grad()
    def _add_edges(self, context_idx: Tensor, word_id: Tensor) -> None:
        self._check_range(context_idx, word_id)
        slot, is_first = self.trie.add_edges(context_idx, word_id)
        first = is_first.nonzero().squeeze(1)
        slot, context_idx, word_id = (each.index_select(0, first) for each in (slot, context_idx, word_id))
        self.trie.edge_node[slot] = self.trie.new_nodes(context_idx, word_id).int()
        self.trie.edge_score[slot] = self._log_prob(context_idx, word_id)

    def _check_range(self, context_idx: Tensor, word_id: Tensor) -> None:
        for name, index, size in (
            ("word_id", word_id, len(self.vocabulary)),
            ("context_idx", context_idx, self.trie.nodes.capacity),
        ):
            low, high = torch.aminmax(index)
            if int(low) < 0 or int(high) >= size:
                raise IndexError(f"{name} runs from {int(low)} to {int(high)}; it must lie in 0 .. {size - 1}")

    def _log_prob(self, context_idx: Tensor, word_id: Tensor) -> Tensor:
        """The output layer's scores, (R,)."""
        self._require_rows(context_idx)
        row = self.trie.hidden_row.index_select(0, context_idx).long()
        hidden = self.hidden.read(row, self.network.state_size - self.network.hidden_size)
        history = self.trie.history(context_idx, self.network.num_history_words)
        return self.output.score(row, hidden, history, word_id)

    def _require_rows(self, context_idx: Tensor) -> None:
        """Computes the hidden rows that contexts (Q,) lack; ancestors without one level by level, the oldest first."""
        levels = []
        node = context_idx
        while True:
            lacking = (self.trie.hidden_row.index_select(0, node) < 0).nonzero().squeeze(1)
            if lacking.numel() == 0:
                break
            node = torch.unique(node.index_select(0, lacking))
            levels.append(node)
            node = self.trie.parent.index_select(0, node).long()
        for node in reversed(levels):
            # A node can lie at several distances above the asked ones.
            node = node[self.trie.hidden_row.index_select(0, node) < 0]
            row = self.trie.hidden_row.index_select(0, self.trie.parent.index_select(0, node)).long()
            state = self.network.step(self.hidden.read(row), self.trie.word.index_select(0, node).long())
            self.trie.hidden_row[node] = self.hidden.append(state).int()
