"""The compiled steps of one GRU layer against the same in tensors."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from asr.kernels.byte_products import has_byte_products
from asr.kernels.jit import torch_on_one_thread
from asr.kernels.linear import byte_products
from asr.lm.rnn import model
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary

pytest.importorskip("numba")


def in_loop_and_tensors(
    num_rows: int, embedding_size: int, hidden_size: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor | None], list[Tensor]]:
    """A step and its branches, by the loop (None where there is none) and by tensors."""
    torch.manual_seed(num_rows)
    network = RNNLanguageModel(Vocabulary([f"W{i}" for i in range(30)]), RNNLMConfig(embedding_size, hidden_size))
    network.load_state_dict({name: value.half().float() for name, value in network.state_dict().items()})
    state, word_id = torch.randn(num_rows, network.state_size), torch.randint(30, (num_rows,))
    before = torch.randint(num_rows, (num_rows,))
    found: list[Tensor | None] = []

    def recorded(*arguments: object) -> Tensor | None:
        found.append(rnn_lm_step(*arguments))  # type: ignore[arg-type]
        return None

    rnn_lm_step = model.gru_step
    monkeypatch.setattr(model, "gru_step", recorded)
    with torch.no_grad():
        return found, [network.step(state, word_id), network.branch(state, before, word_id)]


@pytest.mark.parametrize("num_rows", [1, 5, 8, 30])
@pytest.mark.parametrize("embedding_size", [6, 9])
def test_equal_to_tensor_operations(num_rows: int, embedding_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected = in_loop_and_tensors(num_rows, embedding_size, 9, monkeypatch)
    if found[0] is None:
        pytest.skip("the processor has no instruction that widens float16")
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.skipif(not has_byte_products(), reason="needs numba and AVX2")
@pytest.mark.parametrize("num_rows", [1, 5, 8, 30, 100])
@pytest.mark.parametrize(("embedding_size", "hidden_size"), [(6, 9), (9, 9), (16, 40)])
def test_products_of_bytes_are_the_same_in_the_loop(
    num_rows: int, embedding_size: int, hidden_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with byte_products():
        found, expected = in_loop_and_tensors(num_rows, embedding_size, hidden_size, monkeypatch)
    for own, other in zip(found, expected, strict=True):
        assert own is not None
        assert torch.equal(own, other)


@pytest.mark.skipif(not has_byte_products(), reason="needs numba and AVX2")
def test_many_rows_of_bytes_are_divided_among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads = torch.get_num_threads()
    for threads, torch_alone, has_loop in ((1, False, True), (2, False, False), (2, True, False)):
        torch.set_num_threads(threads)
        try:
            # Where torch alone has one thread, loops and products of bytes still have all of them.
            with byte_products(), torch_on_one_thread() if torch_alone else nullcontext():
                found, expected = in_loop_and_tensors(200, 6, 9, monkeypatch)
        finally:
            torch.set_num_threads(num_threads)
        monkeypatch.undo()
        assert [own is not None for own in found] == [has_loop, has_loop]
        assert all(own is None or torch.equal(own, other) for own, other in zip(found, expected, strict=True))


def test_other_weights_and_gradients_are_left_to_tensors() -> None:
    torch.manual_seed(0)
    network = RNNLanguageModel(Vocabulary([f"W{i}" for i in range(30)]), RNNLMConfig(6, 9))
    arguments = network.layers[0], network.embedding.weight
    queries = torch.randn(4, network.state_size), None, torch.arange(4)
    with torch.no_grad():
        assert model.gru_step(*arguments, *queries) is None  # type: ignore[arg-type]
    network.load_state_dict({name: value.half().float() for name, value in network.state_dict().items()})
    assert model.gru_step(*arguments, *queries) is None  # type: ignore[arg-type]
