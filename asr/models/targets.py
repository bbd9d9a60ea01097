"""Training targets of acoustic models: a flat start, frame labels of a teacher, or the objective itself.

Shapes: N utterances, T frames of features, F features, T' output frames, C tokens, U tokens of a transcript.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from asr.distributed import total
from asr.models.alignment import IGNORED, TeacherAlignment, summed_cross_entropy, uniform_alignment
from asr.models.interface import Objective


class TrainingBatch(NamedTuple):
    """A batch with the network's outputs.

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

    def losses(self, batch: TrainingBatch) -> tuple[list[Tensor], Tensor]:
        """Computes the losses of a batch, which may be one process's share and have no utterances.

        Returns:
            losses: one sum, (), for each output of the network that counts; the last one is logged.
            count: the number of frames or tokens in these sums, ().
        """


class FlatStartTarget:
    """Frame cross-entropy with tokens spread uniformly over the speech; all outputs have the same weight."""

    log_name = "flat_start_loss"

    def losses(self, batch: TrainingBatch) -> tuple[list[Tensor], Tensor]:
        """The mean over all outputs, ()."""
        shape = batch.outputs[-1].shape[:2]
        alignment = batch.tokens.new_full(shape, IGNORED)
        if len(alignment):
            alignment = uniform_alignment(batch.features, batch.num_frames, batch.tokens, batch.num_tokens, shape[1])
        losses = torch.stack([summed_cross_entropy(output, alignment) for output in batch.outputs])
        return [losses.mean()], (alignment != IGNORED).sum()


class TeacherTarget:
    """Frame cross-entropy with the labels of a trained network, corrected for the tokens' priors.

    Args:
        alignment: the labels of frames.
        subsampling_factor: frames of features for each output frame of the network in training.
        token_frames: (C,) number of frames of each token so far; updated in place.
    """

    log_name = "train_loss"

    def __init__(self, alignment: TeacherAlignment, subsampling_factor: int, token_frames: Tensor) -> None:
        self._alignment = alignment
        self._subsampling_factor = subsampling_factor
        self._token_frames = token_frames

    def losses(self, batch: TrainingBatch) -> tuple[list[Tensor], Tensor]:
        """A loss for each output."""
        sequences = batch.features, batch.num_features, batch.tokens, batch.num_tokens
        max_frames = batch.outputs[-1].shape[1]
        label = batch.tokens.new_full((len(batch.tokens), max_frames), IGNORED)
        if len(label):
            label = self._alignment(*sequences, self._subsampling_factor, batch.num_frames, max_frames)
        counted = label[label != IGNORED]
        self._token_frames += total(counted.bincount(minlength=len(self._token_frames)))
        log_prior = (self._token_frames / self._token_frames.sum()).log()
        losses = [summed_cross_entropy(output, label, log_prior) for output in batch.outputs]
        return losses, label.new_tensor(len(counted))


class ObjectiveTarget:
    """A sequence objective such as CTC; losses are counted per token.

    Args:
        objective: computes the loss of each utterance.
    """

    log_name = "train_loss"

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def losses(self, batch: TrainingBatch) -> tuple[list[Tensor], Tensor]:
        """A loss for each output."""
        transcripts = batch.num_frames, batch.tokens, batch.num_tokens
        if not len(batch.tokens):
            return [output.sum() for output in batch.outputs], batch.num_tokens.sum()
        return [self._objective(output, *transcripts).sum() for output in batch.outputs], batch.num_tokens.sum()
