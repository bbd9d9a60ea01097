"""A stack of factorized layers in one loop: each against products and tensor operations, all against one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asr.kernels.byte_products import Int8Layers, Int8Weights, LayerWeights, has_byte_products, joined_taps
from asr.kernels.linear import byte_products
from asr.models.tdnnf import FactorizedLayer, FactorizedLayers

pytestmark = pytest.mark.skipif(not has_byte_products(), reason="needs numba and AVX2")


def layer_of(dim: int, bottleneck: int, stride: int) -> LayerWeights:
    width = bottleneck * (2 if stride else 1)
    factor = torch.randn(width, dim), torch.randn(width)
    return LayerWeights(
        *factor, torch.randn(dim, width), torch.randn(dim), torch.rand(dim) / dim, torch.randn(dim), stride
    )


def outputs_of(layer: LayerWeights, inputs: torch.Tensor, share: float) -> torch.Tensor:
    hidden = joined_taps(Int8Weights(layer.factor, layer.factor_bias)(inputs, False), layer.stride)
    outputs = Int8Weights(layer.expand, layer.expand_bias)(hidden, True, layer.gain, layer.offset)
    return outputs + share * inputs[:, layer.stride : inputs.shape[1] - layer.stride]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    num_utterances=st.integers(0, 5), more_frames=st.integers(-1, 90), dim=st.integers(1, 70),
    bottleneck=st.integers(1, 30), strides=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    has_taps=st.booleans(), num_threads=st.sampled_from([1, 2]), rows_in_cache=st.integers(1, 200),
    seed=st.integers(0, 10**6),
)  # fmt: skip
@example(4, 9, 33, 17, [1, 2], True, 1, 60, 0)  # several whole utterances in a part, and a part of fewer
@example(2, 90, 33, 17, [1, 2], True, 2, 20, 0)  # several parts of an utterance
def test_equal_to_the_layers_one_by_one(
    num_utterances: int, more_frames: int, dim: int, bottleneck: int, strides: list[int], has_taps: bool,
    num_threads: int, rows_in_cache: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    strides = strides if has_taps else [0] * len(strides)
    layers = [layer_of(dim, bottleneck, stride) for stride in strides]
    num_lost = 2 * sum(strides)
    inputs = torch.randn(num_utterances, max(num_lost + more_frames, 0), dim)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        found = Int8Layers(layers, 0.66, rows_in_cache)(inputs)
    finally:
        torch.set_num_threads(before)
    assert found.shape == (num_utterances, max(more_frames, 0), dim)
    for layer in layers if found.numel() else ():
        following = Int8Layers([layer], 0.66)(inputs)
        torch.testing.assert_close(following, outputs_of(layer, inputs, 0.66), rtol=1e-5, atol=1e-5)
        # Sums that are rounded otherwise can change the bytes of the next layer, which reads the same numbers here.
        inputs = following
    assert not found.numel() or torch.equal(found, inputs)


def test_a_frame_depends_only_on_what_it_reads() -> None:
    torch.manual_seed(0)
    layers = Int8Layers([layer_of(16, 4, 1), layer_of(16, 4, 2)], 0.66, rows_in_cache=8)
    inputs = torch.randn(2, 40, 16)
    before = layers(inputs)
    inputs[0, 20, 3], inputs[1, 5, 0] = torch.nan, -torch.inf
    after = layers(inputs)
    is_nan = after.isnan().all(dim=2)
    # Layers read three frames each, 1 and 2 apart.
    reads = [any(t + 3 + a + b == 20 for a in (-1, 0, 1) for b in (-2, 0, 2)) for t in range(34)]
    assert is_nan[0].tolist() == reads
    assert torch.equal(after[~is_nan], before[~is_nan]) and 0 < int(is_nan[1].sum()) < 34


def test_layers_of_a_network() -> None:
    """In bytes only where this is asked for; changes of weights and norms are noticed."""
    torch.manual_seed(0)
    layers = FactorizedLayers(FactorizedLayer(24, 6, stride) for stride in (1, 3)).eval()
    for layer in layers:
        layer.norm.running_mean, layer.norm.running_var = torch.randn(24), torch.rand(24) + 0.1
    inputs = torch.randn(2, 30, 24)

    def difference() -> float:
        """Of the two ways to compute, which must be small, but is not zero."""
        exact = layers(inputs)
        with byte_products():
            found = layers(inputs)
            alone = [FactorizedLayers([layer]).eval() for layer in layers]
            assert torch.equal(alone[1](alone[0](inputs)), found)
        return float((found - exact).abs().max())

    with torch.no_grad():
        assert 0.0 < difference() < 0.1
        for layer in layers:
            for changed in (*layer.parameters(), layer.norm.running_mean, layer.norm.running_var):
                changed.mul_(1.5)
                assert 0.0 < difference() < 0.1
        other = copy.deepcopy(layers)
        with byte_products():
            assert torch.equal(other(inputs), layers(inputs))
            other[0].expand.bias.add_(1.0)
            assert not torch.equal(other(inputs), layers(inputs))
            # The norms of a batch in training are its own.
            assert not torch.allclose(layers.train()(inputs), layers.eval()(inputs), atol=0.1)
    with byte_products():  # a gradient is wanted
        assert layers.eval()(inputs).requires_grad
    assert list(layers.state_dict())[:2] == ["0.factor.weight", "0.factor.bias"]
