"""Adaptation of an acoustic model to a speaker, from recordings without transcripts.

The recognizer's own results take the place of transcripts. A scale and a shift of each normalized feature are trained
by lattice-free MMI (Povey et al. 2016), the objective of the network itself; the network's weights stay as they are.
With few parameters and few steps, wrong words do little harm. A transform of the features for each speaker is the idea
of constrained maximum likelihood linear regression (Gales 1998); Wang and Woodland (2004) trained such transforms by a
sequence objective.

Shapes: T frames of features, F features, T' output frames, C columns, N pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.graph.context import TiedStates
from asr.graph.denominator_graph import DenominatorGraph
from asr.models.interface import NormalizingNetwork, SpeakerStatistics, UtteranceCmvn, valid_frames
from asr.models.lfmmi import LfMmi, NumeratorPiece, numerator_piece

_PIECE = 60  # output frames
_TOLERANCE = 1.5  # output frames by which a phone may begin earlier or end later
# Output frames per step: 36 s of speech. With less, a step would follow single utterances.
_FRAMES_PER_STEP = 1200
_LEARNING_RATE = 0.02
_NUM_EPOCHS = 6


class SpeakerTransform(NamedTuple):
    """A scale and a shift of a speaker's normalized features.

    Attributes:
        scale: (F,) float32.
        shift: (F,) float32.
        statistics: what the features are normalized with, besides their own mean and variance.
    """

    scale: Tensor
    shift: Tensor
    statistics: SpeakerStatistics | None = None

    @classmethod
    def identity(cls, num_features: int, device: torch.device | None = None) -> SpeakerTransform:
        """The transform that changes nothing."""
        return cls(torch.ones(num_features, device=device), torch.zeros(num_features, device=device))

    def normalized(self, norm: UtteranceCmvn, features: Tensor, num_frames: Tensor) -> Tensor:
        """Features (N, T, F) of num_frames (N,) frames, normalized and transformed."""
        return self(norm(features, num_frames, self.statistics), num_frames)

    def __call__(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """Normalized features (N, T, F) of num_frames (N,) frames -> (N, T, F); padding stays 0."""
        inside = valid_frames(num_frames.to(features.device), features.shape[1])
        return self.transformed(features).masked_fill(~inside[:, :, None], 0.0)

    def transformed(self, features: Tensor) -> Tensor:
        """Normalized features (..., F) -> (..., F)."""
        return features * self.scale.to(features.device) + self.shift.to(features.device)


class RecognizedSpeech(NamedTuple):
    """A segment of a speaker's recording and what was recognized in it.

    Attributes:
        features: (T, F), not normalized.
        runs: the columns of the best path, in output frames, as `Hypothesis.phones` has them.
    """

    features: Tensor
    runs: tuple[tuple[int, int, int], ...]


Speaker = SpeakerStatistics | SpeakerTransform
"""What is known about a speaker."""


def score_of_speaker(
    network: NormalizingNetwork, features: Tensor, num_frames: Tensor, speaker: Speaker
) -> tuple[Tensor, Tensor]:
    """Calls the network for utterances of a known speaker: (N, T, F), (N,) -> (N, T', C), (N,)."""
    normal = speaker.normalized(network.input_norm, features, num_frames)
    outputs, num_outputs = network.forward_normalized(normal, num_frames)
    return outputs[-1], num_outputs


def adapt(
    network: NormalizingNetwork,
    states: TiedStates,
    denominator: DenominatorGraph,
    speech: Sequence[RecognizedSpeech],
    statistics: SpeakerStatistics | None = None,
) -> SpeakerTransform:
    """Trains the transform of a speaker.

    Args:
        network: in evaluation mode; it is not changed.
        states: the tied states that are its columns.
        denominator: all phone sequences, as in its training.
        speech: of one speaker. Segments without words, or with less than 1.8 s of speech, are not used.
        statistics: of the speaker, a part of the transform.

    Returns:
        The transform; the identity after normalization if there is nothing to learn from.
    """
    device = next(network.parameters()).device
    start = SpeakerTransform.identity(network.num_features, device)
    transform = SpeakerTransform(start.scale.requires_grad_(), start.shift.requires_grad_(), statistics)
    optimizer = torch.optim.Adam([transform.scale, transform.shift], lr=_LEARNING_RATE)
    objective = LfMmi(denominator)
    spoken = [(each, numerator_pieces(states, each.runs)) for each in speech if each.runs]
    generator = torch.Generator().manual_seed(0)
    for _ in range(_NUM_EPOCHS):
        order = torch.randperm(len(spoken), generator=generator).tolist()
        waiting: list[tuple[RecognizedSpeech, list[NumeratorPiece]]] = []
        for position, index in enumerate(order):
            waiting.append(spoken[index])
            num_frames = sum(len(pieces) for _, pieces in waiting) * _PIECE
            if num_frames >= _FRAMES_PER_STEP or (num_frames and position + 1 == len(order)):
                _step(network, objective, transform, waiting)
                optimizer.step()
                waiting = []
    return SpeakerTransform(transform.scale.detach(), transform.shift.detach(), statistics)


def numerator_pieces(states: TiedStates, runs: Sequence[tuple[int, int, int]]) -> list[NumeratorPiece]:
    """A path in pieces of 60 output frames: its phones, and silence in the gaps between them."""
    phones: list[int] = [0]
    starts: list[int] = [0]
    end = 0
    for phone, first, after in states.phones_of_runs(runs):
        if first > end and phones[-1] != 0:
            phones.append(0)
            starts.append(end)
        phones.append(phone)
        starts.append(first)
        end = after
    columns, start = states.columns_of(np.array(phones)), np.array(starts, dtype=np.float64)
    return [
        numerator_piece(*columns, start - begin, _PIECE, _TOLERANCE) for begin in range(0, end - _PIECE + 1, _PIECE)
    ]


def _step(
    network: NormalizingNetwork,
    objective: LfMmi,
    transform: SpeakerTransform,
    speech: Sequence[tuple[RecognizedSpeech, list[NumeratorPiece]]],
) -> None:
    """Sets the transform's gradient to that of the objective per frame."""
    scores: list[Tensor] = []
    pieces: list[NumeratorPiece] = []
    with torch.enable_grad(), torch.autocast(transform.scale.device.type, enabled=False):
        for (features, _), own in speech:
            num_frames = torch.tensor([len(features)], device=features.device)
            score, _ = score_of_speaker(network, features[None], num_frames, transform)
            scores += list(score[0].split(_PIECE)[: len(own)])
            pieces += own
        loss = objective(torch.stack(scores).float().cpu(), pieces).loss
        total = loss.sum() / (len(pieces) * _PIECE)
        # The weights need no gradient.
        transform.scale.grad, transform.shift.grad = torch.autograd.grad(total, [transform.scale, transform.shift])
