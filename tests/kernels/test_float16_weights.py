"""The loop for weights that are float16 numbers against torch's product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from asr.kernels import linear
from asr.kernels.linear import PackedWeights, float16_weights

pytest.importorskip("numba")


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


def test_small_and_large_weights_are_widened_exactly() -> None:
    weight = torch.tensor([[6e-8, -65504.0, 0.0], [2.0**-14, 1.0, -0.0]])
    product = float16_weights(weight.half().float(), torch.zeros(2))
    if product is None:
        pytest.skip("the processor has no instruction that widens float16")
    assert torch.equal(product(torch.eye(3)), weight.half().float().t())


def test_other_weights_are_left_to_others() -> None:
    assert float16_weights(torch.tensor([[1.0 + 2.0**-12]]), torch.zeros(1)) is None
    assert float16_weights(torch.tensor([[1e6]]), torch.zeros(1)) is None


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
