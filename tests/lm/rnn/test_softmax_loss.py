"""The softmax over all words: loss and gradients against autograd, and the penalty on log Z."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.outputs.nce import NceOutput, Normalization
from asr.lm.rnn.outputs.softmax import FullSoftmaxOutput
from asr.lm.rnn.outputs.softmax_loss import LogZPenalty, softmax_loss
from asr.text.symbols import BOS_ID, EPSILON_ID, Vocabulary

# More scores than one block has on a CPU.
NUM_WORDS, NUM_QUERIES, WIDTH = 3000, 1600, 4


def inputs(order: int) -> tuple[list[Tensor], HashedMaxEnt | None, Tensor, Tensor]:
    """Leaves hidden, rows, bias and log Z; features; history; the words to predict."""
    generator = torch.Generator().manual_seed(order)
    hidden, rows = (torch.randn(num, WIDTH, generator=generator) for num in (NUM_QUERIES, NUM_WORDS))
    bias, log_z = torch.randn(NUM_WORDS, generator=generator), torch.tensor(7.0)
    leaves = [part.requires_grad_() for part in (hidden, rows, bias, log_z)]
    maxent = None
    if order > 1:
        maxent = HashedMaxEnt(NUM_WORDS, order, 50)
        nn.init.normal_(maxent.weight)
    history = torch.randint(NUM_WORDS, (NUM_QUERIES, max(0, order - 1)), generator=generator)
    return leaves, maxent, history, torch.randint(2, NUM_WORDS, (NUM_QUERIES,), generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 2, 3])
@pytest.mark.parametrize("penalty", [None, 0.3])
def test_loss_and_gradients_are_those_of_plain_operations(order: int, penalty: float | None) -> None:
    leaves, maxent, history, word_id = inputs(order)
    hidden, rows, bias, log_z = leaves
    scores = hidden @ rows.t() + bias
    if maxent is not None:
        places = maxent.places(history)
        for column in places.unbind(dim=1):
            scores = scores + maxent.weight[column[:, None] + torch.arange(NUM_WORDS)]
        leaves = [*leaves, maxent.weight]
    scores = scores.index_fill(1, torch.tensor([EPSILON_ID, BOS_ID]), -torch.inf)
    expected = F.cross_entropy(scores, word_id, reduction="sum")
    if penalty is not None:
        expected = expected + penalty * (scores.logsumexp(dim=1) - log_z).square().sum()
    found = softmax_loss(
        *(hidden, rows, bias, maxent, history, word_id), None if penalty is None else LogZPenalty(log_z, penalty)
    )
    torch.testing.assert_close(found, expected)
    # Twice the loss: the gradients do not depend on what the loss is part of.
    wanted = torch.autograd.grad(2 * expected, leaves, allow_unused=True)
    for one, other in zip(torch.autograd.grad(2 * found, leaves, allow_unused=True), wanted, strict=True):
        if other is None:
            assert one is None or not one.any()
            continue
        torch.testing.assert_close(one.to_dense() if one.is_sparse else one, other, rtol=1e-4, atol=1e-3)
    assert (
        maxent is None
        or torch.autograd.grad(softmax_loss(hidden, rows, bias, maxent, history, word_id), maxent.weight)[0].is_sparse
    )


@pytest.mark.slow
def test_bfloat16_rounds_products_only() -> None:
    (hidden, rows, bias, _), maxent, history, word_id = inputs(2)
    exact = softmax_loss(hidden, rows, bias, maxent, history, word_id)
    coarse = softmax_loss(hidden, rows, bias, maxent, history, word_id, compute_dtype=torch.bfloat16)
    assert exact != coarse
    torch.testing.assert_close(coarse, exact, rtol=1e-3, atol=0.0)


@pytest.mark.slow
def test_a_full_softmax_and_a_constant_log_z_have_the_same_loss() -> None:
    rows = nn.Embedding(NUM_WORDS, WIDTH, sparse=True)
    full, nce = FullSoftmaxOutput(rows, None), NceOutput(rows, None, normalization=Normalization(log_z_penalty=0.0))
    nce.bias.weight.data[:, 0] = full.bias.data
    (hidden, *_), _, history, word_id = inputs(0)
    arguments = (hidden, history, word_id, torch.Generator())
    torch.testing.assert_close(full.loss(*arguments), nce.loss(*arguments))


@pytest.mark.parametrize("fields", [{"log_z_penalty": -0.1}, {"log_z_penalty": 0.1, "output": "full"}])
def test_a_penalty_that_would_have_no_effect_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"log_z_penalty is -?0.1; it must be 0 or more, and the output nce"):
        RNNLMConfig(**fields)


@pytest.mark.slow
def test_training_pulls_log_z_to_its_constant() -> None:
    """A few steps: the penalty lowers the spread of log Z; without it, log Z drifts."""
    spread = []
    for penalty in (0.0, 1.0):
        torch.manual_seed(0)
        config = RNNLMConfig(embedding_size=8, hidden_size=8, log_z_penalty=penalty)
        network = RNNLanguageModel(Vocabulary(f"w{number}" for number in range(30)), config)
        hidden = torch.randn(64, network.hidden_size)
        history, word_id = torch.empty(64, 0, dtype=torch.int64), torch.randint(2, 34, (64,))
        optimizer = torch.optim.SGD(network.output.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            network.output.loss(hidden, history, word_id, torch.Generator()).backward()
            optimizer.step()
        log_z = network.exact_log_z(64)
        assert log_z is not None
        spread.append(float(log_z(hidden, history).square().mean()))
    assert spread[1] < 0.1 * spread[0]
