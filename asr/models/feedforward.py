"""Feed-forward networks over spliced frames, as in hybrid systems.

Shapes: N utterances, T frames, F features, T' output frames, C tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.audio.fbank import Splice
from asr.distributed import BatchDropout
from asr.kernels.linear import PackedLinear
from asr.models.interface import NormalizingNetwork
from asr.models.tdnnf import BYPASS_SCALE, ChainNetwork, FrameNorm, SharedDropout, semi_orthogonal_step


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
        dims = [num_features * (left_context + 1 + right_context), *[hidden_dim] * num_hidden_layers]
        self.hidden = nn.ModuleList(map(PackedLinear, dims, dims[1:]))
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
        spliced = self.splice(self.as_weights(features), num_frames)
        # Each group of frames is represented by its middle one.
        x = spliced[:, (self.subsampling_factor - 1) // 2 :: self.subsampling_factor]
        num_frames = (num_frames + self.subsampling_factor // 2) // self.subsampling_factor
        for layer in self.hidden:
            x = self.dropout(F.relu(layer(x)))
        return [F.log_softmax(self.out(x).float(), dim=-1)], num_frames


class ChainFeedForwardNetwork(ChainNetwork):
    """Hidden ReLU layers over spliced frames, trained by lattice-free MMI, with an output every 30 ms.

    A unit reads a span of positions of the layer below; positions of the features are frames, those of the first layer
    are three frames apart. If only the first span is longer than 1, the layers are fully connected: by default they are
    those of the hybrid systems of Lee et al. (2015), 5 layers of 2,000 units. With longer spans, units at different
    positions share their weights, as in a time-delay network (Waibel et al., 1989). Each layer's outputs are normalized
    over the frames of a batch, as in `Tdnnf`.

    Args:
        num_features: F.
        num_tokens: C; column 0 is silence.
        hidden_dims: for each layer the number of units at each position.
        spans: for each layer the number of positions that a unit reads.
        bottleneck_dim: if above 0, every layer but the first is factorized and has a bypass, as in `FactorizedLayer`:
            it reads its span through so many channels.
        small_dim: channels between the last layer and the outputs; 0 for none.
        has_auxiliary: see `Tdnnf`.
        smoothing: see `FilterSmoothing`.

    Raises:
        ValueError: there are not as many spans as layers, the frames that an output reads have no middle one, or a
            bypass has nothing to add to.
    """

    factor = 3

    def __init__(
        self,
        num_features: int,
        num_tokens: int,
        hidden_dims: Sequence[int] = (2000,) * 5,
        spans: Sequence[int] = (21, 1, 1, 1, 1),
        bottleneck_dim: int = 0,
        small_dim: int = 0,
        has_auxiliary: bool = False,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(num_features, num_tokens, self.factor, smoothing)
        if len(spans) != len(hidden_dims) or not spans or min(*spans, *hidden_dims) < 1:
            raise ValueError(f"spans are {spans} and hidden_dims {hidden_dims}; give a number above 0 for each layer")
        if bottleneck_dim and (len(set(hidden_dims)) > 1 or not all(span % 2 for span in spans[1:])):
            raise ValueError(
                f"spans are {spans} and hidden_dims {hidden_dims}; with a bottleneck_dim, give equal hidden_dims and, "
                "from the second on, odd spans"
            )
        self.spans = tuple(spans)
        num_frames = spans[0] + self.factor * sum(span - 1 for span in spans[1:])
        if num_frames % 2 == 0 or num_frames < self.factor:
            raise ValueError(f"with the spans {spans}, an output reads {num_frames} frames; make it 3, 5, 7 or so on")
        # The middle of an output's window is the middle one of its three frames.
        self.context_frames = (num_frames - self.factor) // 2
        inputs = [span * dim for span, dim in zip(spans, [num_features, *hidden_dims[:-1]], strict=True)]
        self.factors = nn.ModuleList()
        if bottleneck_dim:
            # The rows of one tap after the other, as in `FactorizedLayer`.
            self.factors.extend(PackedLinear(hidden_dims[0], span * bottleneck_dim) for span in spans[1:])
            inputs[1:] = [bottleneck_dim] * len(self.factors)
        self.hidden = nn.ModuleList(map(PackedLinear, inputs, hidden_dims))
        self.norms = nn.ModuleList(map(FrameNorm, hidden_dims))
        self.dropout = SharedDropout()
        self.branch = _outputs(hidden_dims[-1], small_dim, num_tokens)
        self.auxiliary = _outputs(hidden_dims[-1], small_dim, num_tokens) if has_auxiliary else None

    def semi_orthogonal_step(self) -> None:
        for factor, span in zip(self.factors, self.spans[1:], strict=False):  # there may be no factors
            assert isinstance(factor, PackedLinear)
            semi_orthogonal_step(factor.weight, span)

    def encode(self, features: Tensor) -> Tensor:
        """See `ChainNetwork`; (N, left + 3 T' + right, F) -> (N, T', D)."""
        windows = self.smooth(features).unfold(1, self.spans[0], self.factor)
        x = self._hidden(0, windows.flatten(2))
        for number, span in enumerate(self.spans[1:], start=1):
            if not self.factors:
                x = self._hidden(number, x.unfold(1, span, 1).flatten(2))
                continue
            taps = self.factors[number - 1](x).chunk(span, dim=2)
            middle = x[:, span // 2 : x.shape[1] - span // 2]
            inputs = sum(tap[:, begin : begin + middle.shape[1]] for begin, tap in enumerate(taps))
            x = torch.add(self._hidden(number, inputs), middle, alpha=BYPASS_SCALE)
        return x

    def _hidden(self, number: int, inputs: Tensor) -> Tensor:
        """A layer's outputs (N, positions, D) from what it reads at each position (N, positions, its inputs)."""
        layer, norm = self.hidden[number], self.norms[number]
        assert isinstance(layer, PackedLinear) and isinstance(norm, FrameNorm)
        outputs: Tensor = self.dropout(layer.normalized(inputs, norm))
        return outputs


def _outputs(in_dim: int, small_dim: int, num_tokens: int) -> nn.Module:
    """A layer that begins with equal scores for all tokens, behind a small one if `small_dim` is above 0."""
    out = PackedLinear(small_dim or in_dim, num_tokens)
    nn.init.zeros_(out.weight)
    nn.init.zeros_(out.bias)
    if not small_dim:
        return out
    layers = {"contract": PackedLinear(in_dim, small_dim), "contract_norm": FrameNorm(small_dim), "out": out}
    return nn.Sequential(OrderedDict(layers))
