"""Networks that lattice-free MMI trains: what they share, factorized time-delay networks (TDNN-F), and ensembles.

`Tdnnf` is that of Povey et al. (2018). Networks that were trained alike, but from other initial weights, err in
different places. The mean of their log-probabilities, normalized again, is that of a product of experts (Hinton 2002),
with equal exponents that sum to 1 (`Ensemble`).

Shapes: N utterances, T frames, F features, T' output frames, D channels, B channels of a bottleneck, C tokens, R frames
of all utterances.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.distributed import current_share, draw_rows, total
from asr.kernels.byte_products import Int8Layers, LayerWeights, joined_taps
from asr.kernels.linear import ChannelsLastConv2d, KeptWhileUnchanged, PackedLinear, multiplies_bytes, norm_as_product
from asr.models.interface import BoundedNetwork
from asr.serialization import ACOUSTIC_MODEL_CLASSES, ModelSpec, build_network

BYPASS_SCALE = 0.66
"""What a layer's input is multiplied by before it is added to the output."""


class ChainNetwork(BoundedNetwork):
    """A network of bounded context that lattice-free MMI can train (`asr.models.chain_training`).

    Its scores are normalized over the outputs of each frame. That changes neither lattice-free MMI nor the search.

    Args:
        num_features: F.
        num_tokens: C; column 0 is silence.
        subsampling_factor: frames of features per output frame.
        smoothing: see `FilterSmoothing`.

    Attributes:
        context_frames: feature frames that the network reads before those of the first output, and after the last.
        smooth: what `encode` begins with.
        branch: from `encode`'s output to a score for each token.
        auxiliary: a second branch, for cross-entropy regularization; None unless the network is trained.
    """

    context_frames: int
    branch: nn.Module
    auxiliary: nn.Module | None

    def __init__(self, num_features: int, num_tokens: int, subsampling_factor: int, smoothing: float) -> None:
        super().__init__(num_features, num_tokens, subsampling_factor)
        self.smooth = FilterSmoothing(smoothing)

    @property
    def left_context(self) -> int:
        return self.context_frames

    @property
    def right_context(self) -> int:
        return self.context_frames

    def encode(self, features: Tensor) -> Tensor:
        """The branches' input: normalized features with context (N, left + factor T' + right, F) -> (N, T', D)."""
        raise NotImplementedError

    def semi_orthogonal_step(self) -> None:
        """Applies the constraint of the network's factorized layers, if any; call it every few training steps."""

    def set_dropout(self, probability: float) -> None:
        """Sets the probability of every `SharedDropout`."""
        for module in self.modules():
            if isinstance(module, SharedDropout):
                module.probability = probability

    @classmethod
    def inference_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """The constructor's arguments without those for training only."""
        return {name: value for name, value in arguments.items() if name != "has_auxiliary"}

    def forward_in_context(self, features: Tensor) -> Tensor:
        return F.log_softmax(self.scores_in_context(features), dim=-1)

    def scores_in_context(self, features: Tensor) -> Tensor:
        scores: Tensor = self.branch(self.encode(self.as_weights(features)))
        return scores.float()


