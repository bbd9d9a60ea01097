"""The packed layer against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from asr.kernels.linear import PackedLinear


@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 3, 7), (400, 7), (2, 0, 7)])
def test_equal_to_the_plain_layer(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, plain = PackedLinear(7, 5), nn.Linear(7, 5)
    plain.load_state_dict(layer.state_dict())
    inputs = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(layer(inputs), plain(inputs))
    assert layer(inputs).requires_grad


def test_changed_weights_count_and_a_copy_has_its_own() -> None:
    torch.manual_seed(0)
    layer, inputs = PackedLinear(7, 5), torch.randn(10, 7)
    with torch.no_grad():
        before = layer(inputs).clone()
        other = copy.deepcopy(layer)
        layer.weight.mul_(2.0)
        torch.testing.assert_close(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
        assert not torch.allclose(layer(inputs), before)
        torch.testing.assert_close(other(inputs), before)


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        layer, inputs = PackedLinear(7, 5), torch.randn(10, 7)
        torch.testing.assert_close(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
