"""Audio for networks from elsewhere, and what all of them must do with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.models.external.base import ExternalModel


def noise(seconds: float, seed: int = 0) -> Tensor:
    return 0.1 * torch.randn(int(16000 * seconds), generator=torch.Generator().manual_seed(seed))


def outputs_as_alone(model: ExternalModel, batch: Sequence[Tensor], atol: float) -> tuple[Tensor, Tensor]:
    """The outputs of a batch, whose utterances must have the same ones alone."""
    log_prob, num_frames = model(batch)
    for utterance, found, num in zip(batch, log_prob, num_frames, strict=True):
        single, (num_alone,) = model(utterance)
        assert num == num_alone
        assert torch.allclose(found[:num], single[0][:num], atol=atol)
    return log_prob, num_frames
