"""Self-attention with rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.packed_linear import PackedLinear


def rotary_angles(num_frames: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding, each (T, head_dim / 2) float32."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(num_frames, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pair (x[i], x[i + D/2]) by the frame's angle; x (..., T, D), cos and sin (T, D/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class SelfAttention(nn.Module):
    """Multi-head self-attention over whole utterances; positions enter by rotation of queries and keys.

    Args:
        dim: input and output size.
        num_heads: it divides `dim`, and each head has an even size.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            raise ValueError(f"dim ({dim}) must be an even multiple of num_heads ({num_heads})")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.in_projection = PackedLinear(dim, 3 * dim)
        self.out_projection = PackedLinear(dim, dim)

    def forward(self, x: Tensor, bias: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x (N, T, dim), bias (N, 1, T), very negative at padding, angles of `rotary_angles` -> (N, T, dim)."""
        num_utterances, num_frames, _ = x.shape
        projected = self.in_projection(x).view(num_utterances, num_frames, 3, self.num_heads, self.head_dim)
        projected = projected.permute(2, 0, 3, 1, 4)  # (3, N, heads, T, D)
        cos, sin = (angle.to(projected.dtype) for angle in angles)
        query, key = rotate(projected[:2], cos, sin).flatten(1, 2).unbind(0)  # (N * heads, T, D)
        # Explicit products are faster than the fused attention kernel in bfloat16 on CPU.
        bias = bias[:, None].expand(-1, self.num_heads, -1, -1).flatten(0, 1).to(query.dtype)  # (N * heads, 1, T)
        weight = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=self.head_dim**-0.5)
        # Under autocast softmax would promote to float32, the largest cost of the layer.
        with torch.autocast(x.device.type, enabled=False):
            weight = weight.softmax(-1)
        mixed = torch.bmm(weight, projected[2].flatten(0, 1)).unflatten(0, (num_utterances, self.num_heads))
        return self.out_projection(mixed.transpose(1, 2).flatten(2))
