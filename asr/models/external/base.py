"""The interface of external networks, and how they are named.

Shapes: N utterances, L samples, T frames, C tokens.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from asr.audio.resample import resample
from asr.errors import AsrError
from asr.text.ctc_tokens import CTCTokens

# How far the sum of a row of probabilities may be from 1, and its log from 0.
_TOLERANCE = 0.05

KINDS = {
    "torchaudio": "a CTC pipeline of torchaudio.pipelines, such as torchaudio:WAV2VEC2_ASR_BASE_960H",
    "transformers": "an AutoModelForCTC of transformers, a hub name or a local folder",
    "onnx": "an ONNX file, or a folder with model.onnx and tokens.txt",
    "torchscript": "a TorchScript file, with tokens.txt in it or next to it",
}
"""The kinds of networks: what may precede the colon of a name, and what follows it."""


class ExternalModel(ABC):
    """A CTC network: waveforms in, log-probabilities out.

    Attributes:
        name: shown to users.
        tokens: its output symbols.
        sampling_rate: of the waveforms that it reads, in Hz.
        frame_shift: seconds from one output frame to the next.
    """

    name: str
    tokens: CTCTokens
    sampling_rate: int
    frame_shift: float

    @abstractmethod
    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L) float in [-1, 1] at `sampling_rate` and (N,) -> log-probabilities (N, T, C) and frames (N,) int64."""

    def stream(self) -> StreamingModel:
        """Begins a new utterance that is read in chunks.

        Raises:
            AsrError: the network reads whole utterances.
        """
        raise AsrError(f"{self.name}: this network keeps no states and reads whole utterances; it cannot stream.")

    def __call__(self, waveform: Tensor | Sequence[Tensor], sampling_rate: int | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of one utterance or several.

        Args:
            waveform: (L,), (N, L), or a list of (L,), float in [-1, 1].
            sampling_rate: of the samples; the network's own if None.

        Returns:
            (N, T, C) natural logs and (N,) int64 frames.

        Raises:
            AsrError: a waveform is empty or of another shape, or the network's output does not fit its tokens.
        """
        utterances = _as_list(waveform)
        if sampling_rate is not None and sampling_rate != self.sampling_rate:
            utterances = [resample(each, sampling_rate, self.sampling_rate) for each in utterances]
        num_samples = torch.tensor([len(each) for each in utterances])
        padded = torch.nn.utils.rnn.pad_sequence(utterances, batch_first=True)
        with torch.no_grad():
            log_prob, num_frames = self.forward(padded, num_samples)
        return self.checked(log_prob), num_frames.to(torch.int64).cpu()

    def checked(self, log_prob: Tensor) -> Tensor:
        """Checks the width of the output; converts logits or probabilities to log-probabilities (N, T, C).

        Raises:
            AsrError: the number of columns is not the number of tokens.
        """
        if log_prob.dim() != 3 or log_prob.shape[2] != len(self.tokens):
            raise AsrError(
                f"{self.name}: the network's output has the shape {tuple(log_prob.shape)}, but it has "
                f"{len(self.tokens)} tokens; give the token list of this network."
            )
        log_prob = log_prob.detach().float()
        if not log_prob.numel() or float(log_prob[:, :1].logsumexp(2).abs().max()) <= _TOLERANCE:
            return log_prob
        first = log_prob[:, :1]
        if float(first.min()) >= 0.0 and float((first.sum(2) - 1.0).abs().max()) <= _TOLERANCE:
            return log_prob.log()
        return log_prob.log_softmax(2)


class StreamingModel(ABC):
    """A network that reads an utterance in chunks of features and keeps states between them."""

    tokens: CTCTokens
    sampling_rate: int
    frame_shift: float

    @abstractmethod
    def accept(self, waveform: Tensor, is_last: bool = False) -> Tensor:
        """The next samples, (L,) float in [-1, 1] -> log-probabilities (T, C) of the frames that they complete."""


class CallableModel(ExternalModel):
    """A network given as any Python function.

    Args:
        function: waveform (N, L), num_samples (N,) -> log-probabilities or logits (N, T, C), or these and frames (N,).
        tokens: its output symbols.
        sampling_rate: in Hz.
        frame_shift: in seconds.
        name: shown to users.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]],
        tokens: CTCTokens | Sequence[str],
        sampling_rate: int,
        frame_shift: float,
        name: str = "callable",
    ) -> None:
        self.name = name
        self._function = function
        self.tokens = tokens if isinstance(tokens, CTCTokens) else CTCTokens(tokens)
        self.sampling_rate = sampling_rate
        self.frame_shift = frame_shift

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """See `ExternalModel.forward`."""
        output = self._function(waveform, num_samples)
        if isinstance(output, tuple):
            return output[0], output[1]
        return output, frames_by_share(num_samples, waveform.shape[1], output.shape[1])


def load_acoustic_model(name: str, **options: Any) -> ExternalModel:
    """Loads the network named `KIND:NAME`, see `KINDS`; options are passed on to its class.

    Raises:
        AsrError: there is no such kind, its package is missing, or the network cannot be read.
    """
    kind, _, rest = name.partition(":")
    if kind not in KINDS or not rest:
        listed = "; ".join(f"{each}: {what}" for each, what in KINDS.items())
        raise AsrError(f"{name}: an acoustic model is named KIND:NAME, where KIND is one of {listed}.")
    module = importlib.import_module(f"asr.models.external.{kind}")
    return cast(ExternalModel, module.load(rest, **options))


def frames_by_share(num_samples: Tensor, max_samples: int, max_frames: int) -> Tensor:
    """Frames of each utterance, (N,), for networks that do not return them: in proportion to its length, rounded up."""
    share = num_samples.double() / max(1, max_samples) * max_frames
    return share.ceil().long().clamp(max=max_frames)


def package(name: str, what: str) -> Any:
    """Imports an optional package.

    Raises:
        AsrError: the package is missing or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise AsrError(f"{what} needs the package {name}, which cannot be imported here ({error}).") from error


def _as_list(waveform: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(waveform, Tensor) and waveform.dim() == 1:
        waveform = [waveform]
    utterances = [torch.as_tensor(each).float() for each in waveform]
    if not utterances or any(each.dim() != 1 or not len(each) for each in utterances):
        raise AsrError("give waveforms of shape (samples,) or (utterances, samples), and no empty ones.")
    return utterances
