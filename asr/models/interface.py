"""The interfaces of acoustic models and of training objectives, and the normalization that all models begin with.

Shapes: N utterances, T frames of features, F features, T' output frames, C tokens, U tokens of a transcript.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.audio.segments import batches_of_similar_length

LOG_PROB_IN_NOISE = -20.0
"""Log-probability of all tokens except the blank as long as a stream has had only noise."""

ACOUSTIC_SECONDS = 30.0
"""Audio that an acoustic model reads at a time on a CPU, see `in_parts`."""


def valid_frames(num_frames: Tensor, max_frames: int) -> Tensor:
    """Which frames of a batch are not padding: num_frames (N,) -> (N, T) bool."""
    return torch.arange(max_frames, device=num_frames.device)[None, :] < num_frames[:, None]


STD_FLOOR = 1e-5
"""The smallest standard deviation that features are divided by."""

# In every second of speech there is a frame whose natural log energy is within `_SPEECH_RANGE` of the loudest frames,
# or above the softest ones by more than `_NOISE_SHARE` of the range between both.
_SPEECH_RANGE = 4.0
_NOISE_SHARE = 0.3

RANK = 10
"""Rank of the frames that count as loudest and softest, so that a click, which is shorter, does not."""

# Frames of a speaker's other recordings that count like an utterance's own: 10 s.
_SPEAKER_FRAMES = 1000


class SpeakerStatistics(NamedTuple):
    """Mean and variance of the features of a speaker's recordings, as `UtteranceCmvn.statistics` collects them.

    An utterance of a few seconds says little about a voice: its mean and variance depend on its words. With the frames
    of other recordings, up to 10 s of them, they depend on the speaker and the microphone.

    Attributes:
        mean: (F,).
        variance: (F,).
        num_frames: of speech and the edges of pauses.
    """

    mean: Tensor
    variance: Tensor
    num_frames: int

    @classmethod
    def of_nothing(cls, num_features: int, device: torch.device | None = None) -> SpeakerStatistics:
        """Statistics of no recording, with which each utterance is normalized on its own."""
        none = torch.zeros(num_features, device=device)
        return cls(none, none, 0)

    @classmethod
    def of_all(
        cls, parts: Iterable[SpeakerStatistics], num_features: int, device: torch.device | None = None
    ) -> SpeakerStatistics:
        """The statistics of all parts together, which may be none."""
        return reduce(operator.add, parts, cls.of_nothing(num_features, device))

    def normalized(self, norm: UtteranceCmvn, features: Tensor, num_frames: Tensor) -> Tensor:
        """Features (N, T, F) of num_frames (N,) frames, normalized with these statistics in addition to their own."""
        return norm(features, num_frames, self)

    @property
    def statistics(self) -> SpeakerStatistics:
        """Themselves, as for a speaker's transform."""
        return self

    def transformed(self, features: Tensor) -> Tensor:
        """Normalized features (..., F), unchanged: nothing else is known about the speaker."""
        return features

    def limited(self) -> SpeakerStatistics:
        """The same, but of 10 s at most: what counts besides an utterance's own frames."""
        return self._replace(num_frames=min(self.num_frames, _SPEAKER_FRAMES))

    def __add__(self, other: object) -> SpeakerStatistics:
        """The statistics of both."""
        if not isinstance(other, SpeakerStatistics):
            return NotImplemented
        num = self.num_frames + other.num_frames
        share = other.num_frames / max(num, 1)
        difference = other.mean - self.mean
        variance = torch.lerp(self.variance, other.variance, share) + share * (1.0 - share) * difference.square()
        return SpeakerStatistics(self.mean + share * difference, variance, num)


