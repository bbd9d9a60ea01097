"""The recurrent language model: word vectors, recurrent layers, output layer.

Shapes: T steps, B streams, Q queries, E embedding, H output width, S state, M history words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.lm.gru import GruLayer
from asr.lm.maxent import HashedMaxEnt
from asr.lm.nce import NceOutput
from asr.lm.token_streams import TokenBatch
from asr.text.vocabulary import BOS_ID, Vocabulary


@dataclass(frozen=True)
class RnnLmConfig:
    """The network's shape; everything that its exported form needs besides weights and vocabulary.

    Attributes:
        embedding_size: width of the word vectors.
        hidden_size: width of each recurrent layer.
        num_layers: how many of them.
        tie_embeddings: one table of word vectors for input and output; the last layer is projected to its width.
        maxent_order: longest n-gram feature; 0 or 1 for none.
        maxent_size: number of hash values of the feature table.
        num_noise_words: NCE's noise words of a batch.
        noise_power: the noise is the unigram to this power.
        log_z: NCE's constant log Z, or where it starts.
        learn_log_z: whether it is learnt.
        dropout: on the word vectors and on each layer's output, in training.
        carry_state: whether a sentence starts in the state the one before ended in, in training and scoring.
    """

    embedding_size: int = 256
    hidden_size: int = 256
    num_layers: int = 1
    tie_embeddings: bool = True
    maxent_order: int = 0
    maxent_size: int = 1 << 22
    num_noise_words: int = 512
    noise_power: float = 0.75
    log_z: float = 0.0
    learn_log_z: bool = False
    dropout: float = 0.0
    carry_state: bool = False


class RnnLm(nn.Module):
    """Satisfies `asr.lm.contract.StatefulNetwork`; `forward` is the training loss over parallel streams.

    The state row is the layers' states, then, where there is one, the projection that the output layer reads.

    Args:
        vocabulary: the words.
        config: the shape.
        compute_dtype: matrix products of training, "float32" or "bfloat16"; parameters stay float32.
        compile_cell: compiles the recurrent layers' element-wise work (torch 2 and a C++ compiler).
    """

    def __init__(
        self, vocabulary: Vocabulary, config: RnnLmConfig, compute_dtype: str = "float32", compile_cell: bool = False
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.config = config
        width, num_words = config.hidden_size, len(vocabulary)
        self.embedding = nn.Embedding(num_words, config.embedding_size, sparse=True)
        nn.init.normal_(self.embedding.weight, std=config.embedding_size**-0.5)
        sizes = [config.embedding_size] + [width] * config.num_layers
        self.layers = nn.ModuleList(GruLayer(size, width, compute_dtype, compile_cell) for size in sizes[:-1])
        self.projection: nn.Linear | None = None
        self.hidden_size = width
        rows = self.embedding
        if config.tie_embeddings and width != config.embedding_size:
            self.projection = nn.Linear(width, config.embedding_size)
            self.hidden_size = config.embedding_size
        if not config.tie_embeddings:
            rows = nn.Embedding(num_words, width, sparse=True)
            nn.init.normal_(rows.weight, std=width**-0.5)
        self.state_size = config.num_layers * width + (self.hidden_size if self.projection is not None else 0)
        maxent = HashedMaxEnt(num_words, config.maxent_order, config.maxent_size) if config.maxent_order > 1 else None
        self.num_history_words = max(0, config.maxent_order - 1)
        self.output = NceOutput(
            rows, maxent, config.num_noise_words, config.noise_power, config.log_z, config.learn_log_z,
            compute_dtype=compute_dtype, compile_loss=compile_cell,
        )  # fmt: skip

    def forward(
        self, batch: TokenBatch, states: list[Tensor] | None, generator: torch.Generator
    ) -> tuple[Tensor, list[Tensor]]:
        """One window of all streams -> the loss summed over its words, and the layers' states after it."""
        hidden, states = self.hidden_sequence(batch, states)
        history = batch.history.transpose(0, 1).flatten(0, 1)
        loss = self.output.loss(hidden.flatten(0, 1), history, batch.target_id.t().reshape(-1), generator)
        return loss, states

    def hidden_sequence(self, batch: TokenBatch, states: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """What the output layer reads at each word, (T, B, H), and the layers' states after the window."""
        inputs = F.dropout(self.embedding(batch.input_id.t()), self.config.dropout, self.training)
        num_streams = inputs.shape[1]
        if states is None or batch.is_first:
            states = [inputs.new_zeros(num_streams, self.config.hidden_size) for _ in self.layers]
        is_kept = torch.ones_like(batch.is_start) if self.config.carry_state else ~batch.is_start
        keep = is_kept.t().unsqueeze(2).float()
        next_states = []
        for layer, state in zip(self.layers, states):
            inputs, state = layer(inputs, state, keep)
            inputs = F.dropout(inputs, self.config.dropout, self.training)
            next_states.append(state)
        return self._project(inputs), next_states

    def initial_state(self) -> Tensor:
        """The state before `<s>` is read: zeros, (S,)."""
        return torch.zeros(self.state_size, device=self.embedding.weight.device)

    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        """state (Q, S), word_id (Q,) -> next state (Q, S)."""
        inputs = self.embedding(word_id)
        width = self.config.hidden_size
        columns = []
        for idx, layer in enumerate(self.layers):
            assert isinstance(layer, GruLayer)
            inputs = layer.step(inputs, state[:, idx * width : (idx + 1) * width])
            columns.append(inputs)
        if self.projection is not None:
            columns.append(self._project(inputs))
        return torch.cat(columns, dim=1)

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """hidden (Q, H), history (Q, M), word_id (Q,) -> log_prob (Q,)."""
        return self.output.log_prob(hidden, history, word_id)

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        """The unnormalised score, (Q,)."""
        return self.output.word_score(hidden, history, word_id)

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        """The true log Z of each history, (Q,)."""
        return self.output.history_normalizer(hidden, history)

    def _project(self, hidden: Tensor) -> Tensor:
        return hidden if self.projection is None else self.projection(hidden)
