"""The sum over the vocabulary: compiled loops and tensors against plain sums in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from asr.kernels.jit import jit_for
from asr.lm.rnn.maxent import HashedMaxEnt
from asr.lm.rnn.outputs import log_partition
from asr.lm.rnn.outputs.log_partition import TILE, Int8LogZ, Precision, log_z_by_tensors, log_z_of


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def _layer(
    num_queries: int, num_words: int, size: int, order: int, std: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, HashedMaxEnt | None]:
    torch.manual_seed(order)
    maxent = HashedMaxEnt(num_words, order, 700) if order else None
    if maxent is not None:
        nn.init.normal_(maxent.weight, std=std)
    hidden, history = torch.randn(num_queries, size), torch.randint(0, num_words, (num_queries, max(order, 1) - 1))
    return hidden, history, std * torch.randn(num_words, size), std * torch.randn(num_words), maxent


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 2, 5])
@pytest.mark.parametrize(("num_queries", "num_words", "size"), [(515, 2 * TILE + 3, 9), (600, TILE, 8), (512, 40, 1)])
@pytest.mark.parametrize("std", [0.5, 40.0])  # scores of hundreds would overflow a careless sum
@torch.no_grad()
def test_loop_equals_tensors_and_float64(
    order: int, num_queries: int, num_words: int, size: int, std: float, three_threads: None
) -> None:
    if jit_for(log_partition.add_exponentials_float32, torch.empty(0)) is None:
        pytest.skip("needs numba")
    hidden, history, rows, bias, maxent = _layer(num_queries, num_words, size, order, std)
    expected = _in_float64(hidden, history, rows, bias, maxent).logsumexp(dim=1).float()
    close = {"rtol": 1e-6, "atol": 2e-6 * max(1.0, std)}
    torch.testing.assert_close(log_z_of(rows, bias, maxent, "float32", 512)(hidden, history), expected, **close)
    torch.testing.assert_close(log_z_of(rows, bias, maxent, "float32", 1)(hidden, history), expected, **close)


def _in_float64(hidden: Tensor, history: Tensor, rows: Tensor, bias: Tensor, maxent: HashedMaxEnt | None) -> Tensor:
    """All scores but those of <eps> and <s>, words 0 and 1, which are never predicted."""
    scores = hidden.double() @ rows.double().t() + bias
    if maxent is not None:
        scores += maxent.score_each(history, torch.arange(len(rows)))
    return scores[:, 2:]


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 2, 3, 4, 6])
@pytest.mark.parametrize(("num_queries", "num_words", "size"), [(515, 2 * TILE + 3, 9), (3, TILE, 64), (40, 40, 1)])
@pytest.mark.parametrize("std", [0.3, 40.0])
@torch.no_grad()
def test_rough_scores_round_to_steps_and_large_ones_are_exact(
    order: int, num_queries: int, num_words: int, size: int, std: float, three_threads: None
) -> None:
    """Against a loop over words in the order of the sum, each step of it by hand."""
    hidden, history, rows, bias, maxent = _layer(num_queries, num_words, size, order, std)
    exact = _in_float64(hidden, history, rows, bias, maxent)
    rough = _steps(hidden).double() @ _steps(rows).double().t() + bias
    if maxent is not None:
        rounded = HashedMaxEnt(num_words, order, 700)
        rounded.weight.copy_(_steps(maxent.weight[None])[0])
        rough += rounded.score_each(history, torch.arange(num_words))
    rough = rough[:, 2:]
    total = torch.full((num_queries,), -torch.inf, dtype=torch.float64)
    for first in range(0, num_words, TILE):
        words = slice(max(first - 2, 0), first + TILE - 2)
        limit = torch.logaddexp(total, rough[:, words].logsumexp(dim=1)) + math.log(log_partition.EXACT_SHARE)
        scores = torch.where(rough[:, words] > limit[:, None], exact[:, words], rough[:, words])
        total = torch.logaddexp(total, scores.logsumexp(dim=1))
    # A word on the limit may count either way.
    close = {"rtol": 1e-6, "atol": 2e-4 if std < 1 else 2e-3}
    found = log_z_of(rows, bias, maxent, "int8", num_queries)(hidden, history)
    torch.testing.assert_close(found, total.float(), **close)
    bias[:2] = -torch.inf
    torch.testing.assert_close(Int8LogZ(rows, bias, maxent, None)(hidden, history), total.float(), **close)


def _steps(numbers: Tensor) -> Tensor:
    """Each row (N, K) in 127 steps to either side."""
    step = numbers.abs().amax(dim=1, keepdim=True) / 127
    return (numbers / step).round() * step


@pytest.mark.slow
@torch.no_grad()
def test_int8_is_nearly_exact() -> None:
    layer = hidden, history, rows, bias, maxent = _layer(600, 3000, 64, 4, 0.3)
    error = log_z_of(rows, bias, maxent, "int8", 600)(hidden, history) - log_z_by_tensors(*layer)
    assert 0 < error.abs().mean() < 3e-3
    assert error.abs().max() < 2e-2
    # One word has nearly all of the sum: it is exact.
    bias[7] += 100
    error = log_z_of(rows, bias, maxent, "int8", 600)(hidden, history) - log_z_by_tensors(*layer)
    assert error.abs().max() < 2e-5


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_zeros_and_what_is_not_a_number(precision: Precision) -> None:
    hidden, history, rows, bias, maxent = _layer(513, 40, 4, 3, 0.5)
    hidden[5, 2] = torch.nan
    hidden[6], rows[7] = 0.0, 0.0
    found = log_z_of(rows, bias, maxent, precision, 513)(hidden, history)
    assert torch.nonzero(found.isnan()).tolist() == [[5]]
    expected = _in_float64(hidden[6:7], history[6:7], rows, bias, maxent).logsumexp(dim=1)
    torch.testing.assert_close(found[6:7], expected.float(), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_int8_is_the_same_without_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    register_block = pytest.importorskip("asr.kernels.intrinsics")
    hidden, history, rows, bias, maxent = _layer(20, 700, 16, 3, 0.3)
    with_it = log_z_of(rows, bias, maxent, "int8", 20)(hidden, history)
    monkeypatch.setattr(register_block, "has_instruction", lambda name: False)
    without = log_z_of(rows, bias, maxent, "int8", 20)(hidden, history)
    torch.testing.assert_close(without, with_it, rtol=1e-6, atol=2e-4)