class UtteranceCmvn(nn.Module):
    """Normalizes each utterance by its own mean and its own standard deviation.

    Only the edges of a long pause count. Otherwise mean and variance would be those of noise, and normalized noise
    would look like speech. Of an utterance no longer than twice `pause_margin`, all frames count.

    Args:
        pause_margin: frames that are further than this from anything loud do not count.
    """

    def __init__(self, pause_margin: int = 50) -> None:
        super().__init__()
        self.pause_margin = pause_margin

    def forward(self, features: Tensor, num_frames: Tensor, speaker: SpeakerStatistics | None = None) -> Tensor:
        """Normalizes features (N, T, F) of num_frames (N,) frames -> (N, T, F); padding is 0.

        Args:
            features: the utterances.
            num_frames: their lengths.
            speaker: statistics of the utterances' speaker, which count like 10 s of each utterance, or less if they
                are of less.
        """
        inside = valid_frames(num_frames.to(features.device), features.shape[1])
        counted = self._counted(features, inside)[:, :, None]
        count = counted.sum(dim=1, keepdim=True)
        total = features.masked_fill(~counted, 0.0).sum(dim=1, keepdim=True)
        num_others = 0 if speaker is None else speaker.limited().num_frames
        if speaker is not None:
            total = total + num_others * speaker.mean.to(features)
        count = (count + num_others).clamp(min=1)
        mean = total / count
        centered = (features - mean).masked_fill(~inside[:, :, None], 0.0)
        squares = centered.square().masked_fill(~counted, 0.0).sum(dim=1, keepdim=True)
        if speaker is not None:
            distance = (speaker.mean.to(features) - mean).square()
            squares = squares + num_others * (speaker.variance.to(features) + distance)
        return centered / (squares / count).sqrt().clamp(min=STD_FLOOR)

    def statistics(self, features: Tensor, num_frames: Tensor) -> SpeakerStatistics:
        """Statistics of utterances of one speaker, features (N, T, F) of num_frames (N,) frames."""
        frames = features[self._counted(features, valid_frames(num_frames.to(features.device), features.shape[1]))]
        if not len(frames):
            return SpeakerStatistics.of_nothing(features.shape[2], features.device)
        return SpeakerStatistics(frames.mean(dim=0), frames.var(dim=0, unbiased=False), len(frames))

    def _counted(self, features: Tensor, inside: Tensor) -> Tensor:
        """Which frames are near speech, (N, T) bool; all frames of an utterance that is short or has nothing loud."""
        margin = self.pause_margin
        if features.shape[1] <= 2 * margin:
            return inside
        energy = features.mean(dim=2)
        loudest = energy.masked_fill(~inside, -torch.inf).topk(RANK, dim=1).values[:, -1:]
        softest = energy.masked_fill(~inside, torch.inf).topk(RANK, dim=1, largest=False).values[:, -1:]
        threshold = torch.maximum(loudest - _SPEECH_RANGE, softest + _NOISE_SHARE * (loudest - softest))
        is_loud = inside & (energy > threshold)
        near = are_near(is_loud, margin)
        is_short = inside.sum(dim=1, keepdim=True) <= 2 * margin
        counted = inside & (near | is_short)
        return counted | (inside & ~counted.any(dim=1, keepdim=True))


def are_near(frames: Tensor, margin: int) -> Tensor:
    """Which frames are at most `margin` from one of these, (N, T) bool -> (N, T) bool."""
    return F.max_pool1d(frames.float().unsqueeze(1), 2 * margin + 1, stride=1, padding=margin).squeeze(1) > 0


