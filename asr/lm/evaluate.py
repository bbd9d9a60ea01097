"""Evaluation of language models: scores of each word of a text, perplexity, and weights for interpolation.

Texts are sequences `w1 .. wn </s>` for each sentence, as in a token file; sentence ends count as words. Log-linear
interpolation is normalized over whole distributions, so its weights are tuned on a short text.

Shapes: L words of the text, Q of them at a time, N sentences, K models, H hidden, M history words, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.kernels.jit import each_in_threads, torch_on_one_thread
from asr.lm.corpus import WordStream
from asr.lm.interface import LanguageModel, StatefulNetwork
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.data import PackedSentences, TokenStreams, pack_sentences
from asr.lm.rnn.model import RNNLanguageModel
from asr.lm.rnn.outputs.nce import NceOutput
from asr.text.symbols import BOS_ID, EOS_ID, UNK_ID

# hidden (Q, H), history (Q, M), the word (Q,) and its position in the text (Q,).
Queries = tuple[Tensor, Tensor, Tensor, Tensor]
_WORDS_AT_ONCE = 1 << 14  # so that the activations between two layers fit a CPU's cache
_STREAM_WINDOW = 1 << 10

# The sentences of a text are divided into groups of equal size, the same for any number of threads. Since the weights
# are laid out for the loops once per group, a group has at least about this many words, and their number is limited.
_WORDS_OF_GROUP, _NUM_GROUPS, _MOST_SENTENCES = 1 << 13, 16, 1024


@torch.no_grad()
def network_word_scores(
    network: StatefulNetwork, token_id: NDArray[np.int32], *, normalized: bool = False, sentences_at_once: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Runs the network over each sentence from its initial state, or over the whole text if it carries states.

    On a CPU an RNNLanguageModel runs in as many threads as torch has.

    Args:
        network: an RNNLanguageModel, or any other network.
        token_id: the text (L,).
        normalized: whether to return true probabilities (only of an RNNLanguageModel) instead of those of `log_prob`.
        sentences_at_once: how many run side by side; 0 chooses a number that suits the size of the text.

    Returns:
        log_prob (L,) float32; and for an NCE output, if `normalized`, the true log Z minus the constant one (L,), else
        None.
    """
    log_prob, excess = torch.empty(len(token_id), dtype=torch.float32), torch.empty(len(token_id), dtype=torch.float32)
    has_excess = False
    log_z = network.exact_log_z(len(token_id)) if normalized and isinstance(network, RNNLanguageModel) else None

    def add(queries: Iterator[Queries]) -> None:
        nonlocal has_excess
        for hidden, history, word_id, place in queries:
            if normalized and isinstance(network, RNNLanguageModel):
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
    if isinstance(network, RNNLanguageModel) and not network.config.carry_state and is_on_cpu:
        groups = pack_sentences(token_id, network.num_history_words, sentences_at_once, words_at_once)
        with torch_on_one_thread():
            each_in_threads(lambda sentences: add(sentence_queries(network, sentences)), groups)
    else:
        add(network_queries(network, token_id, sentences_at_once))
    return log_prob, excess if has_excess else None


@torch.no_grad()
def language_model_word_scores(lm: LanguageModel, token_id: NDArray[np.int32], sentences_at_once: int = 4096) -> Tensor:
    """The same for any `LanguageModel`: log_prob (L,)."""
    log_prob = torch.empty(len(token_id), dtype=torch.float32)
    for sentences in pack_sentences(token_id, 0, sentences_at_once):
        context_idx = lm.start(sentences.sizes[0])
        for (num_alive,), words in sentences.chunks(1):
            word_id = sentences.word_id[words].to(context_idx.device)
            scores, context_idx = lm.score(context_idx[:num_alive], word_id)
            log_prob[sentences.place[words]] = scores.float().cpu()
    return log_prob


def perplexity(log_prob: Tensor) -> float:
    """The perplexity of normalized log probabilities, sentence ends included."""
    return float(torch.exp(-log_prob.double().mean()))


def network_queries(network: StatefulNetwork, token_id: NDArray[np.int32], sentences_at_once: int) -> Iterator[Queries]:
    """The queries of all words of a text."""
    if isinstance(network, RNNLanguageModel) and network.config.carry_state:
        yield from _carried_queries(network, token_id)
        return
    for sentences in pack_sentences(token_id, network.num_history_words, sentences_at_once):
        yield from sentence_queries(network, sentences)


