"""What the rest of the program knows of an acoustic model.

What a training objective must offer.

Which frames of a padded batch are real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class AcousticNetwork(Protocol):
    """Features in, frame log-probabilities over tokens out; blank is token 0."""

    subsampling_factor: int
    num_features: int
    num_tokens: int

    def __call__(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """features (N, T, F), num_frames (N,) -> natural log-probabilities (N, T', C) float32, num_frames' (N,)."""
        ...

    def forward_all_layers(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """As the call, with the outputs of intermediate layers, if there are any, before the last one."""
        ...

    def forward_normalized(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """As `forward_all_layers`, of features that the caller has normalised, with zeros behind each end."""
        ...


class Objective(Protocol):
    """A loss for each utterance from frame log-probabilities and token sequences."""

    def prepare(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Sees the training transcripts once before the first step; most objectives need nothing of them."""

    def __call__(self, log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
        """The loss of each utterance, (N,) float32, lower is better; 0 where no alignment is possible.

        Args:
            log_prob: (N, T, C) natural log, blank at 0.
            num_frames: (N,) int64.
            tokens: (N, U) int64, padded with 0.
            num_tokens: (N,) int64.
        """
        ...


def valid_frames(num_frames: Tensor, max_frames: int) -> Tensor:
    """True where a frame is real and not padding; num_frames (N,) -> (N, T) bool."""
    return torch.arange(max_frames, device=num_frames.device)[None, :] < num_frames[:, None]
