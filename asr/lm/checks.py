"""What a user gives as a language model: checks of the object, and of each of its answers.

Shapes: Q queries, N streams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.combine import WrappedLM
from asr.lm.interface import LanguageModel
from asr.text.symbols import EOS_ID


def require_language_model(model: object) -> None:
    """Checks what a user gives as a language model, with one query of two words.

    Raises:
        AsrError: it is something else, or its answers are not those of the interface.
    """
    if not isinstance(model, LanguageModel):
        raise AsrError(
            f"language_model is of the class {type(model).__name__}; give an asr.lm.interface.LanguageModel, which "
            "asr.lm.cached.engine.CachedRNNLM(network) makes of a network."
        )
    start = model.start(2)
    log_prob, next_idx = _pair(model, model.score(start, torch.full_like(start, len(model.vocabulary) - 1)))
    for what, made, is_score in (
        ("start", lambda: start, False),
        ("score, log_prob", lambda: log_prob, True),
        ("score, next_idx", lambda: next_idx, False),
        ("final", lambda: model.final(next_idx), True),  # reads contexts, so only if they are right
    ):
        found = made()
        if not (_are_two_scores(found) if is_score else _are_two_contexts(found)):
            shown = f"{found.tolist()} ({found.dtype})" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise AsrError(
                f"{type(model).__name__}.{what}: for two queries it is {shown}; expected a tensor of two "
                f"{'log-probabilities, floats' if is_score else 'contexts, torch.int64 of 0 or more'}."
            )


def _pair(model: LanguageModel, answer: Any) -> tuple[Any, Any]:
    """The two parts of an answer of `model.score`."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        length = f" of {len(answer)}" if isinstance(answer, (tuple, list)) else ""
        raise AsrError(
            f"{type(model).__name__}.score: it returns a {type(answer).__name__}{length}; expected a tuple of two, "
            "log-probabilities and contexts."
        )
    return answer[0], answer[1]


def _are_two_scores(found: object) -> bool:
    if not isinstance(found, Tensor) or found.shape != (2,) or not found.is_floating_point():
        return False
    return not bool(torch.isnan(found).any())


def _are_two_contexts(found: object) -> bool:
    if not isinstance(found, Tensor) or found.shape != (2,) or found.dtype != torch.int64:
        return False
    return bool((found >= 0).all())


class CheckedLM(WrappedLM):
    """A user's own model, whose answers must have the right shapes and be numbers: a search would silently drop the
    words of a NaN, and use a single score for all queries.

    Numbers on a GPU are not checked, because that would wait for it at every call.

    Raises:
        AsrError: by `start`, `score` and `final`: the answers are something else, or a score is NaN or +inf.
    """

    def reserve(self, num_queries: int) -> None:
        """None: the host looks at the answers."""

    def start(self, num_streams: int) -> Tensor:
        context_idx = super().start(num_streams)
        self._require("start", context_idx, num_streams, is_score=False)
        return context_idx

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        ends = (word_id == EOS_ID).nonzero().squeeze(1)
        if len(ends):
            return self._score_with_ends(context_idx, word_id, ends)
        log_prob, next_idx = _pair(self._lm, super().score(context_idx, word_id))
        self._require("score, log_prob", log_prob, len(word_id), is_score=True)
        self._require("score, next_idx", next_idx, len(word_id), is_score=False)
        bad = self._first_bad(log_prob)
        if bad is not None:
            self._refuse("score", log_prob[bad], self.vocabulary.words[int(word_id[bad])], context_idx[bad])
        return log_prob, next_idx

    def _score_with_ends(self, context_idx: Tensor, word_id: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """`score`, with `final` for `</s>`, at the positions ends (E,): a user's `score` need not know it."""
        if len(ends) == len(word_id):  # no empty call of the user's
            return self.final(context_idx), context_idx
        others = (word_id != EOS_ID).nonzero().squeeze(1)
        log_prob, next_idx = self.score(context_idx[others], word_id[others])
        all_log_prob = log_prob.new_empty(len(word_id)).index_copy_(0, others, log_prob)
        all_log_prob[ends] = self.final(context_idx[ends]).to(log_prob.dtype)
        return all_log_prob, context_idx.index_copy(0, others, next_idx)

    def final(self, context_idx: Tensor) -> Tensor:
        log_prob = super().final(context_idx)
        self._require("final", log_prob, len(context_idx), is_score=True)
        bad = self._first_bad(log_prob)
        if bad is not None:
            self._refuse("final", log_prob[bad], "</s>", context_idx[bad])
        return log_prob

    def _require(self, what: str, found: Any, num: int, *, is_score: bool) -> None:
        shown = f"is a {type(found).__name__}"
        if isinstance(found, Tensor):
            if found.shape == (num,) and (found.is_floating_point() if is_score else found.dtype == torch.int64):
                return
            shown = f"has the shape {tuple(found.shape)} and the type {found.dtype}"
        wanted = "log-probabilities, floats" if is_score else "contexts, torch.int64"
        raise AsrError(
            f"{type(self._lm).__name__}.{what}: for {num} queries it {shown}; expected a tensor of as many {wanted}."
        )

    @staticmethod
    def _first_bad(log_prob: Tensor) -> int | None:
        if log_prob.is_cuda:
            return None
        is_number = log_prob < torch.inf
        return None if bool(is_number.all()) else int(is_number.int().argmin())

    def _refuse(self, method: str, log_prob: Tensor, word: str, context: Tensor) -> None:
        raise AsrError(
            f"{type(self._lm).__name__}.{method}: log P({word} | context {int(context)}) is {float(log_prob)}; "
            "give a number, or -inf for a word that is impossible."
        )
