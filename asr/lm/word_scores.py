"""The log probability of each word of a text, by a network or by anything behind the contract.

Texts are as in a token file, `w1 .. wn </s>` for each sentence.

Shapes: L words of the text, Q of them at a time, H hidden, M history words.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.lm.contract import LanguageModel, StatefulNetwork
from asr.lm.rnn.packed_sentences import PackedSentences, pack_sentences
from asr.lm.rnn.rnn_lm import RnnLm
from asr.lm.rnn.token_streams import TokenStreams
from asr.lm.threads import each_in_threads
from asr.text.vocabulary import EOS_ID

# What the output layer reads at each word (Q, H), its history (Q, M), the word and its place in the text (Q,).
Queries = tuple[Tensor, Tensor, Tensor, Tensor]

_WORDS_AT_ONCE = 1 << 14  # what is between two layers stays small enough for a CPU's cache
_STREAM_WINDOW = 1 << 10
# A text's sentences are shared out in groups of as many words each, the same whatever the number of threads: of about
# so many words at least, since each group costs the weights' arrangement for the loops, and at most so many groups.
_WORDS_OF_GROUP, _NUM_GROUPS, _MOST_SENTENCES = 1 << 13, 16, 1024


@torch.no_grad()
def network_word_scores(
    network: StatefulNetwork, token_id: NDArray[np.int32], *, normalized: bool = False, sentences_at_once: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Runs the network over each sentence from its initial state; an RnnLm that carries states, over the whole text.

    On a CPU an RnnLm runs in as many threads as torch has.

    Args:
        network: an RnnLm, or any other network.
        token_id: the text (L,).
        normalized: true probabilities (an RnnLm only); otherwise what `log_prob` gives.
        sentences_at_once: how many run side by side; 0 for as many as serve a text of this size.

    Returns:
        log_prob (L,) float32, and for a normalised NCE output by how much the true log Z exceeds the constant (L,).
    """
    log_prob, excess = torch.empty(len(token_id)), torch.empty(len(token_id))
    has_excess = False
    log_z = network.exact_log_z(len(token_id)) if normalized and isinstance(network, RnnLm) else None

    def add(queries: Iterator[Queries]) -> None:
        nonlocal has_excess
        for hidden, history, word_id, place in queries:
            if normalized and isinstance(network, RnnLm):
                scores, more = network.normalized_log_prob(hidden, history, word_id, log_z)
                if more is not None:
                    has_excess = True
                    excess[place] = more.float().cpu()
            else:
                scores = network.log_prob(hidden, history, word_id)
            log_prob[place] = scores.float().cpu()

    words_at_once = None
    if not sentences_at_once:
        num_groups = max(1, min(_NUM_GROUPS, len(token_id) // _WORDS_OF_GROUP))
        sentences_at_once, words_at_once = _MOST_SENTENCES, -(-len(token_id) // num_groups)
    is_on_cpu = network.initial_state().device.type == "cpu"
    if isinstance(network, RnnLm) and not network.config.carry_state and is_on_cpu:
        groups = pack_sentences(token_id, network.num_history_words, sentences_at_once, words_at_once)
        each_in_threads(lambda sentences: add(sentence_queries(network, sentences)), groups)
    else:
        add(network_queries(network, token_id, sentences_at_once))
    return log_prob, excess if has_excess else None


@torch.no_grad()
def language_model_word_scores(lm: LanguageModel, token_id: NDArray[np.int32], sentences_at_once: int = 4096) -> Tensor:
    """The same for a language model behind the contract: log_prob (L,)."""
    log_prob = torch.empty(len(token_id))
    for sentences in pack_sentences(token_id, 0, sentences_at_once):
        context_idx = lm.start(sentences.sizes[0])
        for (num_alive,), words in sentences.chunks(1):
            word_id = sentences.word_id[words].to(context_idx.device)
            scores, context_idx = lm.score(context_idx[:num_alive], word_id)
            log_prob[sentences.place[words]] = scores.float().cpu()
    return log_prob


def perplexity(log_prob: Tensor) -> float:
    """Of normalised log probabilities, sentence ends among them."""
    return float(torch.exp(-log_prob.double().mean()))


def network_queries(network: StatefulNetwork, token_id: NDArray[np.int32], sentences_at_once: int) -> Iterator[Queries]:
    """The queries of all words of a text."""
    if isinstance(network, RnnLm) and network.config.carry_state:
        yield from _carried_queries(network, token_id)
        return
    for sentences in pack_sentences(token_id, network.num_history_words, sentences_at_once):
        yield from sentence_queries(network, sentences)


def sentence_queries(network: StatefulNetwork, sentences: PackedSentences) -> Iterator[Queries]:
    """The queries of these sentences' words, each sentence from the initial state on."""
    initial = network.initial_state()
    states: list[Tensor] | None = None
    state = initial.expand(sentences.sizes[0], -1)
    input_id = sentences.input_id.to(initial.device)
    if isinstance(network, RnnLm):
        gates, input_idx = network.input_gates(input_id)
    # A network of one's own may have a hidden layer as wide as the vocabulary: it goes step by step.
    for sizes, words in sentences.chunks(_WORDS_AT_ONCE if isinstance(network, RnnLm) else 1):
        if isinstance(network, RnnLm):
            hidden, states = network.hidden_packed(gates, input_idx[words], sizes, states)
        else:
            state = network.step(state[: sizes[0]], input_id[words])
            hidden = state[:, network.state_size - network.hidden_size :]
        query = sentences.history[words].to(initial.device), sentences.word_id[words].to(initial.device)
        yield hidden, *query, sentences.place[words]


def _carried_queries(network: RnnLm, token_id: NDArray[np.int32]) -> Iterator[Queries]:
    """The same over the text as one stream, in windows, by what training runs."""
    device = network.initial_state().device
    num_windows = -(-len(token_id) // _STREAM_WINDOW)
    padding = np.full(num_windows * _STREAM_WINDOW - len(token_id), EOS_ID, dtype=np.int32)
    streams = TokenStreams(np.concatenate((token_id, padding)), 1, _STREAM_WINDOW, network.num_history_words)
    states: list[Tensor] | None = None
    for window in range(num_windows):
        batch = streams[window]
        batch = batch._replace(**{name: getattr(batch, name).to(device) for name in ("input_id", "is_start")})
        hidden, states = network.hidden_sequence(batch, states)
        first = window * _STREAM_WINDOW
        num_words = min(_STREAM_WINDOW, len(token_id) - first)
        history, word_id = batch.history[0, :num_words], batch.target_id[0, :num_words]
        yield hidden[:num_words, 0], history.to(device), word_id.to(device), torch.arange(first, first + num_words)
