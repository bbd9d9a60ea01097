"""External networks that keep states from chunk to chunk, whatever library runs them.

`ChunkReader` runs an utterance through such a network. `StateEncoder` gives it the interface of `asr.models.windows`,
for streams of this program.

Shapes: N utterances, L samples, T frames of features in a chunk, F features, T' frames of output, C tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asr.audio.fbank import LOG_FLOOR, FeatureStream
from asr.errors import AsrError
from asr.graph.topology import with_last_boundary
from asr.models.external.base import ExternalModel, StreamingModel
from asr.models.external.network import ExternalNetwork


class Chunked(ABC):
    """A network that reads whole utterances or, if it keeps states, one chunk of features after the other.

    Attributes:
        extractor: waveforms -> features, like `asr.audio.fbank.Fbank`; None if the network reads samples.
        takes_lengths: whether the last chunk of an utterance may have fewer frames than the others.
    """

    extractor: Any
    takes_lengths: bool
    _states: Sequence[Any]

    @property
    def is_streaming(self) -> bool:
        """Whether the network keeps states between chunks."""
        return bool(self._states)

    def normal_features(self, features: Tensor) -> Tensor:
        """The extractor's features, scaled as in the network's training."""
        return features

    @abstractmethod
    def chunk_sizes(self) -> tuple[int, int]:
        """Frames of a chunk, and frames from one chunk to the next."""

    @abstractmethod
    def initial_states(self) -> Any:
        """The states before an utterance."""

    @abstractmethod
    def step(self, chunk: Tensor, states: Any) -> tuple[Tensor, Any]:
        """A chunk (T, F) and the states before it -> the output (T', C) and the states after it.

        Only if the network `takes_lengths` may a chunk have fewer frames than `chunk_sizes` says.
        """


class ChunkedModel(Chunked, ExternalModel):
    """Such a network whose outputs are log-probabilities."""

    @abstractmethod
    def forward_whole(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` of a network that keeps no states."""

    def forward(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_streaming:
            return self.forward_whole(waveform, num_samples)
        utterances = zip(waveform, num_samples.tolist(), strict=True)
        parts = [ChunkedStream(self).accept(each[:num], is_last=True) for each, num in utterances]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), torch.tensor([len(part) for part in parts])

    def stream(self) -> StreamingModel:
        return ChunkedStream(self) if self.is_streaming else super().stream()


class ChunkReader:
    """One utterance through a network with states.

    Args:
        network: the network.
        num_columns: C.

    Attributes:
        chunk_samples: samples from one chunk to the next.
    """

    def __init__(self, network: Chunked, num_columns: int) -> None:
        self._model, self._num_columns = network, num_columns
        self._states = network.initial_states()
        self._size, self._shift = network.chunk_sizes()
        self.chunk_samples = self._shift * network.extractor.frame_shift
        self._features = FeatureStream(network.extractor)
        self._waiting = torch.zeros((0, network.extractor.feature_dim))

    def accept(self, waveform: Tensor, is_last: bool = False) -> Tensor:
        """The next samples, (L,) float in [-1, 1] -> the outputs (T', C) that they complete.

        At the end, chunks are padded with silence, unless the last may be shorter. A chunk's outputs belong to the
        frames before the next chunk, so that one begins wherever frames are left.
        """
        features = self._model.normal_features(self._features.push(waveform.float(), is_last))
        self._waiting = torch.cat([self._waiting, features])
        takes_rest = is_last and self._model.takes_lengths
        if is_last and len(self._waiting) and not takes_rest:
            num_chunks = math.ceil(len(self._waiting) / self._shift)
            missing = self._size + (num_chunks - 1) * self._shift - len(self._waiting)
            silence = torch.full((missing, self._waiting.shape[1]), LOG_FLOOR)
            self._waiting = torch.cat([self._waiting, silence])
        found = [torch.zeros((0, self._num_columns))]
        while len(self._waiting) >= self._size or (takes_rest and len(self._waiting)):
            output, self._states = self._model.step(self._waiting[: self._size], self._states)
            found.append(output)
            takes_rest = takes_rest and len(self._waiting) >= self._size
            self._waiting = self._waiting[self._shift :]
        return torch.cat(found)


class ChunkedStream(ChunkReader, StreamingModel):
    """One utterance through a model with states.

    Args:
        model: the model.
    """

    def __init__(self, model: ChunkedModel) -> None:
        self.tokens, self.sampling_rate, self.frame_shift = model.tokens, model.sampling_rate, model.frame_shift
        super().__init__(model, len(model.tokens))


def checked_chunk_sizes(size: int, shift: int, name: str) -> tuple[int, int]:
    """Frames of a chunk and from one chunk to the next, which leave out no frames.

    Raises:
        AsrError: a size is below 1, or chunks are farther apart than long.
    """
    if not 1 <= shift <= size:
        raise AsrError(
            f"{name}: its metadata say that chunks have T = {size} frames and are decode_chunk_len = {shift} frames "
            "apart; the latter must be 1 or more and at most T; export it again."
        )
    return size, shift


class StateStream:
    """One stream: the samples that the network has not read yet, and the network's states.

    Args:
        network: the network that reads the samples.
        device: where log-probabilities are returned.

    Attributes:
        num_outputs: frames of output so far.
        is_done: whether all of a closed stream has been read.
    """

    def __init__(self, network: ExternalNetwork, device: torch.device) -> None:
        self._network = network
        self._model = network.model.stream()
        self.device = device
        self._held: list[Tensor] = []
        self._is_closed = False
        self.is_done = False
        self.num_outputs = 0
        self.begin_utterance()

    def begin_utterance(self, num_last: int = 0) -> None:
        """Begins a new utterance with the next outputs, or with the last `num_last` of those so far."""
        self.utterance: list[Tensor] = [torch.cat(self.utterance)[-num_last:].clone()] if num_last else []

    def push(self, features: Tensor) -> None:
        """Adds samples (L, 1)."""
        if len(features):
            self._held.append(features.squeeze(1).cpu())

    def close(self) -> None:
        """Ends the stream; no more samples may be pushed."""
        self._is_closed = True

    @property
    def is_ready(self) -> bool:
        """Whether there is something to read."""
        return bool(self._held) or (self._is_closed and not self.is_done)

    def read(self) -> Tensor:
        """Reads the next chunk's samples -> log-probabilities (T', C) of the frames that they complete, blank first.

        An utterance may end after each chunk, however many samples have been pushed.
        """
        held = self._held[0] if len(self._held) == 1 else torch.cat([*self._held, torch.zeros(0)])
        samples, rest = held[: self._model.chunk_samples], held[self._model.chunk_samples :]
        self._held = [rest] if len(rest) else []
        is_last = self._is_closed and not self._held
        log_prob = self._network.tokens.in_order_of_table(self._model.accept(samples, is_last=is_last))
        self.num_outputs += len(log_prob)
        self.is_done = is_last
        if is_last:
            boundary = self._network.tokens.boundary_id
            log_prob = with_last_boundary(log_prob[None], torch.tensor([len(log_prob)]), boundary)[0][0]
        self.utterance.append(log_prob.half())
        return log_prob.to(self.device)


class StateEncoder:
    """Runs streams through a network with states, in place of `asr.models.windows.ChunkedEncoder`.

    Args:
        network: a streaming one.

    Raises:
        AsrError: it reads whole utterances.
    """

    def __init__(self, network: ExternalNetwork) -> None:
        self._network = network
        network.model.stream()

    def open(self, device: torch.device) -> StateStream:
        """Opens a new stream."""
        return StateStream(self._network, device)

    def step(self, streams: Sequence[StateStream]) -> list[Tensor]:
        """log_prob (T', C) of the next frames of each stream; all must be ready."""
        return [stream.read() for stream in streams]

    def utterance_log_probs(self, streams: Sequence[StateStream]) -> list[Tensor]:
        """log_prob (T', C) of each stream's utterance so far, as before: the network reads an utterance only once."""
        return [torch.cat(stream.utterance).float().to(stream.device) for stream in streams]
