"""A widened network computes what the narrow one does, and its copied units learn different things."""

from __future__ import annotations

import pytest
import torch

from asr.errors import AsrError
from asr.lm.rnn.data import TokenStreams
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.widen import widened
from asr.text.symbols import Vocabulary

SHAPE = {"embedding_size": 6, "hidden_size": 8, "maxent_order": 3, "maxent_size": 97, "num_noise_words": 16}


def _network(**more: object) -> RNNLanguageModel:
    torch.manual_seed(3)
    network = RNNLanguageModel(Vocabulary([f"W{number}" for number in range(20)]), RNNLMConfig(**{**SHAPE, **more}))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network


@pytest.mark.parametrize("hidden_size", [8, 13, 16, 25])
def test_the_scores_stay(hidden_size: int) -> None:
    network = _network().eval()
    wider = widened(network, hidden_size)
    word_id = torch.randint(4, 24, (5, 12))
    history = word_id[:, :2]
    with torch.no_grad():
        narrow, wide = network.initial_state().expand(5, -1), wider.initial_state().expand(5, -1)
        for step in range(12):
            narrow, wide = network.step(narrow, word_id[:, step]), wider.step(wide, word_id[:, step])
            torch.testing.assert_close(wide[:, hidden_size:], narrow[:, 8:])
            torch.testing.assert_close(
                wider.log_prob(wide[:, hidden_size:], history, word_id[:, step]),
                network.log_prob(narrow[:, 8:], history, word_id[:, step]),
            )


def test_copies_of_a_unit_learn_different_things() -> None:
    network = widened(_network(), 16)
    tokens = torch.randint(4, 24, (400,)).numpy()
    network.output.set_unigram(torch.ones(24, dtype=torch.int64), reset_bias=False)
    loss, _ = network(TokenStreams(tokens, 4, 10, 2)[0], None, torch.Generator().manual_seed(1))
    loss.backward()
    gradient = network.layers[0].weight_ih.grad
    assert gradient is not None
    first, second = gradient.view(3, 2, 8, 6).unbind(1)
    assert (first - second).abs().amax(dim=-1).min() > 1e-3  # of equal halves 0


@pytest.mark.parametrize(
    ("shape", "hidden_size", "says"),
    [({"num_layers": 2}, 16, "one GRU layer"), ({"cell": "relu"}, 16, "one GRU layer"), ({}, 4, "8 hidden units")],
)
def test_other_networks_are_refused(shape: dict[str, object], hidden_size: int, says: str) -> None:
    with pytest.raises(AsrError, match=says):
        widened(_network(**shape), hidden_size)
