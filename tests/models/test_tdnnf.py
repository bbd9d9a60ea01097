"""The factorized time-delay network: its context and its constraint; test_chain_network.py has the rest."""

from __future__ import annotations

import pytest
import torch

from asr.models.tdnnf import BypassConvolution, FactorizedLayer, Tdnnf

ARGUMENTS = {
    "num_features": 12,
    "num_tokens": 7,
    "dim": 16,
    "bottleneck_dim": 4,
    "num_layers": 2,
    "prefinal_dim": 8,
    "small_dim": 8,
}


def tiny_network(**more: int) -> Tdnnf:
    torch.manual_seed(0)
    network = Tdnnf(**ARGUMENTS, **more)  # type: ignore[arg-type]
    torch.nn.init.normal_(network.branch.out.weight)
    return network.eval()


@pytest.mark.parametrize("num_convolutions", [0, 2])
def test_the_context_is_what_it_says(num_convolutions: int) -> None:
    network = tiny_network(num_convolutions=num_convolutions)
    # Both ways two frames around those of each layer's taps, three frames apart.
    assert network.left_context == network.right_context == 3 * (num_convolutions + len(network.layers)) + 2
    num_outputs = 4
    padded = torch.randn(1, network.left_context + 3 * num_outputs + network.right_context, 12)
    with torch.no_grad():
        before = network.encode(padded)
        assert before.shape[1] == num_outputs
        # The outermost frames reach the first and the last output, and no other.
        for frame, reached in ((0, [0]), (padded.shape[1] - 1, [])):
            changed = padded.clone()
            changed[0, frame] += 1.0
            differs = (network.encode(changed) - before).abs().amax(2)[0] > 1e-7
            assert differs.nonzero().flatten().tolist() in (reached, [num_outputs - 1])


@pytest.mark.parametrize("stride", [0, 1])
def test_the_first_factor_becomes_a_multiple_of_a_semi_orthogonal_matrix(stride: int) -> None:
    torch.manual_seed(1)
    layer = FactorizedLayer(16, 4, stride)
    for _ in range(200):
        layer.semi_orthogonal_step()
    matrix = torch.cat(layer.factor.weight.chunk(2 if stride else 1), dim=1)
    product = matrix @ matrix.T
    torch.testing.assert_close(product, product.trace() / 4 * torch.eye(4), atol=1e-4, rtol=1e-3)


def test_a_convolution_adds_two_thirds_of_its_input() -> None:
    torch.manual_seed(0)
    layer, images = BypassConvolution(4).eval(), torch.randn(2, 4, 9, 5)
    torch.nn.init.zeros_(layer.convolution.weight)
    torch.nn.init.constant_(layer.convolution.bias, 1.0)
    layer.norm.running_mean, layer.norm.running_var = torch.full((4,), 3.0), torch.full((4,), 4.0 - layer.norm.eps)
    torch.testing.assert_close(layer(images), 0.66 * images[:, :, 1:-1] - 1.0)
