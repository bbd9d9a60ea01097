"""Schedule, averaged weights, greedy decoding, flat start."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from asr.errors import AsrError
from asr.models.alignment import summed_cross_entropy, uniform_alignment
from asr.models.training import (
    GradientClipper,
    LitAcousticModel,
    WeightAverage,
    greedy_tokens,
    num_needed_frames,
    warmup_cosine,
)
from tests.grouped import grouped


@given(st.integers(1, 50), st.integers(60, 500), st.floats(0.0, 0.5))
def test_the_schedule_rises_then_falls_to_its_floor(warmup: int, total: int, floor: float) -> None:
    factors = [warmup_cosine(step, warmup, total, floor) for step in range(total + 10)]
    peak = max(range(len(factors)), key=factors.__getitem__)
    assert peak == warmup
    assert all(a < b for a, b in pairwise(factors[: peak + 1]))
    assert all(a >= b for a, b in pairwise(factors[peak:]))
    assert abs(factors[-1] - floor) < 1e-9


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("peak_lr", 0.0), ("warmup_fraction", 1.5), ("final_lr_fraction", -0.1), ("weight_decay", -0.1),
        ("max_gradient_norm", -1.0), ("intermediate_weight", 1.5), ("average_decay", 1.0), ("flat_start_steps", -1),
        ("length_multiple", 0),
    ],
)  # fmt: skip
def test_numbers_that_would_train_wrongly_are_refused(option: str, value: float) -> None:
    with pytest.raises(AsrError, match=f"^{option} is {value}; give "):
        grouped(LitAcousticModel, nn.Linear(1, 1), nn.Identity(), **{option: value})


def test_the_average_follows_the_weights() -> None:
    network = nn.Linear(1, 1)
    average = WeightAverage(network, decay=0.5)
    expected = average.network.weight.clone()  # type: ignore[union-attr, operator]
    for step, value in enumerate([1.0, 3.0, -2.0], start=1):
        nn.init.constant_(network.weight, value)
        average.update(network)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    torch.testing.assert_close(average.network.weight, expected)
    assert not average.train().network.training
    assert not any(parameter.requires_grad for parameter in average.parameters())


@pytest.mark.parametrize(("averages_statistics", "expected"), [(False, 11.0), (True, 9.0)])
def test_statistics_of_norms_are_copied_or_averaged(averages_statistics: bool, expected: float) -> None:
    network: Any = nn.BatchNorm1d(1)
    average = WeightAverage(network, 0.5, averages_statistics)
    network.running_mean.fill_(11.0)
    network.num_batches_tracked.fill_(7)
    average.update(network)  # with a decay of 2/11
    state = average.network.state_dict()
    assert state["running_mean"].item() == pytest.approx(expected) and state["num_batches_tracked"] == 7


def test_a_step_that_is_not_finite_is_dropped_and_many_end_the_training() -> None:
    layer, clipper = nn.Linear(2, 1), GradientClipper(1.0)

    def clip(value: float) -> Tensor:
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, value)
        return clipper.clip(layer)

    assert float(clip(3.0)) == pytest.approx(27**0.5)
    torch.testing.assert_close(layer.weight.grad, torch.full((1, 2), 3**-0.5))
    for _ in range(29):
        clip(torch.nan)
        assert layer.weight.grad is None
    clip(3.0)  # from here on it counts again
    for _ in range(29):
        clip(torch.inf)
    with pytest.raises(AsrError, match=r"diverged: the gradients of 30 steps in a row .* lower optimization\.peak_lr"):
        clip(torch.nan)


def test_greedy_merges_repeats_and_drops_blanks() -> None:
    path = torch.tensor([[0, 1, 1, 0, 1, 2, 2, 0], [3, 0, 0, 1, 1, 1, 1, 1]])
    log_prob = torch.nn.functional.one_hot(path, 4).float()
    assert greedy_tokens(log_prob, torch.tensor([8, 3])) == [[1, 1, 2], [3]]


@pytest.mark.parametrize(("tokens", "num"), [([], 0), ([3], 1), ([1, 2, 1], 3), ([2, 2, 2, 1], 6)])
def test_equal_neighbors_need_a_blank_between_them(tokens: list[int], num: int) -> None:
    assert num_needed_frames(tokens) == num


def test_tokens_are_spread_evenly_over_speech() -> None:
    features = torch.full((2, 32, 4), -10.0)
    features[0, 8:24] = 5.0  # output frames 2 to 5 of 8
    features[1, 0:8] = 5.0  # padding behind output frame 4
    alignment = uniform_alignment(
        features, torch.tensor([8, 4]), torch.tensor([[3, 1], [2, 0]]), torch.tensor([2, 1]), 8
    )
    assert alignment[0].tolist() == [0, 0, 3, 3, 1, 1, 0, 0]
    assert alignment[1].tolist() == [2, 2, 0, 0, -100, -100, -100, -100]
    log_prob = torch.full((2, 8, 4), 0.25).log()
    torch.testing.assert_close(summed_cross_entropy(log_prob, alignment), 12 * torch.tensor(4.0).log())
