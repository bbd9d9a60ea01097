"""What a language model inherits, and what is refused in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.checks import require_language_model
from asr.lm.interface import LanguageModel, contexts_at_start, device_of
from asr.text.symbols import Vocabulary
from tests.reference.table_lm import TableLM

VOCABULARY = Vocabulary(["a", "b"])
SCORES, CONTEXTS = torch.tensor([-1.0, -torch.inf]), torch.tensor([0, 7])


class Answers(LanguageModel):
    """Gives the answers that it was made with; by default all are right."""

    def __init__(self, start: Any = CONTEXTS, log_prob: Any = SCORES, next_idx: Any = CONTEXTS, final: Any = SCORES):
        self._start, self._answer, self._final = start, (log_prob, next_idx), final
        self.asked: list[Tensor] = []

    @property
    def vocabulary(self) -> Vocabulary:
        return VOCABULARY

    def start(self, num_streams: int) -> Tensor:
        return self._start

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append(word_id)
        return self._answer

    def final(self, context_idx: Tensor) -> Tensor:
        return self._final


def test_answers_that_fit() -> None:
    for scores in (SCORES, SCORES.double(), SCORES.half()):
        model = Answers(log_prob=scores, final=scores)
        require_language_model(model)
        assert [word_id.tolist() for word_id in model.asked] == [[5, 5]]  # the last word
    require_language_model(TableLM(VOCABULARY))


@pytest.mark.parametrize("what", ["log_prob", "final"])
@pytest.mark.parametrize(
    "scores",
    [torch.tensor([-1, -2]), torch.tensor([-1.0]), SCORES[None], torch.tensor([torch.nan, -1.0]), [-1.0, -2.0]],
)
def test_scores_that_do_not_fit(what: str, scores: Any) -> None:
    name = "final" if what == "final" else "score, log_prob"
    with pytest.raises(
        AsrError, match=rf"Answers\.{name}: for two queries it is .*expected .* log-probabilities, floats"
    ):
        require_language_model(Answers(**{what: scores}))


@pytest.mark.parametrize("what", ["start", "next_idx"])
@pytest.mark.parametrize(
    "contexts", [torch.tensor([0, -1]), torch.tensor([1.0, 2.0]), torch.tensor([3]), CONTEXTS.int(), CONTEXTS[None]]
)
def test_contexts_that_do_not_fit(what: str, contexts: Any) -> None:
    name = "start" if what == "start" else "score, next_idx"
    with pytest.raises(
        AsrError, match=rf"Answers\.{name}: for two queries it is .*contexts, torch\.int64 of 0 or more"
    ):
        require_language_model(Answers(**{what: contexts}))


def test_answers_are_shown() -> None:
    with pytest.raises(AsrError, match=r"score, log_prob: for two queries it is a list; expected"):
        require_language_model(Answers(log_prob=[-1.0, -2.0]))
    with pytest.raises(AsrError, match=r"score, next_idx: for two queries it is \[3\] \(torch\.int64\)"):
        require_language_model(Answers(next_idx=torch.tensor([3])))
    model = Answers()
    for answer in (SCORES, (SCORES, CONTEXTS, CONTEXTS)):
        model._answer = answer  # type: ignore[assignment]
        kind = type(answer).__name__
        with pytest.raises(AsrError, match=rf"Answers\.score: it returns a {kind}.*; expected a tuple of two"):
            require_language_model(model)
    with pytest.raises(AsrError, match="language_model is of the class Vocabulary; give an"):
        require_language_model(VOCABULARY)


def test_by_default_nothing_is_carried_and_loops_find_nothing() -> None:
    lm = TableLM(VOCABULARY)
    assert device_of(lm) == torch.device("cpu") and lm.lookup_tables() is None
    state = lm.first_state(3)
    assert state.shape == (3, 0) and state.dtype == torch.float32 and lm.state_after(state, [[4], [], [5]]) is state
    assert lm.start_from(state).tolist() == lm.start(3).tolist()
    for carried in (None, state):
        assert contexts_at_start(lm, 3, carried).tolist() == lm.start(3).tolist()
