"""A network run word by word over one hypothesis at a time: the reference for all cached or batched scoring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.lm.interface import StatefulNetwork
from asr.text.symbols import BOS_ID, EPSILON_ID


class PlainLM:
    """Scores hypotheses with the network alone. States of known histories are kept; nothing else is shared.

    Args:
        network: any recurrent language model.
    """

    def __init__(self, network: StatefulNetwork) -> None:
        self.network = network
        self._states: dict[tuple[int, ...], Tensor] = {(): network.initial_state().unsqueeze(0)}

    @torch.no_grad()
    def log_probs(self, word_ids: Sequence[int]) -> list[float]:
        """log P(word | <s>, the words before it) for each word of one hypothesis; to score `</s>`, append it."""
        return [self._log_prob((BOS_ID, *word_ids[:i]), word_ids[i]) for i in range(len(word_ids))]

    @torch.no_grad()
    def last_log_prob(self, word_ids: Sequence[int]) -> float:
        """log P(last word | <s>, the words before it)."""
        return self._log_prob((BOS_ID, *word_ids[:-1]), word_ids[-1])

    def _log_prob(self, history: tuple[int, ...], word_id: int) -> float:
        network = self.network
        state = self.state_after(history)
        num_words = network.num_history_words
        newest_first = [*reversed(history), *[EPSILON_ID] * num_words][:num_words]
        hidden = network.project(state)
        history_ids = torch.tensor([newest_first], dtype=torch.int64, device=state.device)
        return float(network.log_prob(hidden, history_ids, torch.tensor([word_id], device=state.device)))

    @torch.no_grad()
    def state_after(self, history: tuple[int, ...]) -> Tensor:
        """The network's state (1, S) after these words, `<s>` first."""
        known = len(history)
        while history[:known] not in self._states:
            known -= 1
        for end in range(known, len(history)):
            before = self._states[history[:end]]
            word_id = torch.tensor([history[end]], device=before.device)
            self._states[history[: end + 1]] = self.network.step(before, word_id)
        return self._states[history]
