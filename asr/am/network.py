"""What the rest of the program knows of an acoustic model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AcousticNetwork(Protocol):
    """Features in, frame log-probabilities over tokens out; blank is token 0."""

    subsampling_factor: int
    num_features: int
    num_tokens: int

    def __call__(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """features (N, T, F), num_frames (N,) -> natural log-probabilities (N, T', C) float32, num_frames' (N,)."""
        ...

    def all_outputs(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """As the call, with the outputs of intermediate layers, if there are any, before the last one."""
        ...

    def outputs_of_normal(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """As `all_outputs`, of features that the caller has normalised, with zeros behind each end."""
        ...
