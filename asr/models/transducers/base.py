"""The interface of transducers, and how they are named.

A transducer (Graves, Sequence transduction with recurrent neural networks, 2012) has three networks. The encoder reads
the audio. The prediction network reads the tokens so far. The joint network combines one frame of the former with one
output of the latter, and scores the next token or the blank, which leads to the next frame. A token-and-duration
transducer (Xu et al., Efficient sequence transduction by jointly predicting tokens and durations, ICML 2023) also
scores how many frames to advance.

Shapes: N utterances, L samples, T frames, E encoder dimensions, K hypotheses, P prediction dimensions, C tokens, D
durations.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

from torch import Tensor

from asr.kernels.memory import on_cpu_by_default
from asr.models.external.base import load_kind
from asr.models.external.encoder import ExternalEncoder
from asr.text.ctc_tokens import CTCTokens

State = tuple[Tensor, ...]
"""What the prediction network remembers: tensors with one row per hypothesis."""

KINDS = {
    "transformers": "an AutoModelForRNNT or AutoModelForTDT of transformers, a hub name or a local folder, such as "
    "transformers:nvidia/parakeet-tdt-0.6b-v3",
    "onnx": "a folder with encoder, decoder and joiner as ONNX files and tokens.txt, as for sherpa-onnx",
    "torchaudio": "a transducer of torchaudio.pipelines, such as torchaudio:EMFORMER_RNNT_BASE_LIBRISPEECH",
}
"""The kinds of transducers: what may precede the colon of a name, and what follows it."""


class Transducer(ExternalEncoder):
    """A transducer: the three networks and their tokens; see also `ExternalEncoder`.

    Attributes:
        tokens: the columns of the joint network's output, blank included.
        durations: (D,) frames to advance, if the joint network scores durations; else empty.
    """

    tokens: CTCTokens
    durations: tuple[int, ...] = ()

    @abstractmethod
    def start(self) -> tuple[Tensor, State]:
        """The prediction network's output before the first token, (1, P), and its state, one row in each tensor."""

    @abstractmethod
    def predict(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """Reads a token after each of some states.

        Args:
            token: (K,) int64 columns, none of them the blank.
            state: K rows.

        Returns:
            The outputs (K, P), and the states after the tokens.
        """

    @abstractmethod
    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Frames (K, E) and outputs of the prediction network (K, P) -> logits (K, C + D); durations come last."""


@on_cpu_by_default()
def load_transducer(name: str, **options: Any) -> Transducer:
    """Loads the transducer named `KIND:NAME`, see `KINDS`; options are passed on to its class.

    Raises:
        AsrError: there is no such kind, its package is missing, or the network cannot be read.
    """
    return cast(Transducer, load_kind(name, KINDS, "asr.models.transducers", "a transducer", options))
