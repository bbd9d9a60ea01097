"""Feed-forward networks over spliced frames, as in hybrid systems.

Shapes: N utterances, T frames, F features, T' output frames, C tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from asr.audio.fbank import Splice
from asr.distributed import BatchDropout
from asr.kernels.linear import PackedLinear
from asr.models.interface import NormalizingNetwork
from asr.models.tdnnf import ChainNetwork, FrameNorm, SharedDropout


class FeedForwardNetwork(NormalizingNetwork):
    """Hidden ReLU layers over spliced frames, evaluated only at every n-th frame.

    The defaults are those of a typical hybrid system with 40 filterbanks and energy: 5 frames of context on each side,
    and 5 hidden layers of 2,000 units.

    Args:
        num_features: F.
        num_tokens: C, blank included.
        num_hidden_layers: number of ReLU layers.
        hidden_dim: size of each hidden layer.
        left_context: number of frames spliced before a frame.
        right_context: number of frames spliced after it.
        subsampling_factor: evaluate every n-th spliced frame (frame stacking and skipping).
        dropout: after each hidden layer.
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
        super().__init__(num_features, num_tokens, subsampling_factor)
        self.splice = Splice(left_context, right_context)
        self.hidden = _layers(num_features * (left_context + 1 + right_context), hidden_dim, num_hidden_layers)
        self.dropout = BatchDropout(dropout)
        self.out = PackedLinear(hidden_dim, num_tokens)
        for layer in self.hidden:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    @property
    def receptive_field(self) -> tuple[int, int]:
        """See `NormalizingNetwork`. The frames skipped between outputs count as an output's own frames."""
        return self.splice.left, self.splice.right

    def forward_normalized(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """Like `forward_all_layers`, for features that the caller has normalized, with zeros as padding."""
        spliced = self.splice(self.as_weights(features), num_frames)
        # Each group of frames is represented by its middle one.
        x = spliced[:, (self.subsampling_factor - 1) // 2 :: self.subsampling_factor]
        num_frames = (num_frames + self.subsampling_factor // 2) // self.subsampling_factor
        for layer in self.hidden:
            x = self.dropout(F.relu(layer(x)))
        return [F.log_softmax(self.out(x).float(), dim=-1)], num_frames


class ChainFeedForwardNetwork(ChainNetwork):
    """Hidden ReLU layers over spliced frames, trained by lattice-free MMI.

    The network of the hybrid systems of Lee et al. (2015), 5 hidden layers of 2,000 units, with an output every 30 ms.
    Each layer's outputs are normalized over the frames of a batch, as in `Tdnnf`.

    Args:
        num_features: F.
        num_tokens: C; column 0 is silence.
        num_hidden_layers: number of ReLU layers.
        hidden_dim: D.
        splice: frames of features before, and after, the middle one of each output.
        has_auxiliary: see `Tdnnf`.
        smoothing: see `FilterSmoothing`.
    """

    factor = 3

    def __init__(
        self,
        num_features: int,
        num_tokens: int,
        num_hidden_layers: int = 5,
        hidden_dim: int = 2000,
        splice: int = 10,
        has_auxiliary: bool = False,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(num_features, num_tokens, self.factor, smoothing)
        self.splice = splice
        self.hidden = _layers(num_features * (2 * splice + 1), hidden_dim, num_hidden_layers)
        self.norms = nn.ModuleList(FrameNorm(hidden_dim) for _ in self.hidden)
        self.dropout = SharedDropout()
        self.branch = _outputs(hidden_dim, num_tokens)
        self.auxiliary = _outputs(hidden_dim, num_tokens) if has_auxiliary else None

    @property
    def left_context(self) -> int:
        """See `BoundedNetwork`. The middle of an output's window is the middle one of its three frames."""
        return self.splice - 1

    @property
    def right_context(self) -> int:
        """See `BoundedNetwork`."""
        return self.splice - 1

    def encode(self, features: Tensor) -> Tensor:
        """See `ChainNetwork`; (N, left + 3 T' + right, F) -> (N, T', D)."""
        windows = self.smooth(features).unfold(1, 2 * self.splice + 1, self.factor)  # (N, T', F, 2 splice + 1)
        x = windows.flatten(2)
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            assert isinstance(layer, PackedLinear)
            x = self.dropout(norm(layer.rectified(x)))
        return x


def _layers(in_dim: int, dim: int, num: int) -> nn.ModuleList:
    sizes = [in_dim, *([dim] * num)]
    return nn.ModuleList(PackedLinear(size, next_size) for size, next_size in pairwise(sizes))


def _outputs(in_dim: int, num_tokens: int) -> PackedLinear:
    """A layer that begins with equal scores for all tokens."""
    layer = PackedLinear(in_dim, num_tokens)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
