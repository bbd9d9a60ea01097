"""The oracle of the query engine: a network run word by word over each hypothesis, one hypothesis at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.lm.interface import StatefulNetwork
from asr.text.symbols import BOS_ID, EPSILON_ID


class PlainLM:
    """Keeps the state of every history it has met, so that long ones can be asked about; nothing else is shared."""

    def __init__(self, network: StatefulNetwork) -> None:
        self.network = network
        self._state_after: dict[tuple[int, ...], Tensor] = {(): network.initial_state().unsqueeze(0)}

    @torch.no_grad()
    def log_probs(self, word_ids: Sequence[int]) -> list[float]:
        """log P(word | <s>, words before it) of each word of one hypothesis; an end of sentence is given as a word."""
        return [self._log_prob((BOS_ID, *word_ids[:i]), word_ids[i]) for i in range(len(word_ids))]

    @torch.no_grad()
    def last_log_prob(self, word_ids: Sequence[int]) -> float:
        """log P(last word | <s>, words before it)."""
        return self._log_prob((BOS_ID, *word_ids[:-1]), word_ids[-1])

    def _log_prob(self, history: tuple[int, ...], word_id: int) -> float:
        network = self.network
        state = self._state(history)
        num_words = network.num_history_words
        newest_first = [*reversed(history), *[EPSILON_ID] * num_words][:num_words]
        hidden = state[:, network.state_size - network.hidden_size :]
        history_ids = torch.tensor([newest_first], dtype=torch.int64, device=state.device)
        return float(network.log_prob(hidden, history_ids, torch.tensor([word_id], device=state.device)))

    def _state(self, history: tuple[int, ...]) -> Tensor:
        known = len(history)
        while history[:known] not in self._state_after:
            known -= 1
        for end in range(known, len(history)):
            before = self._state_after[history[:end]]
            word_id = torch.tensor([history[end]], device=before.device)
            self._state_after[history[: end + 1]] = self.network.step(before, word_id)
        return self._state_after[history]
