"""The shape of a recurrent language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from asr.lm.rnn.log_z import Precision


@dataclass(frozen=True)
class RnnLmConfig:
    """The network's shape; everything that its exported form needs besides weights and vocabulary.

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
        num_noise_words: NCE's noise words of a batch.
        noise_power: the noise is the unigram to this power.
        log_z: NCE's constant log Z, or where it starts.
        learn_log_z: whether it is learnt.
        normalized: NCE's scores are normalised by a sum over the vocabulary instead of the constant log Z.
        normalizer_precision: (NCE and full softmax) of sums over the vocabulary; "int8" makes them about three times
            as fast for texts where the processor multiplies 8-bit integers, and less exact by a few thousandths.
        dropout: on the word vectors and on each layer's output, in training.
        carry_state: whether a sentence starts in the state the one before ended in, in training and scoring.
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
    normalized: bool = False
    normalizer_precision: Precision = "float32"
    dropout: float = 0.0
    carry_state: bool = False

    def __post_init__(self) -> None:
        """Refuses what no network can be made of, which an edited description may say."""
        for name in ("embedding_size", "hidden_size", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        kinds = get_type_hints(RnnLmConfig)
        for name in ("cell", "output", "normalizer_precision"):
            if getattr(self, name) not in get_args(kinds[name]):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {get_args(kinds[name])}")
