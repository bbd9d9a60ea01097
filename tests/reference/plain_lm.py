"""The oracle of the query engine: a network run word by word over each hypothesis, one hypothesis at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asr.lm.contract import StatefulNetwork
from asr.text.vocabulary import BOS_ID, EPSILON_ID


@torch.no_grad()
def plain_log_probs(network: StatefulNetwork, word_ids: Sequence[int]) -> list[float]:
    """log P(word | <s>, words before it) of each word of one hypothesis; an end of sentence is given as a word."""
    state = network.initial_state().unsqueeze(0)
    history = [EPSILON_ID] * network.num_history_words
    log_probs = []
    previous = BOS_ID
    for word_id in word_ids:
        state = network.step(state, torch.tensor([previous], device=state.device))
        history = [previous, *history][: network.num_history_words]
        hidden = state[:, network.state_size - network.hidden_size :]
        history_ids = torch.tensor([history], dtype=torch.int64, device=state.device)
        word = torch.tensor([word_id], device=state.device)
        log_probs.append(float(network.log_prob(hidden, history_ids, word)))
        previous = word_id
    return log_probs