class FilterSmoothing(nn.Module):
    """Mixes each filter's value with those of its neighbors, in evaluation mode only.

    Vocal tract perturbation interpolates between filters. A network that is trained with it sees hardly any features as
    sharp as those of recognition, in which the harmonics of the voice stand out.

    Args:
        share: of each of the two neighbors, from 0 to 0.5; the filter itself keeps the rest.

    Raises:
        ValueError: the share is outside this range.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        if not 0.0 <= share <= 0.5:
            raise ValueError(f"smoothing is {share}; give a share from 0 to 0.5")
        self.share = share

    def extra_repr(self) -> str:
        return f"share={self.share}"

    def forward(self, features: Tensor) -> Tensor:
        """(N, T, F) -> (N, T, F); the outermost filters are their own neighbors."""
        return features if self.training or self.share == 0.0 else smoothed(features, self.share)


def smoothed(features: Tensor, share: float | Tensor) -> Tensor:
    """Features (N, T, F) whose filters have taken a share, a number or (N, 1, 1), of each of their neighbors."""
    padded = torch.cat((features[..., :1], features, features[..., -1:]), dim=2)
    return torch.lerp(features, 0.5 * (padded[..., :-2] + padded[..., 2:]), 2.0 * share)


class FrameNorm(nn.BatchNorm1d):
    """Batch normalization over utterances and frames, without scale and shift; (N, T, D) -> (N, T, D).

    Mean and variance are those of all processes' frames. Torch's own synchronized layer needs a GPU.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, affine=False, eps=1e-3)

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes each channel."""
        rows = input.reshape(-1, input.shape[-1])
        if not self.training or current_share().num == 1:
            return super().forward(rows).view_as(input)
        assert self.momentum is not None and self.running_mean is not None and self.running_var is not None
        normal, mean, variance, count = _SharedNorm.apply(rows, self.eps)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), self.momentum)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
        return normal.view_as(input).to(input.dtype)


class _SharedNorm(torch.autograd.Function):
    """x (R, D) -> (x - mean) / sqrt(variance + eps) (R, D); mean, variance (D,) and count () of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, ...]:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        sums = total(torch.cat((x.sum(0), x.new_tensor([len(x)]))))
        count = sums[-1]
        mean = sums[:-1] / count
        centered = x - mean
        variance = total(centered.square().sum(0)) / count
        inverse_std = (variance + eps).rsqrt()
        normal = centered * inverse_std
        ctx.save_for_backward(normal, inverse_std, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normal, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        normal, inverse_std, count = ctx.saved_tensors
        grad = grad.to(normal.dtype)
        sums = total(torch.stack((grad.sum(0), (grad * normal).sum(0)))) / count
        return inverse_std * (grad - sums[0] - normal * sums[1]), None


class SharedDropout(nn.Module):
    """Dropout with one mask for all frames of an utterance, uniform in 1 - 2p .. 1 + 2p (Povey et al. 2018).

    Attributes:
        probability: p, 0 for none; a schedule may change it during training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.probability = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, D) -> (N, T, D)."""
        if not self.training or self.probability == 0.0:
            return x
        width = 2.0 * self.probability
        mask = draw_rows(
            lambda num: torch.empty(num, 1, x.shape[2], device=x.device).uniform_(1.0 - width, 1.0 + width), len(x)
        )
        return x * mask.to(x.dtype)


class OutputBranch(nn.Module):
    """Linear, ReLU, norm, small linear, norm, linear to the outputs."""

    def __init__(self, in_dim: int, dim: int, small_dim: int, num_outputs: int) -> None:
        super().__init__()
        self.expand = PackedLinear(in_dim, dim)
        self.expand_norm = FrameNorm(dim)
        self.contract = PackedLinear(dim, small_dim)
        self.contract_norm = FrameNorm(small_dim)
        self.out = PackedLinear(small_dim, num_outputs)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T', in_dim) -> (N, T', C)."""
        hidden = self.expand.normalized(x, self.expand_norm)
        outputs: Tensor = self.out(self.contract_norm(self.contract(hidden)))
        return outputs


class FactorizedLayer(nn.Module):
    """A convolution over three frames as the product of two over two frames each, then ReLU, norm and a bypass.

    The first factor, D to B channels over frames t and t + 1, is held semi-orthogonal (`semi_orthogonal_step`); the
    second goes back from B to D. The input, scaled, is added to the output.

    Args:
        dim: D.
        bottleneck_dim: B.
        stride: output frames between the frames that a factor reads; as many are lost on each side. 0 makes it a linear
            layer over one frame.
    """

    def __init__(self, dim: int, bottleneck_dim: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        taps = 2 if stride else 1
        # The rows of one tap after the other: products are computed once per frame, and then summed over the taps.
        self.factor = PackedLinear(dim, taps * bottleneck_dim)
        self.expand = PackedLinear(taps * bottleneck_dim, dim)
        nn.init.zeros_(self.factor.bias)
        self.norm = FrameNorm(dim)
        self.dropout = SharedDropout()

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, D) -> (N, T - 2 * stride, D)."""
        hidden = self.expand.rectified(joined_taps(self.factor(x), self.stride))
        if self.stride:
            x = x[:, self.stride : -self.stride]
        return torch.add(self.dropout(self.norm(hidden)), x, alpha=BYPASS_SCALE)

    def semi_orthogonal_step(self) -> None:
        """Applies the constraint of the first factor."""
        semi_orthogonal_step(self.factor.weight, 2 if self.stride else 1)


