"""The compiled step of one GRU layer against the same in tensors."""

from __future__ import annotations

import pytest
import torch

from asr.lm.rnn import model
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary

pytest.importorskip("numba")


@pytest.mark.parametrize("num_rows", [1, 5, 8, 30])
@pytest.mark.parametrize("embedding_size", [6, 9])
def test_equal_to_tensor_operations(num_rows: int, embedding_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(num_rows)
    network = RNNLanguageModel(Vocabulary([f"W{i}" for i in range(30)]), RNNLMConfig(embedding_size, 9))
    network.load_state_dict({name: value.half().float() for name, value in network.state_dict().items()})
    state, word_id = torch.randn(num_rows, network.state_size), torch.randint(30, (num_rows,))
    before = torch.randint(num_rows, (num_rows,))
    found: list[torch.Tensor | None] = []

    def recorded(*arguments: object) -> torch.Tensor | None:
        found.append(rnn_lm_step(*arguments))  # type: ignore[arg-type]
        return None

    rnn_lm_step = model.gru_step
    monkeypatch.setattr(model, "gru_step", recorded)
    with torch.no_grad():
        expected = [network.step(state, word_id), network.branch(state, before, word_id)]
    if found[0] is None:
        pytest.skip("the processor has no instruction that widens float16")
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_other_weights_and_gradients_are_left_to_tensors() -> None:
    torch.manual_seed(0)
    network = RNNLanguageModel(Vocabulary([f"W{i}" for i in range(30)]), RNNLMConfig(6, 9))
    arguments = network.layers[0], network.embedding.weight, network.projection
    queries = torch.randn(4, network.state_size), None, torch.arange(4)
    with torch.no_grad():
        assert model.gru_step(*arguments, *queries) is None  # type: ignore[arg-type]
    network.load_state_dict({name: value.half().float() for name, value in network.state_dict().items()})
    assert model.gru_step(*arguments, *queries) is None  # type: ignore[arg-type]