class AcousticNetwork(Protocol):
    """Features in, frame log-probabilities over tokens out; blank is token 0."""

    subsampling_factor: int
    num_features: int
    num_tokens: int

    def __call__(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """features (N, T, F), num_frames (N,) -> natural log-probabilities (N, T', C) float32, num_frames' (N,)."""

    def forward_all_layers(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """Like the call, with the outputs of intermediate layers, if any, before the last one."""

    def forward_normalized(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """Like `forward_all_layers`, for features that the caller has normalized, with zeros as padding."""


class NormalizingNetwork(nn.Module):
    """An `AcousticNetwork` that first normalizes each utterance to mean 0 and variance 1.

    Normalization is part of the network, not of the features, so that training and recognition cannot differ in it.

    Args:
        num_features: F.
        num_tokens: C, blank included.
        subsampling_factor: frames of features per output frame.
    """

    def __init__(self, num_features: int, num_tokens: int, subsampling_factor: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.num_tokens = num_tokens
        self.subsampling_factor = subsampling_factor
        self.input_norm = UtteranceCmvn()

    @property
    def receptive_field(self) -> tuple[int, int] | None:
        """Frames of features before and after its own that an output depends on; None if it depends on all."""
        return None

    def forward(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """features (N, T, F), num_frames (N,) -> natural log-probabilities (N, T', C) float32, num_frames' (N,)."""
        outputs, num_frames = self.forward_all_layers(features, num_frames)
        return outputs[-1], num_frames

    def forward_all_layers(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """Like `forward`, with the outputs of intermediate layers, if any, before the last one."""
        return self.forward_normalized(self.input_norm(features, num_frames), num_frames)

    def statistics_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> SpeakerStatistics:
        """The statistics of all batches of features (N, T, F) with their numbers of frames (N,)."""
        parts = (self.input_norm.statistics(*batch) for batch in batches)
        return SpeakerStatistics.of_all(parts, self.num_features, next(self.parameters()).device)

    def as_weights(self, features: Tensor) -> Tensor:
        """Converts normalized features to the weights' type, which `.half()` and `.bfloat16()` change."""
        return features.to(next(self.parameters()).dtype)

    def forward_normalized(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """Like `forward_all_layers`, for features that the caller has normalized, with zeros as padding."""
        raise NotImplementedError


class BoundedNetwork(NormalizingNetwork):
    """A `NormalizingNetwork` whose outputs depend on a bounded number of frames; it can run on pieces of a stream.

    Inputs beyond an utterance's ends are zeros, which are the mean after normalization.
    """

    @property
    def left_context(self) -> int:
        """Feature frames before those of the first output that the network reads."""
        raise NotImplementedError

    @property
    def right_context(self) -> int:
        """Feature frames after those of the last output that the network reads."""
        raise NotImplementedError

    @property
    def receptive_field(self) -> tuple[int, int]:
        return self.left_context, self.right_context

    @property
    def draft(self) -> BoundedNetwork:
        """The network that computes provisional outputs, which a whole utterance's outputs replace later."""
        return self

    def forward_in_context(self, features: Tensor) -> Tensor:
        """Normalized features with their context, (N, left + factor T' + right, F) -> log-probabilities (N, T', C)."""
        raise NotImplementedError

    def scores_in_context(self, features: Tensor) -> Tensor:
        """Like `forward_in_context`, but not normalized: all scores of a frame may be off by the same number."""
        return self.forward_in_context(features)

    def forward_normalized(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        factor = self.subsampling_factor
        behind = -features.shape[1] % factor + self.right_context
        log_prob = self.forward_in_context(F.pad(features, (0, 0, self.left_context, behind)))
        num_outputs = torch.div(num_frames + factor - 1, factor, rounding_mode="floor")
        return [log_prob], num_outputs


class Objective(Protocol):
    """A loss for each utterance from frame log-probabilities and token sequences."""

    def prepare(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Called once with the training transcripts before the first step; most objectives do not need them."""

    def __call__(self, log_prob: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
        """The loss of each utterance, (N,) float32; 0 where no alignment is possible.

        Args:
            log_prob: (N, T', C) natural log, blank at 0.
            num_frames: (N,) int64.
            tokens: (N, U) int64, padded with 0.
            num_tokens: (N,) int64.
        """


Outputs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A network's call: features (N, T, F), num_frames (N,) -> log-probabilities (N, T', C), num_frames' (N,)."""


def in_parts(network: Outputs, features: Tensor, num_frames: Tensor, max_frames: float) -> tuple[Tensor, Tensor]:
    """network(features, num_frames), on a CPU for a few utterances at a time.

    A batch whose activations exceed the processor's caches takes two to three times as long.

    Args:
        network: the network to call.
        features: (N, T, F).
        num_frames: (N,).
        max_frames: frames of features per call on a CPU, padding included; a call has at least one utterance.
    """
    if features.device.type != "cpu" or features.shape[0] * features.shape[1] <= max_frames:
        return network(features, num_frames)
    parts = [torch.tensor(part) for part in batches_of_similar_length(num_frames.tolist(), max_frames)]
    found = [network(features[part, : int(num_frames[part].max())], num_frames[part]) for part in parts]
    rows = [row for outputs, _ in found for row in outputs]
    order = torch.cat(parts).argsort()
    num_outputs = torch.cat([num for _, num in found])[order]
    return nn.utils.rnn.pad_sequence([rows[i] for i in order.tolist()], batch_first=True), num_outputs


def moves_only(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Restricts a function that `nn.Module._apply` calls for each weight to changes of the device, not of the type."""

    def moved(values: Tensor) -> Tensor:
        found = fn(values)
        return found if found.dtype == values.dtype else values.to(found.device)

    return moved
