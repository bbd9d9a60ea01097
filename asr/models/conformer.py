"""Conformer encoder (Gulati et al., 2020) with CTC output layers: the strong acoustic model.

Shapes: N utterances, T frames, F features, T' output frames, C tokens, D size of an attention head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.distributed import BatchDropout, draw_rows
from asr.kernels.linear import ChannelsLastConv2d, PackedLinear
from asr.models.interface import NormalizingNetwork, valid_frames


def rotary_angles(num_frames: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding, each (T, head_dim / 2) float32."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(num_frames, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + D/2]) by the angle of the frame; x (..., T, D), cos and sin (T, D/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class SelfAttention(nn.Module):
    """Multi-head self-attention over whole utterances with rotary position embedding (Su et al., 2021).

    Args:
        dim: input and output size.
        num_heads: number of heads; each head must have an even size.

    Raises:
        ValueError: the sizes do not fit.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or dim % (2 * num_heads):
            raise ValueError(f"num_heads is {num_heads}; it must be 1 or more, and dim ({dim}) an even multiple of it")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.in_projection = PackedLinear(dim, 3 * dim)
        self.out_projection = PackedLinear(dim, dim)

    def forward(self, x: Tensor, bias: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x (N, T, dim), bias (N, 1, T), very negative for padding, angles of `rotary_angles` -> (N, T, dim)."""
        num_utterances, num_frames, _ = x.shape
        projected = self.in_projection(x).view(num_utterances, num_frames, 3, self.num_heads, self.head_dim)
        projected = projected.permute(2, 0, 3, 1, 4)  # (3, N, heads, T, D)
        cos, sin = (angle.to(projected.dtype) for angle in angles)
        query, key = rotate(projected[:2], cos, sin).flatten(1, 2).unbind(0)  # (N * heads, T, D)
        # Explicit products are faster than the fused attention kernel in bfloat16 on CPU.
        bias = bias[:, None].expand(-1, self.num_heads, -1, -1).flatten(0, 1).to(query.dtype)  # (N * heads, 1, T)
        weight = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=self.head_dim**-0.5)
        # Autocast would run the softmax in float32, which would be the largest cost of the layer.
        with torch.autocast(x.device.type, enabled=False):
            weight = weight.softmax(-1)
        mixed = torch.bmm(weight, projected[2].flatten(0, 1))
        mixed = mixed.view(num_utterances, self.num_heads, num_frames, self.head_dim)
        return self.out_projection(mixed.transpose(1, 2).flatten(2))


class ResidualSum(nn.Module):
    """x + factor * branch, with dropout on the branch; all frames of an utterance share its mask.

    Raises:
        ValueError: the dropout is below 0, or not below 1.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout is {dropout}; it must be 0 or more and below 1")
        self.dropout = dropout

    def forward(self, x: Tensor, branch: Tensor, factor: float) -> Tensor:
        """x (N, T, D), branch (N, T, D) -> (N, T, D)."""
        if not self.training or self.dropout == 0.0:
            return torch.add(x, branch, alpha=factor)
        mask = draw_rows(lambda num: F.dropout(branch.new_full((num, 1, x.shape[2]), factor), self.dropout), len(x))
        return torch.addcmul(x, branch, mask)


class FeedForward(nn.Module):
    """Layer norm, linear, ReLU, linear. On CPUs ReLU takes half the time of SiLU."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.expand = PackedLinear(dim, hidden_dim)
        self.contract = PackedLinear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, T, dim) -> (N, T, dim)."""
        return self.contract(self.expand.rectified(self.norm(x)))


class ConvModule(nn.Module):
    """Layer norm, gated linear unit, convolution over time, layer norm, SiLU, linear.

    Args:
        dim: input and output size.
        kernel_size: odd number of frames.
        group_size: channels in a group of the convolution. 1 is the depthwise convolution of the paper; more are
            stronger, and faster on CPUs with matrix units.

    Raises:
        ValueError: the sizes do not fit.
    """

    def __init__(self, dim: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size is {kernel_size}; it must be odd and 1 or more")
        if not 1 <= group_size <= dim or dim % (dim // group_size):
            raise ValueError(f"group_size is {group_size}; it must be 1 or more and divide dim ({dim})")
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
    """Half feed-forward, attention, convolution and half feed-forward as residual branches.

    Args:
        dim, num_heads, hidden_dim, kernel_size, group_size: as in the modules.
        dropout: on each branch, with one mask for all frames of an utterance, which is cheap on CPUs.
        skip_probability: probability that a branch is left out of a training step (stochastic depth, Huang et al.,
            2016).

    Raises:
        ValueError: the sizes do not fit, or a probability is below 0 or not below 1.
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
        if not 0.0 <= skip_probability < 1.0:
            raise ValueError(f"skip_probability is {skip_probability}; it must be 0 or more and below 1")
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


class ConvSubsampling(nn.Module):
    """Two 3 x 3 convolutions of stride 2 over time and frequency, then a linear layer: a quarter of the frame rate.

    The first convolution has few channels, since it runs at the full rate. Padding is set to zero before each
    convolution, so that the output for an utterance does not depend on the batch.

    Args:
        num_features: F.
        dim: size of the output.
    """

    factor = 4

    def __init__(self, num_features: int, dim: int) -> None:
        super().__init__()
        self.first = ChannelsLastConv2d(1, 8, kernel_size=3, stride=2, padding=1)
        self.second = ChannelsLastConv2d(8, 32, kernel_size=3, stride=2, padding=1)
        self.out = PackedLinear(32 * ((num_features + 3) // 4), dim)

    def forward(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """features (N, T, F) with zeros as padding, num_frames (N,) -> (N, T', dim) with T' = ceil(T / 4), (N,)."""
        hidden = F.relu(self.first(features.unsqueeze(1)))
        num_frames = (num_frames + 1) // 2
        hidden = hidden * valid_frames(num_frames, hidden.shape[2])[:, None, :, None].to(hidden.dtype)
        hidden = F.relu(self.second(hidden))
        num_frames = (num_frames + 1) // 2
        return self.out(hidden.transpose(1, 2).flatten(2)), num_frames


class Conformer(NormalizingNetwork):
    """Filterbank features to log-probabilities of tokens, at a quarter of the frame rate.

    After the blocks in `intermediate_blocks` the output layer gives an intermediate CTC output, whose posterior is fed
    back to the next block (self-conditioned CTC, Nozaki and Komatsu, 2021). It regularizes, and lets later blocks
    depend on a first guess of the tokens.

    The many flat arguments are the keys of a recipe's YAML and of a bundle's description.

    Args:
        num_features: F.
        num_tokens: C, blank included.
        dim: size of the residual stream.
        num_blocks: number of Conformer blocks.
        num_heads: number of attention heads in each block.
        hidden_dim: size inside the feed-forward modules.
        kernel_size: number of frames that a convolution sees.
        group_size: channels in a group of the convolution, see `ConvModule`.
        dropout: see `ConformerBlock`.
        skip_probability: for the branches of the last block; it grows linearly from the first block on.
        intermediate_blocks: numbers of blocks with an intermediate output, from 1; empty for plain CTC.

    Raises:
        ValueError: as `ConformerBlock`, or an intermediate block is not one of the network's.
    """

    def __init__(
        self,
        num_features: int,
        num_tokens: int,
        dim: int = 256,
        num_blocks: int = 12,
        num_heads: int = 4,
        hidden_dim: int = 1024,
        kernel_size: int = 15,
        group_size: int = 32,
        dropout: float = 0.1,
        skip_probability: float = 0.0,
        intermediate_blocks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(num_features, num_tokens, ConvSubsampling.factor)
        if not all(1 <= number <= num_blocks for number in intermediate_blocks):
            raise ValueError(
                f"intermediate_blocks is {[*intermediate_blocks]}; it must be numbers of blocks, from 1 to {num_blocks}"
            )
        self.num_heads = num_heads
        self.dim = dim
        self.intermediate_blocks = tuple(intermediate_blocks)
        self.subsampling = ConvSubsampling(num_features, dim)
        self.blocks = nn.ModuleList(
            ConformerBlock(
                dim=dim,
                num_heads=num_heads,
                hidden_dim=hidden_dim,
                kernel_size=kernel_size,
                group_size=group_size,
                dropout=dropout,
                skip_probability=skip_probability * (block_idx + 1) / num_blocks,
            )
            for block_idx in range(num_blocks)
        )
        self.in_dropout = BatchDropout(dropout)
        self.out = PackedLinear(dim, num_tokens)
        if self.intermediate_blocks:
            self.feedback = PackedLinear(num_tokens, dim)

    def forward_normalized(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        x, num_frames = self.subsampling(self.as_weights(features), num_frames)
        x = self.in_dropout(x)
        valid = valid_frames(num_frames, x.shape[1])
        bias = torch.zeros(valid.shape, dtype=x.dtype, device=x.device).masked_fill(~valid, -1e4)[:, None, :]
        angles = rotary_angles(x.shape[1], self.dim // self.num_heads, x.device)
        frame_weight = valid[:, :, None].to(x.dtype)
        outputs: list[Tensor] = []
        for block_number, block in enumerate(self.blocks, start=1):
            x = block(x, bias, frame_weight, angles)
            if block_number in self.intermediate_blocks:
                outputs.append(F.log_softmax(self.out(x).float(), dim=-1))
                x = x + self.feedback(outputs[-1].exp().to(x.dtype))
        outputs.append(F.log_softmax(self.out(x).float(), dim=-1))
        return outputs, num_frames
