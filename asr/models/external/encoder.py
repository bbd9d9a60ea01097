"""What transducers and attention models have in common: an encoder that reads waveforms.

Shapes: N utterances, L samples, T frames, E encoder dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.kernels.memory import on_cpu_by_default
from asr.models.external.base import as_batch, long_enough
from asr.models.external.streaming import ChunkReader
from asr.options import device_named

_Self = TypeVar("_Self", bound="ExternalEncoder")


class ExternalEncoder(ABC):
    """A network with an encoder.

    Attributes:
        name: shown to users.
        sampling_rate: of the waveforms that it reads, in Hz.
        frame_shift: seconds from one frame of the encoder to the next.
    """

    name: str
    sampling_rate: int
    frame_shift: float

    @abstractmethod
    def encode(self, waveform: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """(N, L) float in [-1, 1] at `sampling_rate` and (N,) -> encoded (N, T, E) and frames (N,) int64 on the host.

        Each utterance must have the frames that it has alone.
        """

    def stream(self) -> ChunkReader:
        """Begins a new utterance that is read in chunks: its `accept` returns encoded frames (T, E).

        Raises:
            AsrError: the encoder reads whole utterances.
        """
        raise AsrError(f"{self.name}: its encoder keeps no states and reads whole utterances; it cannot stream.")

    @property
    def device(self) -> torch.device:
        """The device of the networks."""
        return torch.device("cpu")

    def to(self: _Self, device: torch.device | str) -> _Self:
        """Moves the networks.

        Raises:
            AsrError: this machine has no such device, or they cannot run there.
        """
        if str(device).partition(":")[0] != "cpu":
            raise AsrError(f"{self.name}: this network runs on the CPU only; choose the device cpu.")
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
            AsrError: a waveform is empty, of another shape or type, or cannot be encoded, or the sampling rate is out
                of range.
        """
        batch = as_batch(waveform, sampling_rate, self.sampling_rate)
        with torch.no_grad():
            return self.encode(*long_enough(*batch, self.sampling_rate))


class TorchEncoder(ExternalEncoder):
    """One whose networks are one torch module, `network`."""

    network: Any

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.network.parameters()).device
        return device

    def to(self: _Self, device: torch.device | str) -> _Self:
        self.network.to(device_named(str(device)))  # type: ignore[attr-defined]
        return self
