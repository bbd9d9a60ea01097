"""Products of bytes against the same products of rounded numbers in float64: layers, joined taps, and a convolution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from asr.kernels.byte_products import (
    Int8Convolution,
    Int8Weights,
    fill_byte_products,
    has_byte_products,
    joined_taps,
    rounded_rows,
    set_rows,
)
from asr.kernels.jit import jit_required
from asr.kernels.linear import ChannelsLastConv2d, byte_products
from asr.models.tdnnf import FrameNorm

needs_instruction = pytest.mark.skipif(not has_byte_products(), reason="needs numba and AVX2")


def rounded_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The oracle: whole numbers multiplied in float64, which is exact."""
    weight_step, right = rounded_rows(weight)
    inputs = inputs.double()
    lowest, highest = inputs.amin(1, keepdim=True), inputs.amax(1, keepdim=True)
    step = (highest - lowest).clamp(min=1e-30) / 255.0
    rounded = ((inputs - lowest) / step).round() * step + lowest
    return (rounded @ (right * weight_step[:, None]).double().t() + bias.double()).float()


@pytest.mark.slow
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
def test_without_leave_to_use_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights and other code on disk, since code with tiles would end the process; the numbers are the same."""
    from numba.core.registry import cpu_target

    from asr.kernels import intrinsics

    torch.manual_seed(0)
    weight, bias, inputs = torch.randn(50, 70), torch.randn(50), torch.randn(45, 70)
    product, may_use = Int8Weights(weight, bias), intrinsics.has_tiles()
    monkeypatch.setattr(intrinsics, "_may_use_tiles", lambda: False)
    without = Int8Weights(weight, bias)
    assert torch.equal(product(inputs, False), without(inputs, False))
    assert product.tables.tiles.shape[1] == (32 if may_use else without.tables.tiles.shape[1])
    assert (set_rows.stamps(()) == [("tiles", 0)]) and without.tables.tiles.shape[1] in (18, 35)
    key = jit_required(fill_byte_products)._cache._index_key
    codegen = cpu_target.target_context.codegen()
    before = key((), codegen)
    monkeypatch.undo()
    assert (key((), codegen) != before) == may_use


@needs_instruction
@pytest.mark.parametrize("rectifies", [False, True])
def test_what_is_no_number_stays_so(rectifies: bool) -> None:
    inputs = torch.ones(6, 5)
    inputs[1] = 1e-38
    inputs[2, 2], inputs[3, 3], inputs[4, 0], inputs[5, 4] = torch.nan, -torch.inf, torch.inf, -torch.nan
    outputs = Int8Weights(torch.ones(3, 5), torch.ones(3))(inputs, rectifies)
    assert outputs[2:].isnan().all()
    torch.testing.assert_close(outputs[:2], torch.tensor([[6.0] * 3, [1.0] * 3]))


@needs_instruction
@pytest.mark.parametrize("rectifies", [False, True])
def test_gain_and_offset_follow(rectifies: bool) -> None:
    torch.manual_seed(0)
    product, inputs = Int8Weights(torch.randn(50, 70), torch.randn(50)), torch.randn(2, 70, 70)
    gain, offset = torch.randn(50), torch.randn(50)
    expected = product(inputs, rectifies) * gain + offset
    torch.testing.assert_close(product(inputs, rectifies, gain, offset), expected, rtol=1e-6, atol=1e-6)


def test_joined_taps() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 40, 24)
    for stride in (1, 3, 19):
        sums = torch.stack([inputs[:, t, :12] + inputs[:, t + stride, 12:] for t in range(40 - stride)], dim=1)
        joined = torch.stack(
            [torch.cat((sums[:, t], sums[:, t + stride]), dim=1) for t in range(40 - 2 * stride)], dim=1
        )
        torch.testing.assert_close(joined_taps(inputs, stride), joined, rtol=0.0, atol=0.0)
    assert joined_taps(inputs, 0) is inputs and joined_taps(inputs[:, :2], 1).shape == (3, 0, 24)


def rounded_convolution(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, stride: tuple[int, int], rectifies: bool
) -> torch.Tensor:
    """The oracle: whole numbers convolved in float64, with a step for each output frame; zero is in its range."""
    weight_step, right = rounded_rows(weight.flatten(1))
    right = (right * weight_step[:, None]).double().view(weight.shape)
    inputs, length = inputs.double(), weight.shape[2]
    frames = []
    for begin in range(0, inputs.shape[2] - length + 1, stride[0]):
        window = F.pad(inputs[:, :, begin : begin + length], (1, 1))
        window = window.relu() if rectifies else window
        lowest, highest = window.amin((1, 2, 3), keepdim=True), window.amax((1, 2, 3), keepdim=True)
        step = (highest - lowest).clamp(min=1e-30) / 255.0
        rounded = ((window - lowest) / step).round() * step + lowest
        frames.append(F.conv2d(rounded, right, bias.double(), (1, stride[1])).relu())
    return torch.cat(frames, dim=2).float()


@pytest.mark.slow
@needs_instruction
@settings(max_examples=60, deadline=None)
@given(
    num_images=st.integers(1, 3), num_places=st.integers(1, 9), num_channels=st.integers(2, 24),
    num_outputs=st.integers(1, 60), length=st.integers(1, 5), more_frames=st.integers(0, 30),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)), rectifies=st.booleans(), lowest=st.integers(-200, 0),
    num_threads=st.sampled_from([1, 2]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_the_convolution_equals_that_of_rounded_numbers(
    num_images: int, num_places: int, num_channels: int, num_outputs: int, length: int, more_frames: int,
    stride: tuple[int, int], rectifies: bool, lowest: int, num_threads: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    weight, bias = torch.randn(num_outputs, num_channels, length, 3), torch.randn(num_outputs)
    # Whole numbers of steps, which nothing rounds: each frame ranges over 255. Frames of very different sizes.
    lowest, highest = (-255, 255) if rectifies else (lowest, lowest + 255)
    inputs = torch.randint(lowest, highest + 1, (num_images, num_channels, length + more_frames, num_places)).float()
    inputs[:, 0, :, 0], inputs[:, 1, :, 0] = highest, lowest
    inputs *= 2.0 ** torch.randint(-20, 20, (num_images, 1, 1, 1))
    expected = rounded_convolution(inputs, weight, bias, stride, rectifies)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        found = Int8Convolution(weight, bias, stride, rectifies)(inputs)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5 * float(expected.abs().max()) + 1e-5)


@needs_instruction
def test_a_norm_and_a_bypass_follow_the_convolution() -> None:
    torch.manual_seed(0)
    product, inputs = (
        Int8Convolution(torch.randn(16, 16, 3, 3), torch.randn(16), (1, 1), False),
        torch.randn(2, 16, 30, 7),
    )
    gain, offset = torch.randn(16), torch.randn(16)
    expected = product(inputs) * gain[:, None, None] + offset[:, None, None] + 0.5 * inputs[:, :, 1:-1]
    torch.testing.assert_close(product(inputs, gain, offset, 0.5), expected, rtol=1e-5, atol=1e-5)


@needs_instruction
@pytest.mark.parametrize("rectifies", [False, True])
def test_an_output_frame_depends_only_on_what_it_reads(rectifies: bool) -> None:
    torch.manual_seed(0)
    product = Int8Convolution(torch.randn(50, 8, 5, 3), torch.randn(50), (3, 2), rectifies)
    inputs = torch.randn(2, 8, 41, 10)
    before = product(inputs)
    inputs[0, :, 8:] *= 1000.0
    inputs[1, 3, 20, 4], inputs[1, 0, 40, 9] = torch.nan, torch.inf
    after = product(inputs)
    assert torch.equal(after[0, :, :2], before[0, :, :2])
    assert not torch.equal(after[0, :, 2], before[0, :, 2])
    reads_nan = torch.tensor([3 * t <= 20 < 3 * t + 5 or 3 * t + 4 == 40 for t in range(13)])
    assert after[1, :, reads_nan].isnan().all()
    assert torch.equal(after[1, :, ~reads_nan], before[1, :, ~reads_nan])
    inputs[1, 3, 20, 4], inputs[1, 0, 40, 9] = -torch.nan, -torch.inf
    assert product(inputs)[1, :, reads_nan].isnan().all()
    below = torch.full((1, 8, 5, 10), -3.0)
    assert torch.equal(product(torch.zeros(1, 8, 5, 10)), product(below)) == rectifies
    assert product(inputs[:, :, :4]).shape == (2, 50, 0, 5)


@pytest.mark.parametrize("in_bytes", [False, pytest.param(True, marks=needs_instruction)])
@pytest.mark.parametrize("bins", [3, 5])
def test_a_convolution_between_relus(in_bytes: bool, bins: int) -> None:
    torch.manual_seed(0)
    reference = nn.Conv2d(16, 6, kernel_size=(5, bins), stride=(3, 2), padding=(0, 1))
    network = ChannelsLastConv2d(16, 6, kernel_size=(5, bins), stride=(3, 2), padding=(0, 1))
    network.load_state_dict(reference.state_dict())
    inputs = torch.randn(2, 16, 23, 7)
    expected = reference(inputs.relu()).relu().detach()
    with torch.no_grad(), byte_products(in_bytes):
        found = network.between_relus(inputs.clone())
    error = float((found - expected).abs().max())
    assert error < 0.05
    assert (error > 1e-5) == (in_bytes and bins == 3)
    found = network.between_relus(inputs.clone())  # a gradient is wanted
    assert found.requires_grad
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_bytes", [False, pytest.param(True, marks=needs_instruction)])
def test_a_normalized_convolution(in_bytes: bool) -> None:
    """The norm learns in training; then bytes are multiplied, and the result is nearly the same."""
    torch.manual_seed(0)
    network, norm = ChannelsLastConv2d(6, 6, 3, padding=(0, 1)), FrameNorm(6)
    inputs = torch.randn(2, 6, 23, 7)
    with torch.no_grad(), byte_products(in_bytes):
        hidden = F.conv2d(inputs, network.weight, network.bias, padding=(0, 1)).relu()
        for _ in range(200):
            found = network.normalized(inputs, norm, 0.5)
        mean, std = hidden.mean((0, 2, 3), keepdim=True), hidden.std((0, 2, 3), keepdim=True, correction=0)
        expected = (hidden - mean) / (std.square() + norm.eps).sqrt() + 0.5 * inputs[:, :, 1:-1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        num = hidden[:, 0].numel()
        norm.eval().running_var *= (num - 1) / num  # of the batch; what is held is an estimate for all
        found = network.normalized(inputs, norm, 0.5)
    error = float((found - expected).abs().max())
    assert error < 0.1
    assert (error > 1e-3) == in_bytes
