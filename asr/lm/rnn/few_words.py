"""A recurrent network for the words of a list of sentences: what depends on a word alone is computed once.

Shapes: Q queries, R states, S state width, W words, H the last layer's width, M history words.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.fixed_linear import FixedLinear
from asr.lm.contract import StatefulNetwork
from asr.lm.rnn.gru import GruLayer
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.nce import NceOutput, scores_by_rows
from asr.lm.rnn.rnn_lm import RnnLm
from asr.lm.rnn.simple_rnn import SimpleRnnLayer


def for_words(network: StatefulNetwork, word_id: Tensor) -> StatefulNetwork:
    """`FewWords` where the network is of a kind for which there is one, else the network itself."""
    if not isinstance(network, RnnLm) or not network.has_constant_normalizer:
        return network
    is_whole = isinstance(network.output.rows, nn.Embedding) and isinstance(network.maxent, HashedMaxEnt | None)
    return FewWords(network, word_id) if is_whole else network


class FewWords:
    """A `StatefulNetwork` equal to `network` for some words but for rounding, without gradient.

    Each word's part of the first layer's gates is made once; so is its output row, which is multiplied by the
    projection, where there is one, so that scores are read from the last layer and no state is projected.

    Args:
        network: its output layer is NCE's with one log Z, its tables on its device.
        word_id: (W,) int64, distinct, ascending: all words that will be read or scored.
    """

    def __init__(self, network: RnnLm, word_id: Tensor) -> None:
        output, first = network.output, network.layers[0]
        assert isinstance(output, NceOutput) and isinstance(first, (GruLayer, SimpleRnnLayer))
        self.network = network
        self.vocabulary = network.vocabulary
        self.state_size = network.recurrent_size
        self.hidden_size = network.config.hidden_size
        self.num_history_words = network.num_history_words
        self._word_id = word_id
        self._gates = first.input_gates(network.embedding(word_id))
        self._rows, self._bias = output.rows(word_id), output.bias(word_id)[:, 0] - output.log_z
        if network.projection is not None:
            self._bias = self._bias + self._rows @ network.projection.bias
            back = network.projection.weight.t()
            self._rows = FixedLinear()(self._rows, back, torch.zeros_like(back[:, 0]))

    def initial_state(self) -> Tensor:
        """(S,)."""
        return self.network.initial_state()[: self.state_size]

    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        """state (Q, S), word_id (Q,) -> next state (Q, S)."""
        return self._next(state, None, word_id)

    def branch(self, state: Tensor, before: Tensor, word_id: Tensor) -> Tensor:
        """state (R, S), before, word_id (Q,) -> what follows state[before] and word_id, (Q, S)."""
        return self._next(state, before, word_id)

    def _next(self, state: Tensor, before: Tensor | None, word_id: Tensor) -> Tensor:
        width = self.hidden_size
        gates, which = self._gates, self._index(word_id)
        columns: list[Tensor] = []
        for idx, layer in enumerate(self.network.layers):
            assert isinstance(layer, (GruLayer, SimpleRnnLayer))
            if idx:
                gates, which = layer.input_gates(columns[-1]), torch.arange(len(word_id), device=state.device)
            columns.append(layer.next_state(gates, state[:, idx * width : (idx + 1) * width], which, before))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,)."""
        row_idx = self._index(word_id)
        return scores_by_rows(hidden, history, word_id, self._rows, self._bias, row_idx, self.network.maxent)

    def _index(self, word_id: Tensor) -> Tensor:
        return torch.searchsorted(self._word_id, word_id)
