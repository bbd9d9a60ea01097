"""Two language models as one: interpolated, or one minus the other, with both contexts packed in one index.

Shapes: Q queries, N streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.adapters import NumberedLM, mark_live
from asr.lm.contract import ExpandingLM, LanguageModel, LoopLM, LoopTables
from asr.text.vocabulary import Vocabulary

# Of a packed context index: so many for the second model's, and the mask of these.
CONTEXT_BITS = 32
LOW_CONTEXT = (1 << CONTEXT_BITS) - 1


class CombinedLM:
    """Two models whose log probabilities a function makes one of, word by word.

    A context index holds the first model's in the upper 32 bits (31 used), the second's below. A combined model's own
    contexts are numbered (`NumberedLM`) where it is combined again, so that combinations nest.

    Args:
        first, second: the models, over one vocabulary.
        combine: (Q,) and (Q,) -> (Q,), natural logs all.

    Raises:
        AsrError: the vocabularies differ.
    """

    def __init__(
        self, first: LanguageModel, second: LanguageModel, combine: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        if first.vocabulary != second.vocabulary:
            raise AsrError("Two language models have different word lists; map one to the other's with MappedLM.")
        self.first, self.second = (NumberedLM(lm) if isinstance(lm, CombinedLM) else lm for lm in (first, second))
        self._combine = combine
        # Whether an index came that has no room: on a device it is not waited for word by word.
        self._exceeds: Tensor | None = None
        # A Protocol takes its time to check.
        self._have_loops = all(isinstance(lm, LoopLM) for lm in (self.first, self.second))
        self._expand = tuple(lm.expand if isinstance(lm, ExpandingLM) else None for lm in (self.first, self.second))

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self.first.vocabulary

    def start(self, num_streams: int) -> Tensor:
        """Both models' history `<s>`, (num_streams,)."""
        packed = self._packed(self.first.start(num_streams), self.second.start(num_streams))
        self._check_room()
        return packed

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Combined log P(word | history) and the packed next context, (Q,) each."""
        first_idx, second_idx = self.unpack(context_idx)
        first, first_next = self.first.score(first_idx, word_id)
        second, second_next = self.second.score(second_idx, word_id)
        return self._combine(first, second), self._packed(first_next, second_next)

    def final(self, context_idx: Tensor) -> Tensor:
        """Combined log P(</s> | history), (Q,).

        Raises:
            AsrError: an index given before needed more bits than it has; on a CPU `score` says so.
        """
        self._check_room()
        first_idx, second_idx = self.unpack(context_idx)
        return self._combine(self.first.final(first_idx), self.second.final(second_idx))

    def for_difference_loop(self) -> LoopTables | None:
        """Both models' tables, where this is the difference of two that have some; see `score_difference`."""
        if self._combine is not _subtract or not self._have_loops:
            return None
        tables = self.first.for_loop(), self.second.for_loop()  # type: ignore[attr-defined]
        return None if tables[0] is None or tables[1] is None else tables

    def expand(self, context_idx: Tensor, held: Tensor) -> None:
        """Passes on to the models that grow which contexts (K,) a loop will ask, and (H,) holds; see `ExpandingLM`."""
        parts = zip(self._expand, self.unpack(context_idx), self.unpack(held), strict=True)
        for expand, own_idx, own_held in parts:
            if expand is not None:
                expand(own_idx, own_held)

    def mark_live(self, context_idx: Tensor) -> None:
        """Passes on to both models which contexts (K,) the search still holds."""
        for lm, idx in zip((self.first, self.second), self.unpack(context_idx), strict=True):
            mark_live(lm, idx)

    def _packed(self, first_idx: Tensor, second_idx: Tensor) -> Tensor:
        upper = torch.bitwise_or(
            torch.bitwise_right_shift(first_idx, CONTEXT_BITS - 1),
            torch.bitwise_right_shift(second_idx, CONTEXT_BITS),
        )
        exceeds = torch.any(upper)
        self._exceeds = exceeds if self._exceeds is None else torch.logical_or(self._exceeds, exceeds)
        if upper.device.type == "cpu":
            self._check_room()
        return self.pack(first_idx, second_idx)

    def _check_room(self) -> None:
        if self._exceeds is not None and bool(self._exceeds):
            raise AsrError(
                f"A context index of an interpolated language model exceeds {CONTEXT_BITS - 1} bits, the room that "
                "packing leaves it; wrap that model in NumberedLM."
            )

    @staticmethod
    def pack(first_idx: Tensor, second_idx: Tensor) -> Tensor:
        """(Q,), (Q,) -> (Q,)."""
        return torch.bitwise_or(torch.bitwise_left_shift(first_idx, CONTEXT_BITS), second_idx)

    @staticmethod
    def unpack(context_idx: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`."""
        return torch.bitwise_right_shift(context_idx, CONTEXT_BITS), torch.bitwise_and(context_idx, LOW_CONTEXT)


def always_answers(tables: LoopTables) -> bool:
    """Whether a loop can answer from both models' tables whatever it is asked: n-gram models', in a plain tuple.

    Others may have to expand histories first, see `ExpandingLM`.
    """
    return all(type(model) is tuple for _, _, model in tables)


def interpolated_lm(
    models: Sequence[LanguageModel], weights: Sequence[float], kind: Literal["linear", "log-linear"] = "linear"
) -> CombinedLM:
    """Two or more models interpolated word by word; more than two nest from the left.

    `linear` mixes probabilities: the weights are probabilities themselves and the result sums to one. `log-linear`
    adds weighted log probabilities and is not normalized.

    Args:
        models: the models, over one vocabulary.
        weights: one weight a model.
        kind: `linear` or `log-linear`.

    Raises:
        AsrError: the vocabularies differ, or the weights make no sense.
    """
    if len(models) < 2 or len(weights) != len(models):
        raise AsrError(f"{len(models)} language models with {len(weights)} weights; give two or more, a weight each.")
    if kind not in ("linear", "log-linear"):
        raise AsrError(f"{kind!r} is no kind of interpolation; take 'linear' or 'log-linear'.")
    if kind == "linear" and (min(weights) < 0.0 or abs(sum(weights) - 1.0) > 1e-6):
        raise AsrError(f"The weights {tuple(weights)} of a linear interpolation must be positive and sum to one.")
    combine = _log_of_sum if kind == "linear" else _weighted_sum
    mixed, mixed_weight = models[0], float(weights[0])
    for lm, weight in zip(models[1:], weights[1:], strict=True):
        share = mixed_weight, float(weight)
        mixed_weight = 1.0
        if kind == "linear":
            mixed_weight = sum(share)
            share = (share[0] / mixed_weight, share[1] / mixed_weight) if mixed_weight else (0.5, 0.5)
        mixed = CombinedLM(mixed, lm, combine(*share))
    assert isinstance(mixed, CombinedLM)
    return mixed


def difference_lm(large: LanguageModel, small: LanguageModel) -> CombinedLM:
    """log P_large - log P_small: added to scores that hold the small model exactly, it puts the large one in its place.

    Args:
        large: the model that shall count.
        small: the model that the decoding graph was built from.

    Raises:
        AsrError: the vocabularies differ.
    """
    return CombinedLM(large, small, _subtract)


def interpolated_difference_lm(large: LanguageModel, small: LanguageModel, large_weight: float) -> CombinedLM:
    """Linear interpolation of a model with the graph's own one, less the graph's own one, which is asked once.

    Equals `difference_lm(interpolated_lm([large, small], weights), small)`, whose contexts it need not number.

    Args:
        large: the model that is mixed in.
        small: the model that the decoding graph was built from.
        large_weight: share of the large model, 0 to 1.

    Raises:
        AsrError: the vocabularies differ.
    """
    mix = _log_of_sum(large_weight, 1.0 - large_weight)
    return CombinedLM(large, small, lambda first, second: _subtract(mix(first, second), second))


def _log_of_sum(first_weight: float, second_weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    first_log, second_log = (math.log(weight) if weight else -math.inf for weight in (first_weight, second_weight))
    return lambda first, second: torch.logaddexp(torch.add(first, first_log), torch.add(second, second_log))


def _weighted_sum(first_weight: float, second_weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    def combine(first: Tensor, second: Tensor) -> Tensor:
        mixed = torch.zeros_like(first)
        for weight, score in ((first_weight, first), (second_weight, second)):
            if weight:  # 0 * -inf would be nan
                mixed = torch.add(mixed, score, alpha=weight)
        return mixed

    return combine


def _subtract(large: Tensor, small: Tensor) -> Tensor:
    # what the small model rules out is not in the graph, and must not come back as +inf or nan
    return torch.where(torch.isinf(small), torch.full_like(large, -math.inf), torch.sub(large, small))
