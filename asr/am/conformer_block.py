"""One Conformer block: half feed-forward, attention, convolution, half feed-forward (Gulati et al., 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.am.attention import SelfAttention
from asr.packed_linear import PackedLinear


class ResidualSum(nn.Module):
    """x + factor * branch, where the branch has dropout whose mask is shared by all frames of an utterance."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor, branch: Tensor, factor: float) -> Tensor:
        """x (N, T, D), branch (N, T, D) -> (N, T, D)."""
        if not self.training or self.dropout == 0.0:
            return torch.add(x, branch, alpha=factor)
        mask = F.dropout(branch.new_full((x.shape[0], 1, x.shape[2]), factor), self.dropout)
        return torch.addcmul(x, branch, mask)


class FeedForward(nn.Module):
    """Layer norm, linear, ReLU, linear; ReLU costs half of SiLU on CPU."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.expand = PackedLinear(dim, hidden_dim)
        self.contract = PackedLinear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, T, dim) -> (N, T, dim)."""
        return self.contract(F.relu(self.expand(self.norm(x))))


class ConvModule(nn.Module):
    """Layer norm, gated linear unit, convolution over time, layer norm, SiLU, linear.

    Args:
        dim: input and output size.
        kernel_size: odd number of frames.
        group_size: channels that see each other; 1 is the depthwise convolution of the paper, more is faster on CPUs
            with matrix units and stronger.
    """

    def __init__(self, dim: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, not {kernel_size}")
        self.in_norm = nn.LayerNorm(dim)
        self.gate = PackedLinear(dim, 2 * dim)
        self.conv = nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim // group_size)
        self.out_norm = nn.LayerNorm(dim)
        self.out = PackedLinear(dim, dim)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x (N, T, dim), valid (N, T, 1) of 1 and 0 -> (N, T, dim)."""
        gated = F.glu(self.gate(self.in_norm(x)), dim=-1) * valid
        mixed = self.conv(gated.transpose(1, 2)).transpose(1, 2)
        return self.out(F.silu(self.out_norm(mixed)))


class ConformerBlock(nn.Module):
    """The four modules as residual branches; in training a branch may be left out for the whole batch.

    Args:
        dim, num_heads, hidden_dim, kernel_size, group_size: as in the modules.
        dropout: on each branch, with one mask for all frames of an utterance, which is cheap on CPU.
        skip_probability: chance that a branch is left out in a training step (stochastic depth).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        kernel_size: int,
        group_size: int,
        dropout: float,
        skip_probability: float,
    ) -> None:
        super().__init__()
        self.first_feed_forward = FeedForward(dim, hidden_dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, num_heads)
        self.conv = ConvModule(dim, kernel_size, group_size)
        self.last_feed_forward = FeedForward(dim, hidden_dim)
        self.out_norm = nn.LayerNorm(dim)
        self.add = ResidualSum(dropout)
        self.skip_probability = skip_probability

    def forward(self, x: Tensor, bias: Tensor, valid: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x (N, T, dim), bias (N, 1, T), valid (N, T, 1), angles of `rotary_angles` -> (N, T, dim)."""
        scale = 1.0 / (1.0 - self.skip_probability) if self.training else 1.0
        if self._keep():
            x = self.add(x, self.first_feed_forward(x), 0.5 * scale)
        if self._keep():
            x = self.add(x, self.attention(self.attention_norm(x), bias, angles), scale)
        if self._keep():
            x = self.add(x, self.conv(x, valid), scale)
        if self._keep():
            x = self.add(x, self.last_feed_forward(x), 0.5 * scale)
        out: Tensor = self.out_norm(x)
        return out

    def _keep(self) -> bool:
        return not self.training or self.skip_probability == 0.0 or torch.rand(()).item() >= self.skip_probability
