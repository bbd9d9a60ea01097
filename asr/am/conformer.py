"""Conformer encoder with CTC output layers: the strong acoustic model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.am.attention import rotary_angles
from asr.am.conformer_block import ConformerBlock
from asr.am.frames import valid_frames
from asr.am.subsampling import ConvSubsampling
from asr.data.cmvn import UtteranceCmvn
from asr.packed_linear import PackedLinear


class Conformer(nn.Module):
    """Filterbanks in, token log-probabilities at a quarter of the frame rate out.

    Each utterance is normalised to mean 0 and variance 1 first; that belongs to the network and not to the front end,
    so that training and recognition cannot disagree about it.

    After the blocks named in `intermediate_blocks` the same output layer gives a further CTC output, whose posterior is
    fed back into the next block (self-conditioned CTC, Nozaki and Komatsu, 2021): it lets later blocks condition on a
    first guess of the token sequence, and regularises.

    Args:
        num_features: F.
        num_tokens: C, blank included.
        dim: size of the residual stream.
        num_blocks: Conformer blocks.
        num_heads: attention heads a block.
        hidden_dim: size inside the feed-forward modules.
        kernel_size: frames under the convolution.
        group_size: channels that see each other in the convolution.
        dropout: see `ConformerBlock`.
        skip_probability: of the last block's branches; it grows linearly from the first block on.
        intermediate_blocks: counted from 1; empty for plain CTC.
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
        super().__init__()
        self.num_features = num_features
        self.num_tokens = num_tokens
        self.subsampling_factor = ConvSubsampling.factor
        self.num_heads = num_heads
        self.dim = dim
        self.intermediate_blocks = tuple(intermediate_blocks)
        self.input_norm = UtteranceCmvn()
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
        self.in_dropout = nn.Dropout(dropout)
        self.out = PackedLinear(dim, num_tokens)
        if self.intermediate_blocks:
            self.feedback = PackedLinear(num_tokens, dim)

    def forward(self, features: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """features (N, T, F), num_frames (N,) -> natural log-probabilities (N, T', C) float32, (N,)."""
        outputs, num_frames = self.all_outputs(features, num_frames)
        return outputs[-1], num_frames

    def all_outputs(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """As `forward`, with the outputs of the intermediate blocks before the last one."""
        return self.outputs_of_normal(self.input_norm(features, num_frames), num_frames)

    def outputs_of_normal(self, features: Tensor, num_frames: Tensor) -> tuple[list[Tensor], Tensor]:
        """As `all_outputs`, of features that the caller has normalised; padding must be zero."""
        x, num_frames = self.subsampling(features, num_frames)
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
