"""A language model that is queried from another device: the same answers, whatever their bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from asr.lm.combine import MovedLM, on_device
from asr.lm.interface import LanguageModel, device_of
from asr.text.symbols import Vocabulary

CPU = torch.device("cpu")


class _Extreme(LanguageModel):
    """Large contexts, and scores with all kinds of bits."""

    scores = torch.tensor([-0.0, -1e-40, -3.4e38, -torch.inf, -1.5])
    first = 1 << 61

    def __init__(self) -> None:
        self.retained: list[int] = []

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(["a"])

    def start(self, num_streams: int) -> Tensor:
        return torch.full((num_streams,), self.first)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores[word_id], context_idx + word_id

    def final(self, context_idx: Tensor) -> Tensor:
        return -(context_idx - self.first).float()

    def retain(self, live: Tensor) -> None:
        self.retained += live.tolist()

    def first_state(self, num_streams: int) -> Tensor:
        return torch.zeros(num_streams, 2)

    def start_from(self, state: Tensor) -> Tensor:
        return self.first + state[:, 0].long()

    def state_after(self, state: Tensor, sentences: Sequence[Sequence[int]]) -> Tensor:
        return state + torch.tensor([[float(len(sentence))] for sentence in sentences])


def test_all_answers_are_those_of_the_model() -> None:
    model = _Extreme()
    moved = MovedLM(model, CPU)
    assert device_of(moved) == CPU and moved.vocabulary == model.vocabulary
    word_id = torch.arange(5)
    for ours, theirs in zip(moved.score(moved.start(5), word_id), model.score(model.start(5), word_id), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    log_prob, _ = moved.score(moved.start(5), word_id)
    assert torch.equal(log_prob.view(torch.int32), model.scores.view(torch.int32))  # the sign of zero as well
    assert moved.final(moved.start(2) + 3).tolist() == [-3.0, -3.0]
    moved.retain(torch.tensor([7, 8]))
    assert model.retained == [7, 8]
    state = moved.state_after(moved.first_state(2), [[4], [4, 4]])
    assert state.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert (moved.start_from(state) - model.first).tolist() == [1, 2]


def test_a_model_that_is_there_is_not_moved() -> None:
    model = _Extreme()
    assert on_device(model, CPU) is model
    assert isinstance(on_device(model, torch.device("meta")), MovedLM)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_scores_of_other_precisions_become_float32(dtype: torch.dtype) -> None:
    model = _Extreme()
    model.scores = model.scores.to(dtype)
    log_prob, _ = MovedLM(model, CPU).score(model.start(5), torch.arange(5))
    assert log_prob.dtype == torch.float32 and torch.equal(log_prob, model.scores.float())
