"""Dropout by a seed: its rate, its gradient, its two forms, and masks that have nothing to do with one another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from asr.lm.rnn.data import TokenStreams
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.recurrent import seeded_dropout
from asr.text.symbols import Vocabulary


def _kept(seed: int, probability: float = 0.3, size: int = 40_000) -> Tensor:
    return seeded_dropout(torch.ones(size // 4, 4), probability, seed).view(-1) != 0


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_rate_and_mean_are_right(probability: float) -> None:
    kept = _kept(1, probability).float()
    assert abs(float(kept.mean()) - (1 - probability)) < 0.01
    inputs = torch.rand(100, 400)
    outputs = seeded_dropout(inputs, probability, 5)
    torch.testing.assert_close(outputs[outputs != 0], inputs[outputs != 0] / (1 - probability))


def test_masks_of_neighbouring_seeds_and_places_are_independent() -> None:
    masks = torch.stack([_kept(seed).float() for seed in range(20)])
    # And of shifted ones, of which a poor generator makes its seeds.
    masks = torch.cat((masks, masks[:5].roll(1, dims=1), masks[:5].roll(4, dims=1)))
    correlation = torch.corrcoef(masks) - torch.eye(len(masks))
    assert float(correlation.abs().max()) < 5 * masks.shape[1] ** -0.5


def test_each_layer_of_each_batch_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word vectors and two layers: three seeds a batch, of which a run that is resumed takes the same."""
    config = RNNLMConfig(embedding_size=4, hidden_size=4, num_layers=2, dropout=0.1)
    network, seeds = RNNLanguageModel(Vocabulary(["A", "B"]), config), list[int]()

    def noted(values: Tensor, probability: float, seed: int, whole: object) -> Tensor:
        seeds.append(seed)
        return values

    monkeypatch.setattr("asr.lm.rnn.model.seeded_dropout", noted)
    batch = TokenStreams(np.arange(2, 6, dtype=np.int32), 2, 2, 0)[0]
    for number in (0, 1, 2):
        network.hidden_sequence(batch, None, number)
    network.eval()
    network.hidden_sequence(batch, None, 3)
    assert seeds == list(range(9))


def test_gradient_goes_through_the_same_mask() -> None:
    inputs = torch.rand(30, 40, requires_grad=True)
    outputs = seeded_dropout(inputs, 0.4, 7)
    (gradient,) = torch.autograd.grad(outputs.sum(), [inputs])
    torch.testing.assert_close(gradient * inputs, outputs)


def test_masks_are_those_of_earlier_runs() -> None:
    """A run that is resumed draws what it would have drawn."""
    kept = "".join(map(str, _kept(12345, 0.5, 64).int().tolist()))
    assert kept == "0011110001100110101011010010011011011111101111010011111100011111"


def test_loop_equals_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, seeds = torch.randn(50, 60), (0, 3, (1 << 40) + 12345)
    looped = [seeded_dropout(inputs.t(), 0.2, seed) for seed in seeds]
    monkeypatch.setattr("asr.lm.rnn.recurrent.jit_for", lambda function, tensor: None)
    for seed, expected in zip(seeds, looped, strict=True):
        assert torch.equal(seeded_dropout(inputs.t(), 0.2, seed), expected)
