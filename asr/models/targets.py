"""What an acoustic model learns from a batch: a flat start, frame labels of a teacher, or the objective itself.

Shapes: N utterances, T frames of features, F features, T' output frames, C tokens, U tokens of a transcript.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from asr.models.alignment import IGNORED, TeacherAlignment, frame_cross_entropy, uniform_alignment
from asr.models.interface import Objective


class TrainingBatch(NamedTuple):
    """A batch after the network.

    Args:
        features: (N, T, F).
        num_features: (N,) frames of features.
        outputs: log-probabilities (N, T', C) of the intermediate layers and, last, of the final one.
        num_frames: (N,) output frames.
        tokens: (N, U) padded with 0.
        num_tokens: (N,).
    """

    features: Tensor
    num_features: Tensor
    outputs: Sequence[Tensor]
    num_frames: Tensor
    tokens: Tensor
    num_tokens: Tensor


class Target(Protocol):
    """Turns a batch into losses."""

    log_name: str

    def losses(self, batch: TrainingBatch) -> list[Tensor]:
        """One loss, (), for each output of the network that counts; the one to be logged is the last."""


class FlatStartTarget:
    """Frame cross-entropy with tokens spread uniformly over the speech; all outputs count the same."""

    log_name = "flat_start_loss"

    def losses(self, batch: TrainingBatch) -> list[Tensor]:
        """The mean over all outputs, ()."""
        max_frames = batch.outputs[-1].shape[1]
        alignment = uniform_alignment(batch.features, batch.num_frames, batch.tokens, batch.num_tokens, max_frames)
        return [torch.stack([frame_cross_entropy(output, alignment) for output in batch.outputs]).mean()]


class TeacherTarget:
    """Frame cross-entropy with the labels of a trained network, the priors of tokens taken out.

    Args:
        alignment: labels frames.
        subsampling_factor: frames of features for each output frame of the network in training.
        token_frames: (C,) number of frames of each token so far; updated in place.
    """

    log_name = "train_loss"

    def __init__(self, alignment: TeacherAlignment, subsampling_factor: int, token_frames: Tensor) -> None:
        self._alignment = alignment
        self._subsampling_factor = subsampling_factor
        self._token_frames = token_frames

    def losses(self, batch: TrainingBatch) -> list[Tensor]:
        """A loss for each output."""
        sequences = batch.features, batch.num_features, batch.tokens, batch.num_tokens
        shape = self._subsampling_factor, batch.num_frames, batch.outputs[-1].shape[1]
        label = self._alignment(*sequences, *shape)
        self._token_frames += label[label != IGNORED].bincount(minlength=len(self._token_frames))
        log_prior = (self._token_frames / self._token_frames.sum()).log()
        return [frame_cross_entropy(output, label, log_prior) for output in batch.outputs]


class ObjectiveTarget:
    """A sequence objective such as CTC, per token.

    Args:
        objective: gives the loss of each utterance.
    """

    log_name = "train_loss"

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def losses(self, batch: TrainingBatch) -> list[Tensor]:
        """A loss for each output."""
        num_tokens = batch.num_tokens.sum().clamp(min=1)
        transcripts = batch.tokens, batch.num_tokens
        return [self._objective(output, batch.num_frames, *transcripts).sum() / num_tokens for output in batch.outputs]
