"""Streams through networks with states: the interface of `asr.models.windows` for networks that need no windows.

Shapes: L samples, T frames of output, C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.graph.boundary import with_last_boundary
from asr.models.external.network import ExternalNetwork


class StateStream:
    """One stream: the samples that the network has not read yet, and the network's states.

    Args:
        network: the network that reads the samples.
        device: where log-probabilities are returned.
    """

    def __init__(self, network: ExternalNetwork, device: torch.device) -> None:
        self._network = network
        self._model = network.model.stream()
        self.device = device
        self._held: list[Tensor] = []
        self._is_closed = False
        self._is_done = False
        self._num_outputs = 0
        self.begin_utterance()

    def begin_utterance(self) -> None:
        """Begins a new utterance with the next outputs."""
        self.utterance: list[Tensor] = []

    def push(self, features: Tensor) -> None:
        """Adds samples (L, 1)."""
        if len(features):
            self._held.append(features.squeeze(1).cpu())

    def close(self) -> None:
        """Ends the stream; no more samples may be pushed."""
        self._is_closed = True

    @property
    def num_outputs(self) -> int:
        """Frames of output so far."""
        return self._num_outputs

    @property
    def is_ready(self) -> bool:
        """Whether there is something to read."""
        return bool(self._held) or (self._is_closed and not self._is_done)

    @property
    def is_done(self) -> bool:
        """Whether all of a closed stream has been read."""
        return self._is_done

    def read(self) -> Tensor:
        """Reads all samples so far -> log-probabilities (T, C) of the frames that they complete, blank first."""
        samples = torch.cat(self._held) if self._held else torch.zeros(0)
        self._held = []
        log_prob = self._network.blank_first(self._model.accept(samples, is_last=self._is_closed))
        self._num_outputs += len(log_prob)
        self._is_done = self._is_closed
        if self._is_done:
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
        """log_prob (T, C) of the next frames of each stream; all must be ready."""
        return [stream.read() for stream in streams]

    def hear_again(self, streams: Sequence[StateStream]) -> list[Tensor]:
        """log_prob (T, C) of each stream's utterance so far, as before: the network reads an utterance only once."""
        return [torch.cat(stream.utterance).float().to(stream.device) for stream in streams]
