"""The papers' feed-forward network over spliced frames."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from asr.audio.cmvn import UtteranceCmvn
from asr.audio.fbank import Splice
from asr.kernels.linear import PackedLinear


class FeedForwardNetwork(nn.Module):
    """Frames with their neighbours through hidden ReLU layers; for CTC only every n-th frame is evaluated.

    The index-table paper's network: 40 filterbanks and energy, 5 frames to each side, 5 hidden layers of 2,000.

    Args:
        num_features: F, 41 in the paper.
        num_tokens: C, blank included.
        num_hidden_layers: ReLU layers.
        hidden_dim: their size.
        left_context: frames before.
        right_context: frames behind.
        subsampling_factor: take every n-th spliced frame (stacking and skipping).
        dropout: behind each hidden layer.
    """

    def __init__(
        self,
        num_features: int,
        num_tokens: int,
        num_hidden_layers: int = 5,
        hidden_dim: int = 2000,
        left_context: int = 5,
        right_context: int = 5,
        subsampling_factor: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.num_tokens = num_tokens
        self.subsampling_factor = subsampling_factor
        self.input_norm = UtteranceCmvn()
        self.splice = Splice(left_context, right_context)
        sizes = [num_features * (left_context + 1 + right_context)] + [hidden_dim] * num_hidden_layers
        self.hidden = nn.ModuleList(PackedLinear(size, next_size) for size, next_size in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.out = PackedLinear(hidden_dim, num_tokens)
        for layer in self.hidden:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """features (N, T, F), num_frames (N,) -> natural log-probabilities (N, T', C) float32, (N,)."""
        outputs, num_frames = self.forward_all_layers(features, num_frames)
        return outputs[-1], num_frames

    def forward_all_layers(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """The one output as a list, as networks with intermediate outputs give them."""
        return self.forward_normalized(self.input_norm(features, num_frames), num_frames)

    def forward_normalized(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """As `forward_all_layers`, of features that the caller has normalised; padding must be zero."""
        spliced = self.splice(features, num_frames)
        # The middle frame of each group stands for it.
        x = spliced[:, (self.subsampling_factor - 1) // 2 :: self.subsampling_factor]
        num_frames = (num_frames + self.subsampling_factor // 2) // self.subsampling_factor
        for layer in self.hidden:
            x = self.dropout(F.relu(layer(x)))
        return [F.log_softmax(self.out(x).float(), dim=-1)], num_frames
