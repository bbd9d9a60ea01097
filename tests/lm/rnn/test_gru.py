"""The GRU layer against torch.nn.GRU, and its resets against separate sequences."""

from __future__ import annotations

import copy

import pytest
import torch

from asr.lm.rnn.recurrent import GruLayer, SimpleRnnLayer, compiled_cell
from asr.lm.rnn.recurrent_numba import MIN_ROWS_FOR_TILES


def _pair() -> tuple[GruLayer, torch.nn.GRU]:
    torch.manual_seed(1)
    layer, reference = GruLayer(5, 7), torch.nn.GRU(5, 7)
    torch.nn.init.normal_(layer.bias_hh)
    torch.nn.init.normal_(layer.bias_ih)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(reference, f"{name}_l0").data.copy_(getattr(layer, name).data)
    return layer, reference


@pytest.mark.parametrize("form", ["looped", "tensors", "written for the compiler"])
def test_values_and_gradients_equal_torch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, reference = _pair()
    if form == "tensors":
        monkeypatch.setattr("asr.lm.rnn.recurrent_numba.jit_for", lambda function, tensor: None)
    elif form == "written for the compiler":
        monkeypatch.setattr(torch, "compile", lambda function, dynamic: function, raising=False)
        monkeypatch.setattr("asr.lm.rnn.recurrent.compiled_cell", compiled_cell.__wrapped__)
        layer.compile_cell = True
    inputs = torch.randn(6, 3, 5, requires_grad=True)
    state = torch.randn(3, 7, requires_grad=True)
    outputs, last = layer(inputs, state, torch.ones(6, 3, 1))
    expected, _ = reference(inputs, state[None])
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(last, expected[-1])
    weight = torch.randn_like(outputs)
    found = torch.autograd.grad((outputs * weight).sum(), [inputs, state, *layer.parameters()])
    wanted = torch.autograd.grad((expected * weight).sum(), [inputs, state, *reference.parameters()])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_reset_cuts_states_and_gradients() -> None:
    layer, _ = _pair()
    inputs = torch.randn(6, 2, 5)
    keep = torch.ones(6, 2, 1)
    keep[3, 1] = 0
    state = torch.randn(2, 7, requires_grad=True)
    outputs, _ = layer(inputs, state, keep)
    alone, _ = layer(inputs[3:, 1:], torch.zeros(1, 7), torch.ones(3, 1, 1))
    torch.testing.assert_close(outputs[3:, 1:], alone)
    (gradient,) = torch.autograd.grad(outputs[3:].sum(), [state])
    assert gradient[1].abs().max() == 0
    assert gradient[0].abs().min() > 0


@pytest.mark.parametrize("cell", ["gru", "sigmoid", "relu"])
def test_step_equals_sequence(cell: str) -> None:
    torch.manual_seed(2)
    layer = GruLayer(5, 7) if cell == "gru" else SimpleRnnLayer(5, 7, cell)  # type: ignore[arg-type]
    inputs = torch.randn(4, 3, 5)
    state = torch.randn(3, 7).abs()
    outputs, _ = layer(inputs, state, torch.ones(4, 3, 1))
    for row, expected in zip(inputs, outputs, strict=True):
        state = layer.step(row, state)
        torch.testing.assert_close(state, expected)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["gru", "sigmoid", "relu"])
@pytest.mark.parametrize("size", [7, 130])  # one tile of the loop's weights, and two
@torch.no_grad()
def test_sentences_side_by_side_equal_steps(cell: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    layer = GruLayer(5, size) if cell == "gru" else SimpleRnnLayer(5, size, cell)  # type: ignore[arg-type]
    for name, parameter in layer.named_parameters():
        if name.startswith("bias"):
            torch.nn.init.normal_(parameter)
    words, sizes = torch.randn(40, 5), [131, 131, 130, 66, 65, 3, 1]
    input_idx = torch.randint(0, 40, (sum(sizes),))
    initial = torch.rand(131, size)
    expected, state = [], initial
    for rows in input_idx.split(sizes):
        state = layer.step(words[rows], state[: len(rows)])
        expected.append(state)
    gates, num_threads = layer.input_gates(words), torch.get_num_threads()
    assert len(input_idx) >= MIN_ROWS_FOR_TILES
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outputs, last = layer.packed(gates, input_idx, sizes, initial)
        torch.testing.assert_close(outputs, torch.cat(expected), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(last, expected[-1], rtol=1e-5, atol=2e-6)
    torch.set_num_threads(num_threads)
    monkeypatch.setattr(f"{type(layer).__module__}.jit_for", lambda function, tensor: None)
    torch.testing.assert_close(layer.packed(gates, input_idx, sizes, initial)[0], outputs, rtol=1e-5, atol=2e-6)


def test_bfloat16_is_near_float32() -> None:
    layer, _ = _pair()
    inputs = torch.randn(6, 3, 5)
    exact, _ = layer(inputs, torch.zeros(3, 7), torch.ones(6, 3, 1))
    layer.compute_dtype = torch.bfloat16
    rough, _ = layer(inputs, torch.zeros(3, 7), torch.ones(6, 3, 1))
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.05


def test_packed_weights_follow_the_parameters_and_copies_pack_their_own() -> None:
    """Many rows at once, without gradient, as torch.gru_cell; after an update too, and in a copy."""
    torch.manual_seed(3)
    layer = GruLayer(24, 32)
    words, which, state = torch.randn(7, 24), torch.randint(7, (40,)), torch.randn(40, 32)

    def expected(one: GruLayer) -> torch.Tensor:
        weights = one.weight_ih, one.weight_hh, one.bias_ih, one.bias_hh
        return torch.gru_cell(words[which], state, *weights)

    with torch.no_grad():
        torch.testing.assert_close(layer.step(words, state, which), expected(layer))
        layer.weight_hh.add_(torch.randn(96, 32))
        layer.bias_ih.add_(torch.randn(96))
        copied = copy.deepcopy(layer)
        copied.weight_ih.mul_(2.0)
        for one in (layer, copied):
            torch.testing.assert_close(one.step(words, state, which), expected(one))
            torch.testing.assert_close(one.step(words[which], state), expected(one))
            # One row at a time goes another way.
            alone = [one.step(words[which[i : i + 1]], state[i : i + 1]) for i in range(len(which))]
            torch.testing.assert_close(torch.cat(alone), expected(one))
    torch.testing.assert_close(layer.step(words, state, which), expected(layer))
