"""A network that keeps states between chunks, for export: it includes what `asr.streaming` does around the network.

The states are the features before a chunk that its outputs depend on, the sums that normalize the features, and
whether speech has begun. Log-probabilities equal those of a stream through the bundle itself.

Shapes: T frames of a chunk and its right context, F features, H frames of history, T' frames of output, C tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.models.interface import LOG_PROB_IN_NOISE, STD_FLOOR, BoundedNetwork

STATES = ("left_features", "num_left", "feature_sums", "feature_count", "has_begun", "in_pause")
"""Names of the states, which all begin as zeros. Those after a chunk have the prefix `new_`."""


class StreamChunks(NamedTuple):
    """The chunks of a stream, in frames of output.

    Args:
        chunk: outputs per call.
        right: right context that the network sees.
        memory: the maximum number of frames that count in the normalization of the features.
        min_feature_std: standard deviation of the features below which the beginning of a stream is noise.
    """

    chunk: int
    right: int
    memory: int
    min_feature_std: float


class StreamingNetwork(nn.Module):
    """A network with the normalization of a stream's features, and the states that both need between calls.

    Args:
        network: in evaluation mode, traceable.
        chunks: sizes.
    """

    def __init__(self, network: BoundedNetwork, chunks: StreamChunks) -> None:
        super().__init__()
        self.network = network
        self.chunks = chunks
        self.factor = network.subsampling_factor
        self.num_frames = (chunks.chunk + chunks.right) * self.factor
        """T, frames of features per call."""
        self.shift = chunks.chunk * self.factor
        """Frames of features from the beginning of one call to that of the next."""
        self.num_history = -(-network.left_context // self.factor) * self.factor
        """H, frames of features kept before a chunk."""

    def initial_states(self) -> tuple[Tensor, ...]:
        """The states at the beginning of a stream, all zero, in the order of `STATES`."""
        num_features = self.network.num_features
        return (
            torch.zeros(1, self.num_history, num_features),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(2, num_features, dtype=torch.float64),
            torch.zeros(1, dtype=torch.float64),
            torch.zeros(1),
            torch.zeros(1),
        )

    def forward(
        self,
        x: Tensor,
        x_lens: Tensor,
        left_features: Tensor,
        num_left: Tensor,
        feature_sums: Tensor,
        feature_count: Tensor,
        has_begun: Tensor,
        in_pause: Tensor,
    ) -> tuple[Tensor, ...]:
        """Evaluates one chunk. Fewer frames than T end the stream and yield all remaining outputs.

        Args:
            x: (1, T, F) float32, zeros after the last frame.
            x_lens: (1,) int64, number of frames.
            left_features: (1, H, F), the features right before x at the end.
            num_left: (1,) int64, how many of them are valid.
            feature_sums: (2, F) float64, sums of values and squares.
            feature_count: (1,) float64, number of frames in these sums.
            has_begun, in_pause: (1,) float32, 1 for yes.

        Returns:
            Log-probabilities (1, T', C), the number of valid frames among them (1,), and the new states in the same
            order.
        """
        is_whole = x_lens == self.num_frames
        number = torch.arange(self.num_frames)
        is_seen = number < x_lens
        seen = x[0].double()

        # Features are normalized by all frames so far and those of this call.
        sums = feature_sums + _sums(seen, is_seen)
        count = (feature_count + x_lens.double()).clamp(min=1.0)
        mean = sums[0] / count
        std = (sums[1] / count - mean.square()).clamp(min=0.0).sqrt()
        begun = (has_begun > 0.5) | (std.mean().unsqueeze(0) >= self.chunks.min_feature_std)
        is_left = torch.arange(self.num_history) >= self.num_history - num_left
        window = torch.cat([left_features, x], dim=1)
        normal = (window - mean.float()) / std.float().clamp(min=STD_FLOOR)
        inside = torch.cat([is_left, is_seen])[None, :, None]
        normal = torch.where(inside, normal, torch.zeros_like(normal))
        outputs, _ = self.network.forward_normalized(normal, x_lens + self.num_history)
        log_prob = outputs[-1][:, self.num_history // self.factor :]
        noise = torch.full_like(log_prob, LOG_PROB_IN_NOISE)
        noise = torch.cat([torch.zeros_like(noise[:, :, :1]), noise[:, :, 1:]], dim=2)
        log_prob = torch.where(begun[:, None, None], log_prob, noise)

        whole = torch.full_like(x_lens, self.chunks.chunk)
        num_outputs = torch.where(
            is_whole, whole, torch.div(x_lens + self.factor - 1, self.factor, rounding_mode="floor")
        )
        # Only the first chunk of a pause counts.
        has_word = (log_prob[0].argmax(dim=1) > 0) & (torch.arange(log_prob.shape[1]) < num_outputs)
        has_speech = has_word.to(torch.float32).max().unsqueeze(0) > 0.5
        counts = has_speech | (in_pause < 0.5)
        is_added = is_seen & (number < torch.where(is_whole, torch.full_like(x_lens, self.shift), x_lens))
        num_added = is_added.double().sum().unsqueeze(0)
        most = float(self.chunks.memory * self.factor)
        overflows = feature_count + num_added > most
        kept = torch.where(overflows, (most - num_added) / feature_count.clamp(min=1.0), torch.ones_like(feature_count))
        new_sums = torch.where(counts, feature_sums * kept + _sums(seen, is_added), feature_sums)
        new_count = torch.where(counts, (feature_count + num_added).clamp(max=most), feature_count)
        return (
            log_prob,
            num_outputs,
            window[:, self.shift : self.shift + self.num_history],
            (num_left + self.shift).clamp(max=self.num_history),
            new_sums,
            new_count,
            begun.float(),
            1.0 - has_speech.float(),
        )


def _sums(features: Tensor, is_counted: Tensor) -> Tensor:
    """Sums of values and squares of the frames that count: (T, F), (T,) -> (2, F)."""
    features = torch.where(is_counted[:, None], features, torch.zeros_like(features))
    return torch.stack([features.sum(0), features.square().sum(0)])
