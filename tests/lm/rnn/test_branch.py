"""Networks that extend one state by many words do as the plain network does; no score is above that of certainty."""

from __future__ import annotations

import pytest
import torch

from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary

VOCABULARY = Vocabulary(f"W{idx}" for idx in range(50))


def _network(num_layers: int, hidden_size: int, **more: object) -> RNNLanguageModel:
    torch.manual_seed(5)
    config = RNNLMConfig(
        embedding_size=6, hidden_size=hidden_size, num_layers=num_layers, maxent_order=3, maxent_size=101, log_z=0.7,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    network = RNNLanguageModel(VOCABULARY, config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["gru", "sigmoid"])
@pytest.mark.parametrize("num_layers, hidden_size", [(1, 6), (1, 9), (2, 9)])
@pytest.mark.parametrize("num_rows", [5, 300])  # distinct words are looked for among many
@pytest.mark.parametrize("looped", [True, False])
@torch.no_grad()
def test_rows_of_one_state_equal_rows_by_themselves(
    cell: str, num_layers: int, hidden_size: int, num_rows: int, looped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = _network(num_layers, hidden_size, cell=cell)
    state = torch.randn(200, network.state_size)  # torch 1.13 multiplies this many in another way
    before, word_id = torch.randint(200, (num_rows,)), torch.randint(2, len(VOCABULARY), (num_rows,))
    expected = torch.cat([network.step(state[i, None], word[None]) for i, word in zip(before, word_id, strict=True)])
    if not looped:
        monkeypatch.setattr("asr.lm.rnn.recurrent.jit_for", lambda function, tensor: None)
    num_threads = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.testing.assert_close(network.branch(state, before, word_id), expected, rtol=1e-5, atol=2e-6)
    torch.set_num_threads(num_threads)


def test_branch_has_the_gradient_of_a_step() -> None:
    network = _network(1, 9)
    before, word_id = torch.tensor([0, 1, 1]), torch.tensor([4, 5, 4])
    found, wanted = [], []
    for gradients, rows in ((found, True), (wanted, False)):
        state = torch.ones(2, network.state_size, requires_grad=True)
        after = network.branch(state, before, word_id) if rows else network.step(state[before], word_id)
        gradients.append(torch.autograd.grad(after.square().sum(), state)[0])
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_no_word_is_more_than_certain() -> None:
    network = _network(1, 6)
    network.output.bias.weight[7] = 50.0  # type: ignore[union-attr, operator]
    words = torch.tensor([7, 8])
    hidden, history = torch.randn(2, 6), torch.randint(2, len(VOCABULARY), (2, 2))
    assert network.word_score(hidden, history, words)[0] > 0.7  # log Z
    expected = network.log_prob(hidden, history, words)
    assert expected[0] == 0.0
    for compiled in (True, False):
        engine = CachedRNNLM(network, CacheOptions(compiled=compiled))
        log_prob, following = engine.score(engine.start(2), words)
        assert log_prob[0] == 0.0
        assert engine.score(following, words)[0][0] == 0.0
