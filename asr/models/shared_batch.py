"""Layers that act on the whole batch even if several processes share it: dropout and batch normalization.

Shapes: N utterances of this process, T frames, D channels, R rows of all its frames.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.distributed import current_share, draw_rows, total


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
