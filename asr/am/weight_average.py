"""Exponential moving average of a network's weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class WeightAverage(nn.Module):
    """A second copy of a network that follows the first slowly; it is what validation and export use.

    Early in training the average is short, so that it does not remember the random start.

    Args:
        network: what is followed; its buffers are copied, not averaged.
        decay: weight of the old average in each step, such as 0.999.
    """

    num_updates: Tensor

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Takes in the network's weights after an optimiser step."""
        self.num_updates += 1
        num_updates = int(self.num_updates)
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        for mean, value in zip(self.network.parameters(), network.parameters(), strict=True):
            mean.lerp_(value, 1.0 - decay)
        for own, buffer in zip(self.network.buffers(), network.buffers(), strict=True):
            own.copy_(buffer)

    def train(self, mode: bool = True) -> WeightAverage:
        """Stays in evaluation mode."""
        return super().train(False)
