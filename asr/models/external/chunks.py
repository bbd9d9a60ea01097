"""Runs utterances through networks that keep states from chunk to chunk, whatever library runs the network.

Shapes: N utterances, L samples, T frames of features in a chunk, F features, T' frames of output, C tokens.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from asr.audio.resample import FeatureStream
from asr.models.external.base import StreamingModel
from asr.text.ctc_tokens import CTCTokens


class ChunkedModel(Protocol):
    """A network with states.

    Attributes:
        takes_lengths: whether the last chunk of an utterance may have fewer frames than the others.
    """

    tokens: CTCTokens
    sampling_rate: int
    frame_shift: float

    @property
    def takes_lengths(self) -> bool: ...

    @property
    def extractor(self) -> Any:
        """Waveforms -> features, like `asr.audio.fbank.Fbank`."""

    def normal_features(self, features: Tensor) -> Tensor:
        """The extractor's features, scaled as in the network's training."""

    def chunk_sizes(self) -> tuple[int, int]:
        """Frames of a chunk, and frames from one chunk to the next."""

    def initial_states(self) -> Any:
        """The states before an utterance."""

    def step(self, chunk: Tensor, states: Any) -> tuple[Tensor, Any]:
        """A chunk (T, F) and the states before it -> log-probabilities (T', C) and the states after it."""


class ChunkedStream(StreamingModel):
    """One utterance through a network with states.

    Args:
        model: the network.
    """

    def __init__(self, model: ChunkedModel) -> None:
        self.tokens, self.sampling_rate, self.frame_shift = model.tokens, model.sampling_rate, model.frame_shift
        self._model = model
        self._states = model.initial_states()
        self._size, self._shift = model.chunk_sizes()
        self._features = FeatureStream(model.extractor)
        self._waiting = torch.zeros((0, model.extractor.feature_dim))

    def accept(self, waveform: Tensor, is_last: bool = False) -> Tensor:
        """See `StreamingModel.accept`. The last chunk is padded with silence, unless it may be shorter."""
        features = self._model.normal_features(self._features.push(waveform.float(), is_last))
        self._waiting = torch.cat([self._waiting, features])
        takes_rest = is_last and self._model.takes_lengths
        if is_last and len(self._waiting) and not takes_rest:
            num_chunks = max(1, math.ceil((len(self._waiting) - self._size) / self._shift) + 1)
            missing = self._size + (num_chunks - 1) * self._shift - len(self._waiting)
            silence = torch.full((missing, self._waiting.shape[1]), float(self._waiting.min()))
            self._waiting = torch.cat([self._waiting, silence])
        found = [torch.zeros((0, len(self.tokens)))]
        while len(self._waiting) >= self._size or (takes_rest and len(self._waiting)):
            log_prob, self._states = self._model.step(self._waiting[: self._size], self._states)
            found.append(log_prob)
            takes_rest = takes_rest and len(self._waiting) >= self._size
            self._waiting = self._waiting[self._shift :]
        return torch.cat(found)


def whole_in_chunks(model: ChunkedModel, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
    """Runs whole utterances (N, L), (N,) chunk by chunk -> log-probabilities (N, T', C) and their frames (N,)."""
    parts = [
        ChunkedStream(model).accept(each[:num], is_last=True)
        for each, num in zip(waveform, num_samples.tolist(), strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), torch.tensor([len(part) for part in parts])
