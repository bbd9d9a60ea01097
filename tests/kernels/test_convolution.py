"""The convolution with channels side by side is torch's, with and without gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from asr.kernels.convolution import ChannelsLastConv2d


@pytest.mark.parametrize("channels", [1, 5])
def test_it_equals_torch(channels: int) -> None:
    torch.manual_seed(0)
    reference = nn.Conv2d(channels, 8, kernel_size=3, stride=(1, 2), padding=(0, 1))
    network = ChannelsLastConv2d(channels, 8, kernel_size=3, stride=(1, 2), padding=(0, 1))
    network.load_state_dict(reference.state_dict())
    inputs = torch.randn(2, channels, 9, 12)
    expected = reference(inputs)
    with torch.no_grad():
        torch.testing.assert_close(network(inputs), expected)
    expected.square().sum().backward()
    network(inputs).square().sum().backward()
    for own, other in zip(network.parameters(), reference.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        torch.testing.assert_close(own.grad, other.grad)
        # Training by several processes views gradients in the order of the weights.
        assert own.grad.stride() == own.stride()