def sentence_queries(network: StatefulNetwork, sentences: PackedSentences) -> Iterator[Queries]:
    """The queries of these sentences' words; each sentence starts from the initial state."""
    initial = network.initial_state()
    states: list[Tensor] | None = None
    state = initial.expand(sentences.sizes[0], -1)
    input_id = sentences.input_id.to(initial.device)
    if isinstance(network, RNNLanguageModel):
        gates, input_idx = network.input_gates(input_id)
    # The hidden layer of an adapted module may be as wide as the vocabulary, so it runs step by step.
    for sizes, words in sentences.chunks(_WORDS_AT_ONCE if isinstance(network, RNNLanguageModel) else 1):
        if isinstance(network, RNNLanguageModel):
            hidden, states = network.hidden_packed(gates, input_idx[words], sizes, states)
        else:
            state = network.step(state[: sizes[0]], input_id[words])
            hidden = network.project(state)
        query = sentences.history[words].to(initial.device), sentences.word_id[words].to(initial.device)
        yield hidden, *query, sentences.place[words]


def _carried_queries(network: RNNLanguageModel, token_id: NDArray[np.int32]) -> Iterator[Queries]:
    """The same over the text as one stream, in windows, as in training."""
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


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text.

    Attributes:
        num_sentences: sentences, each with its `</s>`.
        num_words: words without `</s>`, out-of-vocabulary words included.
        num_unlisted: out-of-vocabulary words: those without a unigram.
        log_prob: natural log probability of the text.
        log_prob_listed: the same without the out-of-vocabulary words.
    """

    num_sentences: int
    num_words: int
    num_unlisted: int
    log_prob: float
    log_prob_listed: float

    @property
    def perplexity(self) -> float:
        """Over all words and sentence ends, with out-of-vocabulary words scored as `<unk>`."""
        return math.exp(-self.log_prob / (self.num_words + self.num_sentences))

    @property
    def perplexity_listed(self) -> float:
        """Without out-of-vocabulary words; in histories they count as `<unk>`."""
        return math.exp(-self.log_prob_listed / (self.num_words - self.num_unlisted + self.num_sentences))


def measure_perplexity(lm: NgramLM, stream: WordStream, sentences_at_once: int = 4096) -> Perplexity:
    """Scores a text that was read with `lm.vocabulary`, `sentences_at_once` at a time."""
    # A model's vocabulary may have words that the model does not list.
    listed = np.zeros(len(stream.vocabulary), dtype=np.bool_)
    listed[: stream.num_listed] = lm.is_listed.cpu()
    token_id = stream.word_id[stream.word_id != BOS_ID]
    is_listed = listed[token_id]
    token_id = np.where(is_listed, token_id, np.int32(UNK_ID))
    log_prob = language_model_word_scores(lm, token_id, sentences_at_once).double()
    total, total_listed = float(log_prob.sum()), float(log_prob[torch.from_numpy(is_listed)].sum())
    return Perplexity(stream.num_sentences, stream.num_words, int((~is_listed).sum()), total, total_listed)


_HISTORY_WORDS_AT_ONCE = 4096  # their word vectors stay in a CPU's cache


@torch.no_grad()
def network_distributions(network: StatefulNetwork, token_id: NDArray[np.int32]) -> Tensor:
    """Normalized log P(every word | history), (L, V). For texts of a few hundred words: L * V scores are computed."""
    every_word = torch.arange(len(network.vocabulary), device=network.initial_state().device)
    log_prob = torch.empty(len(token_id), len(every_word), dtype=torch.float32)
    # NCE's `log_prob` is at most 0; normalization needs the scores themselves.
    is_nce = isinstance(network, RNNLanguageModel) and isinstance(network.output, NceOutput)
    score_of = network.word_score if is_nce else network.log_prob
    for hidden, history, _, place in network_queries(network, token_id, sentences_at_once=64):
        for query, row in enumerate(place.tolist()):
            scores = torch.cat([
                score_of(hidden[query].expand(len(words), -1), history[query].expand(len(words), -1), words)
                for words in every_word.split(_HISTORY_WORDS_AT_ONCE)
            ])  # fmt: skip
            # `<eps>` and `<s>`, which NCE has scores for, are never predicted.
            scores[:2] = -torch.inf
            log_prob[row] = scores.log_softmax(dim=0).cpu()
    return log_prob


@torch.no_grad()
def language_model_distributions(lm: LanguageModel, token_id: NDArray[np.int32]) -> Tensor:
    """The same for any `LanguageModel`; not normalized if its scores are not."""
    log_prob = torch.empty(len(token_id), len(lm.vocabulary), dtype=torch.float32)
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


_NUM_EM_STEPS, _NUM_NEWTON_STEPS = 100, 30  # at most; fewer if the weights converge


def tune_linear_weights(log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """Expectation maximization from equal weights; it finds the optimum, since the log probability is concave in them.

    Args:
        log_prob: log P(word | history) of each word by each model, (K, L).

    Returns:
        weights (K,), which sum to one, and the mixture's log_prob (L,).
    """
    log_prob = log_prob.double()
    weight = torch.full((len(log_prob),), 1 / len(log_prob), dtype=torch.float64)
    for _ in range(_NUM_EM_STEPS):
        share = torch.softmax(log_prob + weight.log()[:, None], dim=0)
        new_weight = share.mean(dim=1)
        change = (new_weight - weight).abs().max()
        weight = new_weight
        if change < 1e-6:
            break
    return weight, torch.logsumexp(log_prob + weight.log()[:, None], dim=0)


def tune_log_linear_weights(log_prob: Tensor, word_id: Tensor) -> Tensor:
    """Newton's method on the likelihood of P(w | h) = prod_k P_k(w | h)^weight_k / Z(h), with Z(h) summed exactly.

    Without Z(h), smaller weights would always seem better. With it, the model is exponential and its log likelihood
    concave. A word that one model rules out is ruled out.

    Args:
        log_prob: log P(w | history) by each model of every word at each place of the text, (K, L, V).
        word_id: the text, (L,).

    Returns:
        weights (K,); they need not sum to one.
    """
    ruled_out = torch.isinf(log_prob).any(dim=0)
    features = log_prob.masked_fill(ruled_out, 0.0)
    known = ~ruled_out.gather(1, word_id[:, None])[:, 0]
    features, ruled_out, word_id = features[:, known], ruled_out[known], word_id[known]
    observed = of_words(features, word_id)
    weight = torch.full((len(features),), 1 / len(features), dtype=torch.float64)
    for _ in range(_NUM_NEWTON_STEPS):
        mixed = torch.tensordot(weight.to(features), features, dims=1).masked_fill(ruled_out, -torch.inf)
        prob = mixed.softmax(dim=1)
        weighted = prob * features
        expected = weighted.sum(dim=2)
        gradient = (observed - expected).double().mean(dim=1)
        second = torch.einsum("jlv,klv->jk", weighted, features).double() / len(word_id)
        covariance = second - expected.double() @ expected.double().t() / len(word_id)
        step = torch.linalg.solve(covariance + 1e-9 * torch.eye(len(weight), dtype=torch.float64), gradient)
        # Far from the optimum a full step may overshoot.
        step *= min(1.0, 0.5 / float(step.abs().max().clamp(min=1e-12)))
        weight = weight + step
        if step.abs().max() < 1e-5:
            break
    return weight


def of_words(values: Tensor, word_id: Tensor) -> Tensor:
    """The value at each position's own word: values (K, L, V), word_id (L,) -> (K, L)."""
    return values.gather(2, word_id.expand(len(values), -1)[:, :, None])[:, :, 0]


def log_linear_log_prob(log_prob: Tensor, word_id: Tensor, weight: Tensor) -> Tensor:
    """Normalized log P of each word of a text (L,) by the mixture: log_prob (K, L, V), weight (K,) -> (L,)."""
    ruled_out = torch.isinf(log_prob).any(dim=0)
    mixed = torch.tensordot(weight.to(log_prob), log_prob.masked_fill(ruled_out, 0.0), dims=1)
    mixed = mixed.masked_fill(ruled_out, -torch.inf).log_softmax(dim=1)
    return mixed.gather(1, word_id[:, None])[:, 0]
