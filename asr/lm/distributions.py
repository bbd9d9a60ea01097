"""Whole distributions over the vocabulary at each word of a short text: what log-linear interpolation must sum over.

Shapes: L words of the text, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.lm.contract import LanguageModel, StatefulNetwork
from asr.lm.rnn.packed_sentences import pack_sentences
from asr.lm.word_scores import network_queries

_WORDS_AT_ONCE = 4096  # their word vectors stay in a CPU's cache


@torch.no_grad()
def network_distributions(network: StatefulNetwork, token_id: NDArray[np.int32]) -> Tensor:
    """log P(every word | history), normalised, (L, V); a text (L,) of a few hundred words, since L * V is computed."""
    every_word = torch.arange(len(network.vocabulary), device=network.initial_state().device)
    log_prob = torch.empty(len(token_id), len(every_word))
    for hidden, history, _, place in network_queries(network, token_id, sentences_at_once=64):
        for query, row in enumerate(place.tolist()):
            scores = torch.cat([
                network.log_prob(hidden[query].expand(len(words), -1), history[query].expand(len(words), -1), words)
                for words in every_word.split(_WORDS_AT_ONCE)
            ])  # fmt: skip
            # `<eps>` and `<s>`, which NCE has scores for, are never predicted.
            scores[:2] = -torch.inf
            log_prob[row] = scores.log_softmax(dim=0).cpu()
    return log_prob


@torch.no_grad()
def language_model_distributions(lm: LanguageModel, token_id: NDArray[np.int32]) -> Tensor:
    """The same for a language model behind the contract, as it scores: not normalised where its scores are not."""
    log_prob = torch.empty(len(token_id), len(lm.vocabulary))
    for sentences in pack_sentences(token_id, 0, sentences_at_once=64):
        context_idx = lm.start(sentences.sizes[0])
        every_word = torch.arange(len(lm.vocabulary), device=context_idx.device)
        for (num_alive,), words in sentences.chunks(1):
            for query, row in enumerate(sentences.place[words].tolist()):
                scores, _ = lm.score(context_idx[query].expand(len(every_word)), every_word)
                log_prob[row] = scores.float().cpu()
            word_id = sentences.word_id[words].to(context_idx.device)
            context_idx = lm.score(context_idx[:num_alive], word_id)[1]
    log_prob[:, :2] = -torch.inf
    return log_prob
