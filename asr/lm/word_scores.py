"""The log probability of each word of a text, by a network or by anything behind the contract.

Texts are as in a token file, `w1 .. wn </s>` for each sentence. Shapes: L words of the text, N sentences at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.lm.contract import LanguageModel, StatefulNetwork
from asr.lm.rnn_lm import RnnLm
from asr.lm.token_streams import history_of
from asr.text.vocabulary import BOS_ID, EOS_ID


@dataclass(frozen=True)
class _Sentences:
    """Sentences of like length side by side: word_id (N, T), and the words' places in the text, -1 beyond the end."""

    word_id: Tensor
    place: Tensor


@torch.no_grad()
def network_word_scores(
    network: StatefulNetwork, token_id: NDArray[np.int32], *, normalized: bool = False, sentences_at_once: int = 256
) -> tuple[Tensor, Tensor | None]:
    """Runs the network over each sentence from its initial state.

    Args:
        network: an RnnLm, or any other network.
        token_id: the text (L,).
        normalized: true probabilities (an RnnLm only); otherwise what `log_prob` gives.
        sentences_at_once: N.

    Returns:
        log_prob (L,) float32, and for a normalised NCE output by how much the true log Z exceeds the constant (L,).
    """
    device = network.initial_state().device
    log_prob = torch.empty(len(token_id))
    excess = None
    for group in _groups(token_id, sentences_at_once):
        state = network.initial_state().expand(len(group.word_id), -1)
        word_id = torch.cat((torch.full_like(group.word_id[:, :1], EOS_ID), group.word_id), dim=1).to(device)
        history = history_of(word_id, 1, 0) if network.num_history_words == 0 else _histories(word_id, network)
        previous = torch.full_like(word_id[:, 0], BOS_ID)
        for step in range(group.word_id.shape[1]):
            alive = (group.place[:, step] >= 0).nonzero()[:, 0].to(device)
            state = network.step(state[alive], previous[alive])
            hidden = state[:, network.state_size - network.hidden_size :]
            query = hidden, history[alive, step], word_id[alive, step + 1]
            place = group.place[alive.cpu(), step]
            if normalized and isinstance(network, RnnLm):
                scores, more = network.normalized_log_prob(*query)
                if more is not None:
                    excess = torch.empty(len(token_id)) if excess is None else excess
                    excess[place] = more.float().cpu()
            else:
                scores = network.log_prob(*query)
            log_prob[place] = scores.float().cpu()
            # Sentences are sorted from long to short, so those alive are the first ones.
            previous = word_id[: len(alive), step + 1]
    return log_prob, excess


@torch.no_grad()
def language_model_word_scores(lm: LanguageModel, token_id: NDArray[np.int32], sentences_at_once: int = 4096) -> Tensor:
    """The same for a language model behind the contract: log_prob (L,)."""
    log_prob = torch.empty(len(token_id))
    for group in _groups(token_id, sentences_at_once):
        context_idx = lm.start(len(group.word_id))
        for step in range(group.word_id.shape[1]):
            num_alive = int((group.place[:, step] >= 0).sum())
            word_id = group.word_id[:num_alive, step].to(context_idx.device)
            scores, context_idx = lm.score(context_idx[:num_alive], word_id)
            log_prob[group.place[:num_alive, step]] = scores.float().cpu()
    return log_prob


def perplexity(log_prob: Tensor) -> float:
    """Of normalised log probabilities, sentence ends among them."""
    return float(torch.exp(-log_prob.double().mean()))


def _histories(word_id: Tensor, network: StatefulNetwork) -> Tensor:
    """word_id (N, 1 + T), the first column `</s>` -> (N, T, M)."""
    num_words = network.num_history_words
    padding = word_id.new_full((len(word_id), num_words - 1), EOS_ID)
    return history_of(torch.cat((padding, word_id), dim=1), num_words, num_words)


def _groups(token_id: NDArray[np.int32], sentences_at_once: int) -> Iterator[_Sentences]:
    end = np.flatnonzero(token_id == EOS_ID) + 1
    begin = np.concatenate(([0], end[:-1]))
    length = end - begin
    order = np.argsort(-length, kind="stable")
    for first in range(0, len(order), sentences_at_once):
        chosen = order[first : first + sentences_at_once]
        step = np.arange(length[chosen[0]])[None, :]
        inside = step < length[chosen, None]
        place = np.where(inside, begin[chosen, None] + step, -1)
        words = np.where(inside, token_id[np.maximum(place, 0)].astype(np.int64), EOS_ID)
        yield _Sentences(torch.from_numpy(words), torch.from_numpy(place))