@torch.no_grad()
def semi_orthogonal_step(weight: Tensor, num_taps: int) -> None:
    """Moves a factor towards the nearest multiple of a semi-orthogonal matrix (Povey et al. 2018, 2.3).

    Args:
        weight: (taps * B, D), the rows of one tap after the other; they are the columns of one matrix, (B, taps * D).
        num_taps: number of frames that the factor reads.
    """
    matrix = torch.cat(weight.chunk(num_taps, dim=0), dim=1)
    product = matrix @ matrix.T
    trace = product.trace()
    trace_of_square = product.square().sum()
    scale_square = trace_of_square / trace
    # Beyond a ratio of 1.02 a full step could diverge.
    speed = 0.125
    ratio = trace_of_square * len(product) / trace.square()
    if ratio > 1.02:
        speed *= 0.5
        if ratio > 1.1:
            speed *= 0.5
    product.diagonal().sub_(scale_square)
    matrix = matrix - (4.0 * speed / scale_square) * (product @ matrix)
    weight.copy_(torch.cat(matrix.chunk(num_taps, dim=1), dim=0))


class FactorizedLayers(nn.ModuleList):
    """`FactorizedLayer` of equal shapes, one after the other."""

    def __init__(self, layers: Iterable[FactorizedLayer]) -> None:
        super().__init__(layers)
        self._kept = KeptWhileUnchanged[Int8Layers]()

    def __iter__(self) -> Iterator[FactorizedLayer]:
        return super().__iter__()  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, D) -> (N, T - 2 * the sum of strides, D)."""
        if not self.training and len(self) and multiplies_bytes(next(iter(self)).factor.weight, x):
            in_bytes = self._kept.get(self._constants(), self._in_bytes)
            return in_bytes(x)
        for layer in self:
            x = layer(x)
        return x

    def _constants(self) -> Iterator[Tensor]:
        for layer in self:
            for linear in (layer.factor, layer.expand):
                yield from (linear.weight, linear.bias)
            assert layer.norm.running_mean is not None and layer.norm.running_var is not None
            yield from (layer.norm.running_mean, layer.norm.running_var)

    def _in_bytes(self) -> Int8Layers:
        weights = []
        for layer in self:
            factors = [(linear.weight.detach(), linear.bias.detach()) for linear in (layer.factor, layer.expand)]
            weights.append(LayerWeights(*factors[0], *factors[1], *norm_as_product(layer.norm), layer.stride))
        return Int8Layers(weights, BYPASS_SCALE)


class ConvFrontEnd(nn.Module):
    """Small convolutions over time and frequency, of which the second subsamples by 3, then a linear layer.

    Args:
        num_features: F.
        dim: D.
        num_convolutions: number of `BypassConvolution` after these two.
    """

    factor = 3

    def __init__(self, num_features: int, dim: int, num_convolutions: int) -> None:
        super().__init__()
        self.first = ChannelsLastConv2d(1, 16, kernel_size=3, stride=(1, 2), padding=(0, 1))
        self.second = ChannelsLastConv2d(16, 48, kernel_size=(5, 3), stride=(3, 2), padding=(0, 1))
        self.deeper = nn.ModuleList(BypassConvolution(48) for _ in range(num_convolutions))
        self.out = PackedLinear(48 * ((num_features + 3) // 4), dim)
        self.norm = FrameNorm(dim)

    def forward(self, features: Tensor) -> Tensor:
        """(N, 3 T' + 4, F) -> (N, T' - 2 K, D) with K of `num_convolutions`; output t is centered on 3 (t + K + 1)."""
        images = self.second.between_relus(self.first(features.unsqueeze(1)))
        for convolution in self.deeper:
            images = convolution(images)
        return self.out.normalized(images.transpose(1, 2).flatten(2), self.norm)


class BypassConvolution(nn.Module):
    """A convolution over three frames and three bins, then ReLU, norm and a bypass, as in `FactorizedLayer`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = ChannelsLastConv2d(channels, channels, kernel_size=3, padding=(0, 1))
        self.norm = FrameNorm(channels)

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, T, F) -> (N, C, T - 2, F)."""
        return self.convolution.normalized(images, self.norm, BYPASS_SCALE)


class Tdnnf(ChainNetwork):
    """Filterbanks in, a vector of HMM state scores every 30 ms out.

    Args:
        num_features: F.
        num_tokens: C; column 0 is silence.
        dim: D.
        bottleneck_dim: B of each layer.
        num_layers: number of factorized layers.
        prefinal_dim: channels between the layers and an output branch.
        small_dim: channels before the outputs.
        has_auxiliary: whether there is a second output branch for cross-entropy regularization; only training needs it.
        smoothing: see `FilterSmoothing`.
        num_convolutions: see `ConvFrontEnd`; with 3, the network resembles Kaldi's CNN-TDNN-F.
    """

    def __init__(
        self,
        num_features: int,
        num_tokens: int,
        dim: int = 768,
        bottleneck_dim: int = 96,
        num_layers: int = 11,
        prefinal_dim: int = 192,
        small_dim: int = 192,
        has_auxiliary: bool = False,
        smoothing: float = 0.0,
        num_convolutions: int = 0,
    ) -> None:
        super().__init__(num_features, num_tokens, ConvFrontEnd.factor, smoothing)
        self.front_end = ConvFrontEnd(num_features, dim, num_convolutions)
        self.layers = FactorizedLayers(FactorizedLayer(dim, bottleneck_dim) for _ in range(num_layers))
        self.prefinal = PackedLinear(dim, prefinal_dim)
        self.branch = OutputBranch(prefinal_dim, dim, small_dim, num_tokens)
        self.auxiliary = OutputBranch(prefinal_dim, dim, small_dim, num_tokens) if has_auxiliary else None
        context = num_convolutions + sum(layer.stride for layer in self.layers)  # in output frames
        self.context_frames = context * self.subsampling_factor + 2

    def semi_orthogonal_step(self) -> None:
        for layer in self.layers:
            layer.semi_orthogonal_step()

    def encode(self, features: Tensor) -> Tensor:
        hidden: Tensor = self.prefinal(self.layers(self.front_end(self.smooth(features))))
        return hidden


class Ensemble(BoundedNetwork):
    """Networks of bounded context with the same features, outputs and frame rate, whose scores are averaged.

    Args:
        members: the networks, at least one, each as `class`, its name in the registry, and `arguments`, those of its
            constructor.

    Raises:
        AsrError: a member cannot be built.
        ValueError: there is no member, a member's context is not bounded, or members differ in features, outputs or
            frame rate.
    """

    def __init__(self, members: Sequence[dict[str, Any]]) -> None:
        networks = [
            build_network(member["class"], member["arguments"], ACOUSTIC_MODEL_CLASSES, "Ensemble").network
            for member in members
        ]
        bounded = [network for network in networks if isinstance(network, BoundedNetwork)]
        if not networks or len(bounded) != len(networks):
            raise ValueError("an ensemble needs members, all of bounded context (TDNN-F)")
        kinds = {(each.num_features, each.num_tokens, each.subsampling_factor) for each in bounded}
        if len(kinds) > 1:
            raise ValueError(f"members differ in (features, outputs, frames per output): {sorted(kinds)}")
        super().__init__(*kinds.pop())
        self.members = nn.ModuleList(bounded)

    @classmethod
    def of(cls, specs: Sequence[ModelSpec]) -> ModelSpec:
        """An ensemble of trained networks, with copies of their weights.

        Ensembles among them are replaced by their members, so that all networks have the same weight.

        Raises:
            ValueError: as for the constructor.
        """
        single = [member for spec in specs for member in _members_of(spec)]
        arguments = {"members": [{"class": spec.class_name, "arguments": spec.arguments} for spec in single]}
        ensemble = cls(**arguments)
        for member, spec in zip(ensemble.members, single, strict=True):
            member.load_state_dict(spec.network.state_dict())
        return ModelSpec("Ensemble", arguments, ensemble.eval())

    @property
    def left_context(self) -> int:
        """See `BoundedNetwork`; the largest of the members."""
        return max(member.left_context for member in self._bounded())

    @property
    def right_context(self) -> int:
        """See `BoundedNetwork`; the largest of the members."""
        return max(member.right_context for member in self._bounded())

    @property
    def draft(self) -> BoundedNetwork:
        """See `BoundedNetwork`; the first member alone."""
        return self._bounded()[0]

    def forward_in_context(self, features: Tensor) -> Tensor:
        left, right = self.receptive_field
        total: Tensor | None = None
        for member in self._bounded():
            # A member that reads less context would give outputs for the rest of it.
            begin, end = left - member.left_context, features.shape[1] - (right - member.right_context)
            scores = member.scores_in_context(features[:, begin:end])
            total = scores if total is None else total + scores
        assert total is not None
        return F.log_softmax(total / len(self.members), dim=-1)

    def _bounded(self) -> list[BoundedNetwork]:
        return cast("list[BoundedNetwork]", list(self.members))


def _members_of(spec: ModelSpec) -> list[ModelSpec]:
    if not isinstance(spec.network, Ensemble):
        return [spec]
    listed = zip(spec.arguments["members"], spec.network.members, strict=True)
    return [ModelSpec(each["class"], each["arguments"], network) for each, network in listed]
