"""Several language models as one: interpolated, or one minus another, with both contexts packed in one index.

Shapes: Q queries, N streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.adapters import NumberedLM, mark_live
from asr.lm.contract import LanguageModel
from asr.text.vocabulary import Vocabulary

_CONTEXT_BITS = 32
_LOW = (1 << _CONTEXT_BITS) - 1


class PairedContexts:
    """Packs the contexts of two models into one int64: the first in the upper 32 bits (31 used), the second below.

    A model whose own contexts are packed pairs is wrapped in `NumberedLM`, so pairs nest.
    """

    def __init__(self, first: LanguageModel, second: LanguageModel) -> None:
        if first.vocabulary != second.vocabulary:
            raise AsrError("Two language models have different word lists; map one to the other's with MappedLM.")
        self.first, self.second = (
            NumberedLM(lm) if isinstance(lm, (InterpolatedLM, DifferenceLM)) else lm for lm in (first, second)
        )

    def start(self, num_streams: int) -> Tensor:
        """Both models' history `<s>`, (num_streams,)."""
        return self.pack(self.first.start(num_streams), self.second.start(num_streams))

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both models' log P(word | history) and the packed next context, (Q,) each."""
        first_idx, second_idx = self.unpack(context_idx)
        first, first_next = self.first.score(first_idx, word_id)
        second, second_next = self.second.score(second_idx, word_id)
        return first, second, self.pack(first_next, second_next)

    def final(self, context_idx: Tensor) -> tuple[Tensor, Tensor]:
        """Both models' log P(</s> | history), (Q,) each."""
        first_idx, second_idx = self.unpack(context_idx)
        return self.first.final(first_idx), self.second.final(second_idx)

    def mark_live(self, context_idx: Tensor) -> None:
        """Passes on to both models which contexts (K,) the search still holds."""
        for lm, idx in zip((self.first, self.second), self.unpack(context_idx), strict=True):
            mark_live(lm, idx)

    @staticmethod
    def pack(first_idx: Tensor, second_idx: Tensor) -> Tensor:
        """(Q,), (Q,) -> (Q,).

        Raises:
            AsrError: an index needs more bits than it has.
        """
        upper = torch.bitwise_or(
            torch.bitwise_right_shift(first_idx, _CONTEXT_BITS - 1),
            torch.bitwise_right_shift(second_idx, _CONTEXT_BITS),
        )
        if bool(torch.any(upper)):
            raise AsrError(
                f"A context index of an interpolated language model exceeds {_CONTEXT_BITS - 1} bits, the room that "
                "packing leaves it; wrap that model in NumberedLM."
            )
        return torch.bitwise_or(torch.bitwise_left_shift(first_idx, _CONTEXT_BITS), second_idx)

    @staticmethod
    def unpack(context_idx: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`."""
        return torch.bitwise_right_shift(context_idx, _CONTEXT_BITS), torch.bitwise_and(context_idx, _LOW)


class InterpolatedLM:
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

    def __init__(
        self,
        models: Sequence[LanguageModel],
        weights: Sequence[float],
        kind: Literal["linear", "log-linear"] = "linear",
    ) -> None:
        if len(models) < 2 or len(weights) != len(models):
            raise AsrError(
                f"{len(models)} language models with {len(weights)} weights; give two or more, a weight each."
            )
        if kind not in ("linear", "log-linear"):
            raise AsrError(f"{kind!r} is no kind of interpolation; take 'linear' or 'log-linear'.")
        if kind == "linear" and (min(weights) < 0.0 or abs(sum(weights) - 1.0) > 1e-6):
            raise AsrError(f"The weights {tuple(weights)} of a linear interpolation must be positive and sum to one.")
        first, first_weight = models[0], float(weights[0])
        if len(models) > 2:
            first = self._nested(models[:-1], weights[:-1], kind)
            first_weight = sum(weights[:-1]) if kind == "linear" else 1.0
        self._pair = PairedContexts(first, models[-1])
        self._kind = kind
        self._weights = (first_weight, float(weights[-1]))

    @staticmethod
    def _nested(
        models: Sequence[LanguageModel], weights: Sequence[float], kind: Literal["linear", "log-linear"]
    ) -> InterpolatedLM:
        total = sum(weights) if kind == "linear" else 1.0
        return InterpolatedLM(models, [weight / total if total else 1.0 / len(weights) for weight in weights], kind)

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._pair.first.vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>`, (num_streams,)."""
        return self._pair.start(num_streams)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """Interpolated log P(word | history) and the next context, (Q,) each."""
        first, second, next_idx = self._pair.score(context_idx, word_id)
        return self._mix(first, second), next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        """Interpolated log P(</s> | history), (Q,)."""
        return self._mix(*self._pair.final(context_idx))

    def mark_live(self, context_idx: Tensor) -> None:
        """Passes on which contexts (K,) the search still holds."""
        self._pair.mark_live(context_idx)

    def _mix(self, first: Tensor, second: Tensor) -> Tensor:
        if self._kind == "linear":
            first_weight, second_weight = (math.log(weight) if weight else -math.inf for weight in self._weights)
            return torch.logaddexp(torch.add(first, first_weight), torch.add(second, second_weight))
        mixed = torch.zeros_like(first)
        for weight, score in zip(self._weights, (first, second), strict=True):
            if weight:  # 0 * -inf would be nan
                mixed = torch.add(mixed, score, alpha=weight)
        return mixed


class DifferenceLM:
    """log P_large - log P_small: added to scores that hold the small model exactly, it puts the large one in its place.

    Args:
        large: the model that shall count.
        small: the model that the decoding graph was built from.
    """

    def __init__(self, large: LanguageModel, small: LanguageModel) -> None:
        self._pair = PairedContexts(large, small)

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that `word_id` numbers."""
        return self._pair.first.vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The history `<s>`, (num_streams,)."""
        return self._pair.start(num_streams)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """The difference of log P(word | history) and the next context, (Q,) each."""
        large, small, next_idx = self._pair.score(context_idx, word_id)
        return self._subtract(large, small), next_idx

    def final(self, context_idx: Tensor) -> Tensor:
        """The difference of log P(</s> | history), (Q,)."""
        return self._subtract(*self._pair.final(context_idx))

    def mark_live(self, context_idx: Tensor) -> None:
        """Passes on which contexts (K,) the search still holds."""
        self._pair.mark_live(context_idx)

    @staticmethod
    def _subtract(large: Tensor, small: Tensor) -> Tensor:
        # what the small model rules out is not in the graph, and must not come back as +inf or nan
        return torch.where(torch.isinf(small), torch.full_like(large, -math.inf), torch.sub(large, small))
