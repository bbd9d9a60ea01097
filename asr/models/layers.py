"""Layers that acoustic models share.

Features are normalized per utterance by mean and variance (`UtteranceCmvn`). Dropout and batch normalization act on the
whole batch even if several processes share it.

Shapes: N utterances of this process, T frames, F features, C and D channels, R rows of all frames.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.distributed import current_share, draw_rows, total

STD_FLOOR = 1e-5
"""The smallest standard deviation that features are divided by."""


# In every second of speech there is a frame whose natural log energy is within `_SPEECH_RANGE` of the loudest frames,
# or above the softest ones by more than `_NOISE_SHARE` of the range between both.
_SPEECH_RANGE = 4.0
_NOISE_SHARE = 0.3

# Rank of the frames that count as loudest and softest, so that a click, which is shorter, does not.
_RANK = 10


class UtteranceCmvn(nn.Module):
    """Normalizes each utterance by its own mean and, optionally, its own standard deviation.

    Only the edges of a long pause count. Otherwise mean and variance would be those of noise, and normalized noise
    would look like speech.

    Args:
        normalize_variance: whether to divide by the standard deviation.
        pause_margin: frames that are further than this from anything loud do not count.
    """

    def __init__(self, normalize_variance: bool = True, pause_margin: int = 50) -> None:
        super().__init__()
        self.normalize_variance = normalize_variance
        self.pause_margin = pause_margin

    def forward(self, features: Tensor, num_frames: Tensor) -> Tensor:
        """Normalizes features (N, T, F) of num_frames (N,) frames -> (N, T, F); padding is 0."""
        inside = _inside(features, num_frames)
        counted = self._counted(features, inside)[:, :, None]
        count = counted.sum(dim=1, keepdim=True).clamp(min=1)
        mean = features.masked_fill(~counted, 0.0).sum(dim=1, keepdim=True) / count
        centered = (features - mean).masked_fill(~inside[:, :, None], 0.0)
        if not self.normalize_variance:
            return centered
        variance = centered.square().masked_fill(~counted, 0.0).sum(dim=1, keepdim=True) / count
        return centered / variance.sqrt().clamp(min=STD_FLOOR)

    def _counted(self, features: Tensor, inside: Tensor) -> Tensor:
        """Which frames are near speech, (N, T) bool; all frames of an utterance in which nothing stands out."""
        margin = self.pause_margin
        if features.shape[1] <= 2 * margin:
            return inside
        energy = features.mean(dim=2)
        loudest = energy.masked_fill(~inside, -torch.inf).topk(_RANK, dim=1).values[:, -1:]
        softest = energy.masked_fill(~inside, torch.inf).topk(_RANK, dim=1, largest=False).values[:, -1:]
        threshold = torch.maximum(loudest - _SPEECH_RANGE, softest + _NOISE_SHARE * (loudest - softest))
        is_loud = inside & (energy > threshold)
        loud = is_loud.to(features.dtype).unsqueeze(1)
        near = F.max_pool1d(loud, 2 * margin + 1, stride=1, padding=margin).squeeze(1) > 0
        counted = inside & near
        return counted | (inside & ~counted.any(dim=1, keepdim=True))


def _inside(features: Tensor, num_frames: Tensor) -> Tensor:
    """Which frames are not padding, (N, T) bool."""
    return torch.arange(features.shape[1], device=features.device) < num_frames.to(features.device)[:, None]


class ChannelsLastConv2d(nn.Conv2d):
    """`nn.Conv2d` without padding modes, dilation or groups.

    With one input channel, oneDNN takes a tenth of the time in this layout. The stored weight keeps the order of
    `state_dict` and files; torch chooses the layout by the strides of the weight that is passed to the convolution.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, C, T, F) -> (N, C', T', F')."""
        if torch.is_grad_enabled():
            # The backward pass of torch 1.13 fails in training by several processes.
            return super().forward(inputs)
        weight = self.weight.to(memory_format=torch.channels_last)
        return F.conv2d(inputs, weight, self.bias, self.stride, self.padding)


class BatchDropout(nn.Dropout):
    """Dropout whose masks are drawn for the whole batch; (N, ...) -> (N, ...)."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0 or current_share().num == 1:
            return super().forward(input)
        shape = input.shape[1:]
        return input * draw_rows(lambda num: F.dropout(input.new_ones(num, *shape), self.p), len(input))


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
