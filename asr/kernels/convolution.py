"""A convolution over time and frequency with its channels last in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
