"""The sum over the vocabulary: the compiled loop against tensors, and against a plain sum in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from asr.lm.compiled_loop import loop_for
from asr.lm.rnn.log_z import TILE, add_exponentials, exact_log_z, log_z_by_loop, log_z_by_tensors
from asr.lm.rnn.maxent import HashedMaxEnt


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


@pytest.mark.parametrize("order", [0, 2, 5])
@pytest.mark.parametrize(("num_queries", "num_words", "size"), [(515, 2 * TILE + 3, 9), (600, TILE, 8), (512, 40, 1)])
@pytest.mark.parametrize("std", [0.5, 40.0])  # scores of hundreds would overflow a careless sum
@torch.no_grad()
def test_loop_equals_tensors_and_float64(
    order: int, num_queries: int, num_words: int, size: int, std: float, three_threads: None
) -> None:
    loop = loop_for(add_exponentials, torch.empty(0))
    if loop is None:
        pytest.skip("needs numba")
    layer = hidden, history, rows, bias, maxent = _layer(num_queries, num_words, size, order, std)
    scores = hidden.double() @ rows.double().t() + bias
    if maxent is not None:
        scores += maxent.score_each(history, torch.arange(num_words))
    expected = scores[:, 2:].logsumexp(dim=1).float()  # <eps> and <s>, words 0 and 1, are never predicted
    torch.testing.assert_close(log_z_by_loop(*layer, loop), expected, rtol=1e-6, atol=2e-6 * max(1.0, std))
    torch.testing.assert_close(log_z_by_tensors(*layer), expected, rtol=1e-6, atol=2e-6 * max(1.0, std))
    assert torch.equal(exact_log_z(*layer), log_z_by_loop(*layer, loop))


@pytest.mark.parametrize("order", [0, 4])
@pytest.mark.parametrize(("num_queries", "num_words", "size"), [(515, 2 * TILE + 3, 9), (600, TILE, 64)])
@torch.no_grad()
def test_bfloat16_rounds_what_is_multiplied_and_nothing_else(
    order: int, num_queries: int, num_words: int, size: int, three_threads: None
) -> None:
    hidden, history, rows, bias, maxent = _layer(num_queries, num_words, size, order, 0.3)
    exact = exact_log_z(hidden, history, rows, bias, maxent)
    scores = hidden.bfloat16().double() @ rows.bfloat16().double().t() + bias
    if maxent is not None:
        maxent.weight.copy_(maxent.weight.half())
        scores += maxent.score_each(history, torch.arange(num_words))
    expected = scores[:, 2:].logsumexp(dim=1).float()
    found = exact_log_z(hidden, history, rows, bias, maxent, "bfloat16")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(
        log_z_by_tensors(hidden, history, rows, bias, maxent, "bfloat16"), expected, rtol=1e-6, atol=3e-6
    )
    error = (found - exact).abs()
    assert 0 < error.mean() < 5e-3
    assert error.max() < 5e-2


def test_what_is_not_a_number_stays_so() -> None:
    hidden, *layer = _layer(513, 40, 4, 3, 0.5)
    hidden[5, 2] = torch.nan
    assert torch.nonzero(exact_log_z(hidden, *layer).isnan()).tolist() == [[5]]  # type: ignore[arg-type]
