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

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.memory import on_cpu_by_default
from asr.models.external.base import as_utterances, load_kind
from asr.text.ctc_tokens import CTCTokens

State = tuple[Tensor, ...]
"""What the prediction network remembers: tensors with one row per hypothesis."""

_FEWEST_SECONDS = 0.1

KINDS = {
    "transformers": "an AutoModelForRNNT or AutoModelForTDT of transformers, a hub name or a local folder, such as "
    "transformers:nvidia/parakeet-tdt-0.6b-v3",
    "onnx": "a folder with encoder, decoder and joiner as ONNX files and tokens.txt, as for sherpa-onnx",
    "torchaudio": "a transducer of torchaudio.pipelines, such as torchaudio:EMFORMER_RNNT_BASE_LIBRISPEECH",
}
"""The kinds of transducers: what may precede the colon of a name, and what follows it."""


class Transducer(ABC):
    """A transducer: the three networks and their tokens.

    Attributes:
        name: shown to users.
        tokens: the columns of the joint network's output, blank included.
        sampling_rate: of the waveforms that it reads, in Hz.
        frame_shift: seconds from one frame of the encoder to the next.
        durations: (D,) frames to advance, if the joint network scores durations; else empty.
    """

    name: str
    tokens: CTCTokens
    sampling_rate: int
    frame_shift: float
    durations: tuple[int, ...] = ()

    @abstractmethod
    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L) float in [-1, 1] at `sampling_rate` and (N,) -> encoded (N, T, E) and frames (N,) int64 on the host.

        Each utterance must have the frames that it has alone.
        """

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

    @property
    def device(self) -> torch.device:
        """The device of the networks."""
        return torch.device("cpu")

    def to(self, device: torch.device) -> Transducer:
        """Moves the networks.

        Raises:
            AsrError: they cannot run there.
        """
        if device.type != "cpu":
            raise AsrError(f"{self.name}: this transducer runs on the CPU only; choose the device cpu.")
        return self

    @on_cpu_by_default()
    def __call__(self, waveform: Any, sampling_rate: int | None = None) -> tuple[Tensor, Tensor]:
        """Encodes one utterance or several.

        Args:
            waveform: (L,), (N, L), or a list of (L,), tensors or NumPy arrays; floating-point samples in [-1, 1], or
                16-bit or 32-bit integer PCM.
            sampling_rate: of the samples; the network's own if None.

        Returns:
            Encoded frames (N, T, E), and (N,) int64 frames on the host.

        Raises:
            AsrError: a waveform is empty, of another shape or type, or cannot be encoded.
        """
        utterances = as_utterances(waveform, sampling_rate, self.sampling_rate)
        num_samples = torch.tensor([len(each) for each in utterances])
        fewest = int(_FEWEST_SECONDS * self.sampling_rate)
        padded = torch.nn.utils.rnn.pad_sequence(utterances, batch_first=True)
        padded = torch.nn.functional.pad(padded, (0, max(0, fewest - padded.shape[1])))
        with torch.no_grad():
            return self.encode(padded, num_samples.clamp(min=fewest))


class TorchTransducer(Transducer):
    """A transducer whose networks are one torch module, `network`."""

    network: Any

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.network.parameters()).device
        return device

    def to(self, device: torch.device) -> TorchTransducer:
        self.network.to(device)
        return self


@on_cpu_by_default()
def load_transducer(name: str, **options: Any) -> Transducer:
    """Loads the transducer named `KIND:NAME`, see `KINDS`; options are passed on to its class.

    Raises:
        AsrError: there is no such kind, its package is missing, or the network cannot be read.
    """
    return cast(Transducer, load_kind(name, KINDS, "asr.models.transducers", "a transducer", options))
