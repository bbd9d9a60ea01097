"""A language model on one device that is queried from another.

Shapes: Q queries, N streams, D width of carried states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.lm.interface import LanguageModel, device_of
from asr.text.symbols import Vocabulary


class MovedLM(LanguageModel):
    """Answers queries from a device with a language model on another one; each call is one copy there and one back.

    Args:
        lm: the language model.
        device: where queries come from and answers go.
    """

    def __init__(self, lm: LanguageModel, device: torch.device) -> None:
        self._lm = lm
        self._home = device_of(lm)
        self._device = device

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's words."""
        return self._lm.vocabulary

    def start(self, num_streams: int) -> Tensor:
        """The context of `<s>` for each stream, (N,)."""
        return self._lm.start(num_streams).to(self._device)

    def score(self, context_idx: Tensor, word_id: Tensor) -> tuple[Tensor, Tensor]:
        """log P(word | context), (Q,), and the next context, (Q,)."""
        query = torch.stack([context_idx, word_id]).to(self._home)
        log_prob, next_idx = self._lm.score(query[0], query[1])
        # Numbers of both types in one copy: a context is below 2**63, so no bits are lost.
        answer = torch.stack([next_idx, log_prob.float().view(torch.int32).long()]).to(self._device)
        return answer[1].int().view(torch.float32), answer[0]

    def final(self, context_idx: Tensor) -> Tensor:
        """log P(</s> | context), (Q,)."""
        return self._lm.final(context_idx.to(self._home)).to(self._device)

    def retain(self, live: Tensor) -> None:
        """As for every language model."""
        self._lm.retain(live.to(self._home))

    def first_state(self, num_streams: int) -> Tensor:
        """The carried state before the first sentence, (N, D)."""
        return self._lm.first_state(num_streams).to(self._device)

    def start_from(self, state: Tensor) -> Tensor:
        """The contexts of `<s>` after carried states (N, D), (N,)."""
        return self._lm.start_from(state.to(self._home)).to(self._device)

    def state_after(self, state: Tensor, sentences: Sequence[Sequence[int]]) -> Tensor:
        """The carried states (N, D) after one more sentence each, (N, D)."""
        return self._lm.state_after(state.to(self._home), sentences).to(self._device)


def on_device(lm: LanguageModel, device: torch.device) -> LanguageModel:
    """The language model itself if it answers on this device, otherwise a `MovedLM` of it."""
    device = torch.empty(0, device=device).device  # with its number
    return lm if device_of(lm) == device else MovedLM(lm, device)
