"""Products of bytes against rounded numbers that torch multiplies, and what chooses them."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.kernels import linear
from asr.kernels.int8 import Int8Weights, are_bytes_multiplied, byte_products, has_byte_products, rounded_rows
from asr.kernels.linear import PackedLinear

needs_instruction = pytest.mark.skipif(not has_byte_products(), reason="needs numba and AVX-512 VNNI")


def rounded_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The oracle: whole numbers multiplied in float64, which is exact."""
    weight_step, right = rounded_rows(weight)
    inputs = inputs.double()
    lowest, highest = inputs.amin(1, keepdim=True), inputs.amax(1, keepdim=True)
    step = (highest - lowest).clamp(min=1e-30) / 255.0
    rounded = ((inputs - lowest) / step).round() * step + lowest
    return (rounded @ (right * weight_step[:, None]).double().t() + bias.double()).float()


@needs_instruction
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(0, 150), num_inputs=st.integers(1, 130), num_outputs=st.integers(1, 120),
    num_threads=st.sampled_from([1, 2]), rectifies=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_equal_to_the_product_of_rounded_numbers(
    num_rows: int, num_inputs: int, num_outputs: int, num_threads: int, rectifies: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    # Whole numbers of steps, which nothing rounds; rows of very different sizes, and of zeros.
    inputs = torch.randint(0, 256, (num_rows, num_inputs)).float()
    inputs[:, 0], inputs[:, -1] = 255.0, 0.0
    inputs = (inputs - torch.randint(0, 400, (num_rows, 1))) * 2.0 ** torch.randint(-20, 20, (num_rows, 1))
    inputs[::7] = 0.0
    expected = rounded_product(inputs, weight, bias)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        found = Int8Weights(weight, bias)(inputs, rectifies)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(
        found,
        expected.relu() if rectifies else expected,
        rtol=2e-5,
        atol=1e-5 * float(expected.abs().max() if expected.numel() else 0.0) + 1e-5,
    )


@needs_instruction
def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    product, inputs = Int8Weights(torch.randn(50, 70), torch.randn(50)), torch.randn(20, 70)
    together = product(inputs, False)
    inputs[1:] *= 1000.0
    assert torch.equal(product(inputs, False)[0], together[0])
    assert torch.equal(product(inputs[:1], False)[0], together[0])


@needs_instruction
@pytest.mark.parametrize("rectifies", [False, True])
def test_what_is_no_number_stays_so(rectifies: bool) -> None:
    inputs = torch.ones(4, 5)
    inputs[1, 2], inputs[2, 3] = torch.nan, -torch.inf
    inputs[3] = 1e-38
    outputs = Int8Weights(torch.ones(3, 5), torch.ones(3))(inputs, rectifies)
    assert outputs[1:3].isnan().all()
    torch.testing.assert_close(outputs[[0, 3]], torch.tensor([[6.0] * 3, [1.0] * 3]))


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
