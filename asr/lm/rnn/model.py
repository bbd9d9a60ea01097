"""The recurrent language model: word vectors, recurrent layers and an output layer; and its configuration.

Shapes: T steps, B streams, Q queries, E embedding, H output width, S state, M history words.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import Tensor, nn

from asr.kernels.linear import PackedLinear
from asr.lm.interface import CacheableTerms, StatefulNetwork
from asr.lm.rnn.data import TokenBatch
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.outputs.base import OutputLayer
from asr.lm.rnn.outputs.hierarchical import HuffmanOutput
from asr.lm.rnn.outputs.log_partition import LogZ, Precision
from asr.lm.rnn.outputs.nce import NceOutput, NoiseWords, Normalization
from asr.lm.rnn.outputs.softmax import ClassSoftmaxOutput, FullSoftmaxOutput, default_num_classes
from asr.lm.rnn.recurrent import GruLayer, RowsOfWhole, SimpleRnnLayer, byte_gru, gru_step, seeded_dropout
from asr.lm.rnn.recurrent_numba import ByteGru
from asr.text.symbols import Vocabulary

_LARGEST_ORDER = 64  # of n-gram features; a history has a column for each of its words


@dataclass(frozen=True)
class RNNLMConfig:
    """The network's shape: all that its exported form needs besides weights and vocabulary.

    Attributes:
        embedding_size: width of the word vectors.
        hidden_size: width of each recurrent layer.
        num_layers: how many of them.
        cell: GRU, or a simple recurrent layer with this activation.
        output: noise-contrastive estimation, a Huffman tree, a class-factored or a full softmax.
        num_classes: of the class-factored softmax; 0 for the square root of the vocabulary's size.
        tie_embeddings: (NCE and full softmax) one table of word vectors for input and output; the last layer is
            projected to its width.
        maxent_order: longest n-gram feature; 0 or 1 for none.
        maxent_size: number of hash values of the feature table.
        num_noise_words: NCE's noise words per batch.
        noise_power: the noise is the unigram to this power.
        log_z: NCE's constant log Z, or its initial value.
        learn_log_z: whether it is learned.
        log_z_penalty: trains an NCE output layer by a softmax over all words instead, which suits a GPU: this is the
            weight of the squared difference between the true log Z and the constant; None for NCE.
        normalized: whether NCE's scores are normalized by a sum over the vocabulary instead of the constant log Z.
        normalizer_precision: (NCE and full softmax) precision of sums over the vocabulary; "int8" makes them about
            three times as fast on texts if the processor multiplies 8-bit integers, with errors of a few thousandths.
        dropout: on the word vectors and on each layer's output, in training.
        carry_state: whether a sentence starts in the final state of the sentence before, in training and scoring.
    """

    embedding_size: int = 256
    hidden_size: int = 256
    num_layers: int = 1
    cell: Literal["gru", "sigmoid", "relu"] = "gru"
    output: Literal["nce", "hierarchical", "class", "full"] = "nce"
    num_classes: int = 0
    tie_embeddings: bool = True
    maxent_order: int = 0
    maxent_size: int = 1 << 22
    num_noise_words: int = 512
    noise_power: float = 0.75
    log_z: float = 0.0
    learn_log_z: bool = False
    log_z_penalty: float | None = None
    normalized: bool = False
    normalizer_precision: Precision = "float32"
    dropout: float = 0.0
    carry_state: bool = False

    def __post_init__(self) -> None:
        """Checks the values, since configuration files may have been edited."""
        sizes = ["embedding_size", "hidden_size", "num_layers"]
        if self.maxent_order > 1:
            sizes.append("maxent_size")
        if self.output == "nce":
            sizes.append("num_noise_words")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.maxent_order > _LARGEST_ORDER:
            raise ValueError(f"maxent_order is {self.maxent_order}; it must be {_LARGEST_ORDER} or less")
        kinds = get_type_hints(RNNLMConfig)
        for name in ("cell", "output", "normalizer_precision"):
            if getattr(self, name) not in get_args(kinds[name]):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {get_args(kinds[name])}")
        if self.log_z_penalty is not None and (self.output != "nce" or self.log_z_penalty < 0):
            raise ValueError(f"log_z_penalty is {self.log_z_penalty}; it must be 0 or more, and the output nce")
        if not 0 <= self.noise_power < math.inf:
            raise ValueError(f"noise_power is {self.noise_power}; it must be 0 or more")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be 0 or more and below 1")


# From this number of histories on, those that end in the same word share its part of the gates.
_MIN_ROWS_TO_SHARE = 64


class RNNLanguageModel(nn.Module, StatefulNetwork):
    """Word vectors, recurrent layers and an output layer; `forward` is the training loss over parallel streams.

    A state row holds the layers' states. The output layer reads the last one, or its projection.

    Args:
        vocabulary: the words.
        config: the shape.
        compute_dtype: matrix products of training, "float32", or "bfloat16" where the hardware
            multiplies it; parameters stay float32.
        compile_cell: compiles the recurrent layers' element-wise work (torch 2 and a C++ compiler).
    """

    def __init__(
        self, vocabulary: Vocabulary, config: RNNLMConfig, compute_dtype: str = "float32", compile_cell: bool = False
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.config = config
        width, num_words = config.hidden_size, len(vocabulary)
        self.embedding = nn.Embedding(num_words, config.embedding_size, sparse=True)
        nn.init.normal_(self.embedding.weight, std=config.embedding_size**-0.5)
        sizes = (width if number else config.embedding_size for number in range(config.num_layers))
        self.layers = nn.ModuleList(
            GruLayer(size, width, compute_dtype, compile_cell)
            if config.cell == "gru"
            else SimpleRnnLayer(size, width, config.cell, compute_dtype)
            for size in sizes
        )
        self.projection: PackedLinear | None = None
        self.hidden_size = width
        is_tied = config.tie_embeddings and config.output in ("nce", "full")
        if is_tied and width != config.embedding_size:
            self.projection = PackedLinear(width, config.embedding_size)
            self.hidden_size = config.embedding_size
        self.state_size = config.num_layers * width
        self.num_history_words = max(0, config.maxent_order - 1)
        self.output: OutputLayer = build_output(
            config, num_words, self.hidden_size, self.embedding if is_tied else None, compute_dtype, compile_cell
        )

    @property
    def maxent(self) -> HashedMaxEnt | None:
        """The n-gram features, or None."""
        return self.output.maxent

    @property
    def has_projection(self) -> bool:
        """See `StatefulNetwork`: with a tied output layer, if states and word vectors differ in size."""
        return self.projection is not None

    @property
    def cacheable_terms(self) -> CacheableTerms:
        return self.output.cacheable_terms

    @property
    def can_be_captured(self) -> bool:
        if not isinstance(self.output, NceOutput):
            return False
        # Tables in the host's memory are of other classes.
        tables = (self.embedding, self.output.rows, self.output.bias, self.maxent)
        return all(table is None or isinstance(table, (nn.Embedding, HashedMaxEnt)) for table in tables)

    def forward(
        self, batch: TokenBatch, states: list[Tensor] | None, generator: torch.Generator
    ) -> tuple[Tensor, list[Tensor]]:
        """One window of all streams -> the loss summed over its words, and the layers' states after it.

        The generator draws the noise, and its seed decides what is dropped.
        """
        hidden, states = self.hidden_sequence(batch, states, generator.initial_seed())
        history = batch.history.transpose(0, 1).flatten(0, 1)
        loss = self.output.loss(hidden.flatten(0, 1), history, batch.target_id.t().reshape(-1), generator)
        return loss, states

    def hidden_sequence(
        self, batch: TokenBatch, states: list[Tensor] | None, seed: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """The output layer's input at each word, (T, B, H), and the layers' states after the window; `seed` is that of
        the dropout in training."""
        seeds = itertools.count(seed * (len(self.layers) + 1))
        inputs = self._dropped(self.embedding(batch.input_id.t()), next(seeds), batch)
        num_streams = inputs.shape[1]
        if states is None or batch.is_first:
            states = [inputs.new_zeros(num_streams, self.config.hidden_size) for _ in self.layers]
        is_kept = torch.ones_like(batch.is_start) if self.config.carry_state else ~batch.is_start
        keep = is_kept.t().unsqueeze(2).float()
        next_states = []
        for layer, state in zip(self.layers, states, strict=True):
            inputs, state = layer(inputs, state, keep)
            inputs = self._dropped(inputs, next(seeds), batch)
            next_states.append(state)
        return self._projected(inputs), next_states

    def input_gates(self, input_id: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's gates of the distinct words among input_id (L,): (D, G), and which of them each is (L,)."""
        occurs = torch.zeros(len(self.vocabulary), dtype=torch.int64, device=input_id.device)
        occurs[input_id] = 1
        first = self.layers[0]
        assert isinstance(first, (GruLayer, SimpleRnnLayer))
        return first.input_gates(self.embedding(occurs.nonzero()[:, 0])), (occurs.cumsum(0) - 1)[input_id]

    def hidden_packed(
        self, gates: Tensor, input_idx: Tensor, sizes: list[int], states: list[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs sentences side by side, without gradient: the output layer's input at each word, and the last states.

        gates (D, G) and input_idx (L,) are those of `input_gates`, step after step; step t is that of the first
        sizes[t] sentences. `states` is None at the sentences' start.
        """
        inputs, next_states = gates, []
        for idx, layer in enumerate(self.layers):
            assert isinstance(layer, (GruLayer, SimpleRnnLayer))
            if idx:
                gates, input_idx = layer.input_gates(inputs), torch.arange(len(inputs), device=inputs.device)
            state = gates.new_zeros(sizes[0], layer.hidden_size) if states is None else states[idx]
            inputs, state = layer.packed(gates, input_idx, sizes, state)
            next_states.append(state)
        return self._projected(inputs), next_states

    def initial_state(self) -> Tensor:
        return torch.zeros(self.state_size, dtype=torch.float32, device=next(self.layers.parameters()).device)

    def step(self, state: Tensor, word_id: Tensor) -> Tensor:
        return self._next(state, None, word_id)

    def branch(self, state: Tensor, before: Tensor, word_id: Tensor) -> Tensor:
        """state (R, S), before, word_id (Q,) -> what follows state[before] and word_id, (Q, S).

        On a CPU the products of a state are computed once for all words that follow it.
        """
        return self._next(state, before, word_id)

    def _next(self, state: Tensor, before: Tensor | None, word_id: Tensor) -> Tensor:
        if (gru := self._single_gru()) is not None:
            following = gru_step(*gru, state, before, word_id)
            if following is not None:
                return following
        width = self.config.hidden_size
        which = None
        if len(word_id) >= _MIN_ROWS_TO_SHARE and state.device.type == "cpu":
            # Many histories of a batch end in the same word. On a GPU the host would have to wait to find them.
            word_id, which = torch.unique(word_id, return_inverse=True)
        inputs = self.embedding(word_id)
        columns = []
        for idx, layer in enumerate(self.layers):
            assert isinstance(layer, (GruLayer, SimpleRnnLayer))
            inputs = layer.step(inputs, state[:, idx * width : (idx + 1) * width], which, before)
            which = None
            columns.append(inputs)
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def project(self, state: Tensor) -> Tensor:
        return self._projected(state[:, self.state_size - self.config.hidden_size :])

    def log_prob(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        return self.output.log_prob(hidden, history, word_id)

    def word_score(self, hidden: Tensor, history: Tensor, word_id: Tensor) -> Tensor:
        return self.output.word_score(hidden, history, word_id)

    def history_normalizer(self, hidden: Tensor, history: Tensor) -> Tensor:
        return self.output.history_normalizer(hidden, history)

    def group_of(self, word_id: Tensor) -> Tensor:
        return self.output.group_of(word_id)

    def group_normalizer(self, hidden: Tensor, history: Tensor, group: Tensor) -> Tensor:
        return self.output.group_normalizer(hidden, history, group)

    def path_log_prob(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, owner: Tensor, held: Tensor
    ) -> tuple[Tensor, int]:
        return self.output.path_log_prob(hidden, history, word_id, owner, held)

    def output_tables(self) -> tuple[Any, ...] | None:
        return self.output.output_tables()

    def step_tables(self) -> ByteGru | None:
        gru = self._single_gru()
        return None if gru is None else byte_gru(*gru, self.projection)

    def _single_gru(self) -> tuple[GruLayer, Tensor] | None:
        """The layer and the words' vectors, if loops can run the whole hidden layer."""
        # A `HostEmbedding` has no weight.
        if len(self.layers) == 1 and isinstance(self.layers[0], GruLayer) and isinstance(self.embedding, nn.Embedding):
            return self.layers[0], self.embedding.weight
        return None

    def exact_log_z(self, num_queries: int) -> LogZ | None:
        """See `OutputLayer.exact_log_z`."""
        return self.output.exact_log_z(num_queries)

    def normalized_log_prob(
        self, hidden: Tensor, history: Tensor, word_id: Tensor, log_z: LogZ | None
    ) -> tuple[Tensor, Tensor | None]:
        """Normalized log_prob (Q,) by the log Z of `exact_log_z`; for NCE also this log Z minus the constant, (Q,)."""
        if log_z is None:
            return self.log_prob(hidden, history, word_id), None
        true = log_z(hidden, history)
        excess = true - self.output.log_z if isinstance(self.output, NceOutput) else None
        return self.output.word_score(hidden, history, word_id) - true, excess

    def _dropped(self, values: Tensor, seed: int, batch: TokenBatch) -> Tensor:
        """values (T, B, E) with dropout; the mask is this process's part of the whole batch's mask."""
        probability, (_, num_streams, size) = self.config.dropout, values.shape
        if not self.training or not probability:
            return values
        num_all = batch.num_all_streams or num_streams
        whole = RowsOfWhole(num_streams * size, num_all * size, batch.first_stream * size)
        return seeded_dropout(values, probability, seed, whole)

    def _projected(self, hidden: Tensor) -> Tensor:
        if self.projection is None:
            return hidden
        projected: Tensor = self.projection(hidden)
        return projected


def build_output(
    config: RNNLMConfig,
    num_words: int,
    hidden_size: int,
    tied_rows: nn.Embedding | None,
    compute_dtype: str,
    compile_loss: bool,
) -> OutputLayer:
    """The output layer that a configuration names; `tied_rows` are the input's word vectors, where they are shared."""
    num_rows = num_words
    if config.output == "class":
        num_rows += config.num_classes or default_num_classes(num_words)
    maxent = HashedMaxEnt(num_rows, config.maxent_order, config.maxent_size) if config.maxent_order > 1 else None
    if config.output == "hierarchical":
        return HuffmanOutput(num_words, hidden_size, maxent)
    if config.output == "class":
        return ClassSoftmaxOutput(num_words, hidden_size, maxent, config.num_classes, compute_dtype)
    rows = tied_rows
    if rows is None:
        rows = nn.Embedding(num_words, hidden_size, sparse=True)
        nn.init.normal_(rows.weight, std=hidden_size**-0.5)
    if config.output == "full":
        return FullSoftmaxOutput(rows, maxent, compute_dtype, config.normalizer_precision)
    noise = NoiseWords(config.num_noise_words, config.noise_power)
    normalization = Normalization(
        config.log_z, config.learn_log_z, config.normalized, config.normalizer_precision, config.log_z_penalty
    )
    return NceOutput(rows, maxent, noise, normalization, compute_dtype, compile_loss)
