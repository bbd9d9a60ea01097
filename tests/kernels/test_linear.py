"""Packed linear layers against plain ones: float32, weights in float16, and products of bytes; and the convolution."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from asr.kernels import linear
from asr.kernels.jit import has_package
from asr.kernels.linear import (
    ChannelsLastConv2d,
    KeptWhileUnchanged,
    PackedLinear,
    PackedWeights,
    are_bytes_multiplied,
    byte_products,
    float16_weights,
    has_byte_products,
)
from asr.models.tdnnf import FrameNorm

needs_numba = pytest.mark.skipif(not has_package("numba"), reason="needs numba")
needs_instruction = pytest.mark.skipif(not has_byte_products(), reason="needs numba and AVX2")


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


@pytest.mark.slow
@needs_numba
@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(0, 20), num_inputs=st.integers(1, 70), num_outputs=st.integers(1, 100),
    seed=st.integers(0, 10**6), is_strided=st.booleans(),
)  # fmt: skip
def test_equal_to_the_plain_product(
    num_rows: int, num_inputs: int, num_outputs: int, seed: int, is_strided: bool
) -> None:
    torch.manual_seed(seed)
    weight, bias = torch.randn(num_outputs, num_inputs).half().float(), torch.randn(num_outputs)
    product = float16_weights(weight, bias)
    if product is None:
        pytest.skip("the processor has no instruction that widens float16")
    inputs = torch.randn(num_rows, 2 * num_inputs)[:, ::2] if is_strided else torch.randn(num_rows, num_inputs)
    torch.testing.assert_close(product(inputs), F.linear(inputs, weight, bias))


@needs_numba
def test_small_and_large_weights_are_widened_exactly() -> None:
    weight = torch.tensor([[6e-8, -65504.0, 0.0], [2.0**-14, 1.0, -0.0]])
    product = float16_weights(weight.half().float(), torch.zeros(2))
    if product is None:
        pytest.skip("the processor has no instruction that widens float16")
    assert torch.equal(product(torch.eye(3)), weight.half().float().t())


@needs_numba
def test_other_weights_are_left_to_others() -> None:
    assert float16_weights(torch.tensor([[1.0 + 2.0**-12]]), torch.zeros(1)) is None
    assert float16_weights(torch.tensor([[1e6]]), torch.zeros(1)) is None


@needs_numba
def test_few_rows_take_it_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def recorded(weight: torch.Tensor, bias: torch.Tensor) -> linear._Product:
        product = float16_weights(weight, bias) or (lambda inputs: F.linear(inputs, weight, bias))
        return lambda inputs, rectifies: (asked.append(len(inputs)), product(inputs))[1]

    monkeypatch.setattr(linear, "float16_weights", recorded)
    fixed, weight, bias = PackedWeights(), torch.randn(5, 7).half().float(), torch.randn(5)
    before = torch.get_num_threads()
    try:
        for num_threads, num_rows in ((1, 8), (2, 9), (1, linear.MAX_LOOP_ROWS + 1), (1, 1), (1, 3)):
            torch.set_num_threads(num_threads)
            inputs = torch.randn(num_rows, 7)
            torch.testing.assert_close(fixed(inputs, weight, bias), F.linear(inputs, weight, bias))
    finally:
        torch.set_num_threads(before)
    assert asked == [8, 3]


@needs_instruction
def test_layers_multiply_bytes_where_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, inputs = PackedLinear(70, 50), torch.randn(1, 9, 70)
    with torch.no_grad():
        exact = layer(inputs)
        with byte_products():
            rough = layer(inputs)
            assert torch.equal(layer.rectified(inputs), rough.relu())
            assert torch.equal(layer(inputs[:, :1]), rough[:, :1])
            with byte_products(False):
                assert torch.equal(layer(inputs), exact)
            layer.weight.mul_(2.0)
            assert torch.allclose(layer(inputs) - layer.bias, 2.0 * (rough - layer.bias), atol=1e-5)
            others: list[bool] = []
            thread = threading.Thread(target=lambda: others.append(are_bytes_multiplied()))
            thread.start()
            thread.join()
            assert others == [False]
        assert not are_bytes_multiplied()
    assert 0.0 < float((rough - exact).abs().max()) < 0.1
    with byte_products():  # a gradient is wanted
        assert torch.allclose(layer(inputs), torch.nn.functional.linear(inputs, layer.weight, layer.bias), atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 3, 30, linear.MAX_LOOP_ROWS + 1])
def test_rectified(num_rows: int) -> None:
    torch.manual_seed(0)
    layer, inputs = PackedLinear(7, 5), torch.randn(num_rows, 7)
    for weight in (layer.weight.data, layer.weight.data.half().float()):
        layer.weight.data = weight
        expected = torch.nn.functional.linear(inputs, layer.weight, layer.bias).relu()
        torch.testing.assert_close(layer.rectified(inputs), expected)
        with torch.no_grad():
            torch.testing.assert_close(layer.rectified(inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("in_bytes", [False, pytest.param(True, marks=needs_instruction)])
def test_normalized_is_the_norm_of_rectified(num_threads: int, in_bytes: bool) -> None:
    torch.manual_seed(0)
    layer, norm = PackedLinear(70, 101), FrameNorm(101).eval()
    norm.running_mean, norm.running_var = torch.randn(101), torch.rand(101) + 0.1
    inputs = torch.randn(2, 80, 70)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        with torch.no_grad(), byte_products(in_bytes):
            expected = norm(layer.rectified(inputs))
            found = layer.normalized(inputs, norm)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
            assert layer.normalized(inputs[:0], norm).shape == (0, 80, 101)
            # More dimensions, and fewer.
            groups = layer.normalized(inputs.unflatten(1, (4, 20)), norm)
            torch.testing.assert_close(groups.flatten(1, 2), found)
            torch.testing.assert_close(layer.normalized(inputs[1], norm), groups[1].flatten(0, 1))
    finally:
        torch.set_num_threads(before)
    assert layer.normalized(inputs, norm).requires_grad


def test_what_is_kept_while_unchanged() -> None:
    kept, tensors, counts = KeptWhileUnchanged[int](), [torch.zeros(2), torch.ones(3)], itertools.count()

    def value() -> int:
        return kept.get(tensors, lambda: next(counts))

    assert [value(), value()] == [0, 0]
    tensors[1][0] = 5.0
    assert [value(), value()] == [1, 1]
    tensors[0] = tensors[0].clone()
    assert [value(), value()] == [2, 2]
    for copied in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert copied.get(tensors, lambda: 7) == 7
    assert value() == 2


@pytest.mark.parametrize("channels", [1, 5])
def test_the_convolution_equals_torch(channels: int) -> None:
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
