"""What all networks trained by lattice-free MMI have in common: two output branches, norms, dropout.

Shapes: N utterances, T' output frames, F features, D channels, C tokens, R frames of all utterances.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.distributed import current_share, draw_rows, total
from asr.kernels.linear import PackedLinear
from asr.models.interface import BoundedNetwork


class ChainNetwork(BoundedNetwork):
    """A network of bounded context that lattice-free MMI can train (`asr.models.chain_training`).

    Its scores are normalized over the outputs of each frame. That changes neither lattice-free MMI nor the search.

    Args:
        num_features: F.
        num_tokens: C; column 0 is silence.
        subsampling_factor: frames of features per output frame.
        smoothing: see `FilterSmoothing`.

    Attributes:
        smooth: what `encode` begins with.
        branch: from `encode`'s output to a score for each token.
        auxiliary: a second branch, for cross-entropy regularization; None unless the network is trained.
    """

    branch: nn.Module
    auxiliary: nn.Module | None

    def __init__(self, num_features: int, num_tokens: int, subsampling_factor: int, smoothing: float) -> None:
        super().__init__(num_features, num_tokens, subsampling_factor)
        self.smooth = FilterSmoothing(smoothing)

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
        """See `BoundedNetwork`."""
        return F.log_softmax(self.branch(self.encode(self.as_weights(features))).float(), dim=-1)


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
        hidden = self.expand_norm(self.expand.rectified(x))
        outputs: Tensor = self.out(self.contract_norm(self.contract(hidden)))
        return outputs
