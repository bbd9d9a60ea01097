"""Entropy pruning of n-gram models (Stolcke 1998), and linear interpolation of several models into one.

Both are used to make the small model of a decoding graph.

Shapes: A n-grams of all orders, M of one order, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from asr.errors import AsrError
from asr.lm.ngram.estimate import Int32Array
from asr.lm.ngram.model import ROOT_STATE, NgramLM
from asr.lm.ngram.trie import ROOT, IntArray, NgramTrie, find_sorted, pack
from asr.text.symbols import BOS_ID, EOS_ID

DoubleArray = npt.NDArray[np.float64]
_LEAST_MASS = 1e-9
_LARGEST_LOSS = 1e300
_NUM_BISECTIONS = 50


def prune_to_threshold(trie: NgramTrie, threshold: float, count: Int32Array | None = None) -> NgramTrie:
    """Drops n-grams whose removal increases the relative entropy by less than `threshold`, and recomputes backoffs.

    Unigrams are kept, and so is an n-gram if a longer one that begins with it is kept.

    Args:
        trie: the full model.
        threshold: in nats per word of text; 1e-8 is mild, 1e-6 harsh.
        count: (A,) how often each n-gram occurs in the training text. With it, histories are weighted by how often
            they occur; without it, by the probability the model gives them, which is wrong for Kneser-Ney's lower
            orders.
    """
    return _keep(trie, _with_parents(trie, _losses(trie, count) >= threshold))


def prune_to_size(
    trie: NgramTrie, num_ngrams: int, count: Int32Array | None = None, threshold: float | None = None
) -> NgramTrie:
    """The same with the threshold that leaves at most `num_ngrams` n-grams of all orders, or the given one if that is
    higher.

    Raises:
        AsrError: the unigrams alone are more than that.
    """
    num_unigrams = trie.counts[0]
    if num_ngrams < num_unigrams:
        raise AsrError(
            f"num_ngrams (--max-ngrams): {num_ngrams} n-grams are fewer than the {num_unigrams} words; allow more "
            "n-grams or use fewer words."
        )
    if num_ngrams >= sum(trie.counts):
        return trie if threshold is None else prune_to_threshold(trie, threshold, count)
    loss = _losses(trie, count)
    of_longer = loss[trie.order_begin[1] :]
    # Infinite if sentences would become impossible; if there are too many such n-grams, they have to go, too.
    np.minimum(of_longer, _LARGEST_LOSS, out=of_longer)
    longer = np.log(np.maximum(of_longer, 1e-300))
    low, high = float(longer.min()), float(longer.max()) + 1.0
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        num_kept = int(_with_parents(trie, loss >= np.exp(middle))[trie.order_begin[1] :].sum())
        low, high = (middle, high) if num_kept + num_unigrams > num_ngrams else (low, middle)
    return _keep(trie, _with_parents(trie, loss >= max(np.exp(high), threshold or 0.0)))


def lower_order_scores(trie: NgramTrie, suffix: npt.NDArray[np.int32], order: int) -> DoubleArray:
    """log P(word | context less its first word) for every n-gram of an order, (M,)."""
    span = trie.span(order)
    context = suffix[trie.parent[span]]
    found = suffix[span]
    score: DoubleArray = trie.score[found].astype(np.float64)
    context_found = trie.parent[found]
    while (backing := np.flatnonzero(context != context_found)).size:
        score[backing] += trie.backoff[context[backing]]
        context[backing] = suffix[context[backing]]
    return score


def set_backoffs(trie: NgramTrie) -> NgramTrie:
    """The model with the backoff weights that make each context's probabilities sum to one."""
    suffix = trie.suffixes()
    result = replace(trie, backoff=np.zeros_like(trie.backoff))
    for order in range(2, trie.order + 1):
        contexts = trie.span(order - 1)
        left, left_lower = _left_over(result, suffix, order)
        result.backoff[contexts] = np.log(left) - np.log(left_lower)
    return result


def _left_over(trie: NgramTrie, suffix: npt.NDArray[np.int32], order: int) -> tuple[DoubleArray, DoubleArray]:
    """One minus the probability of each context's listed words, by the context itself and by its backoff
    distribution; (contexts,) each."""
    contexts, span = trie.span(order - 1), trie.span(order)
    context = trie.parent[span] - contexts.start
    num_contexts = contexts.stop - contexts.start
    listed = np.bincount(context, weights=np.exp(trie.score[span].astype(np.float64)), minlength=num_contexts)
    lower = np.bincount(context, weights=np.exp(lower_order_scores(trie, suffix, order)), minlength=num_contexts)
    return np.maximum(1.0 - listed, _LEAST_MASS), np.maximum(1.0 - lower, _LEAST_MASS)


def _losses(trie: NgramTrie, count: Int32Array | None) -> DoubleArray:
    """Increase of the relative entropy if only this n-gram is dropped, (A,); infinite for unigrams."""
    loss = np.full(len(trie.parent), np.inf)
    suffix = trie.suffixes()
    history = _history_probabilities(trie, count)
    for order in range(2, trie.order + 1):
        contexts, span = trie.span(order - 1), trie.span(order)
        context = trie.parent[span] - contexts.start
        left, left_lower = (mass[context] for mass in _left_over(trie, suffix, order))
        score = trie.score[span].astype(np.float64)
        lower = lower_order_scores(trie, suffix, order)
        weight = np.log(left) - np.log(left_lower)
        probability = np.exp(score)
        new_weight = np.log(left + probability) - np.log(left_lower + np.exp(lower))
        change = left * (new_weight - weight)
        # 0 * inf would be nan: what the model rules out, itself or by its history, has no share in the entropy.
        possible = np.flatnonzero(probability)
        change[possible] += probability[possible] * (lower[possible] + new_weight[possible] - score[possible])
        seen = history[contexts][context]
        reached = np.flatnonzero(seen)
        loss[span] = 0.0
        loss[span][reached] = -seen[reached] * change[reached]
    return loss


def _history_probabilities(trie: NgramTrie, count: Int32Array | None) -> DoubleArray:
    """The share of a text's words that follow each n-gram, (A,)."""
    if count is not None:
        in_text = count.astype(np.float64)
        total = in_text[: trie.order_begin[1]].sum() - in_text[BOS_ID]
        probability: DoubleArray = in_text / total
        return probability
    log_probability = trie.score.astype(np.float64)
    log_probability[BOS_ID] = trie.score[EOS_ID]
    for order in range(2, trie.order + 1):
        span = trie.span(order)
        log_probability[span] += log_probability[trie.parent[span]]
    return np.asarray(np.exp(log_probability), dtype=np.float64)


def _with_parents(trie: NgramTrie, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    kept = kept.copy()
    kept[: trie.order_begin[1]] = True
    for order in range(trie.order, 1, -1):
        span = trie.span(order)
        kept[trie.parent[span][kept[span]]] = True
    return kept


def _keep(trie: NgramTrie, kept: npt.NDArray[np.bool_]) -> NgramTrie:
    new_position = np.cumsum(kept, dtype=np.int32) - np.int32(1)
    begin = tuple(int(new_position[end - 1]) + 1 if end else 0 for end in trie.order_begin)
    parent = trie.parent[kept]
    parent[begin[1] :] = new_position[parent[begin[1] :]]
    parent[: begin[1]] = ROOT
    smaller = NgramTrie(
        trie.vocabulary, begin, parent, trie.word_id[kept], trie.score[kept], trie.backoff[kept], trie.lists_bos
    )
    return set_backoffs(smaller)


def mix_linearly(tries: Sequence[NgramTrie], weights: Sequence[float], by_history: bool = False) -> NgramTrie:
    """The model of all n-grams that any of the models lists, with the weighted sum of the models' probabilities.

    As SRILM's `-mix-lm` does: the listed n-grams are interpolated exactly, and backoff weights are recomputed so that
    the probabilities after every history sum to one. A word that a model does not list has no probability there; in a
    history it is that model's `<unk>`.

    Args:
        tries: the models, over one vocabulary.
        weights: one positive weight for each model; they sum to one.
        by_history: after each history, a model's weight is multiplied by the probability that it gives the history
            itself (and normalized), so that the model that best explains the words so far decides the next one;
            SRILM's `-bayes`.

    Raises:
        AsrError: the vocabularies differ, or the weights are invalid.
    """
    if len(tries) != len(weights) or not min(weights, default=0.0) > 0.0 or not abs(sum(weights) - 1.0) < 1e-6:
        given = " ".join(f"{weight:g}" for weight in weights)
        raise AsrError(f"weights {given}: give each of the {len(tries)} models one above 0, with the sum 1.")
    vocabulary = tries[0].vocabulary
    if any(trie.vocabulary != vocabulary for trie in tries):
        raise AsrError("The n-gram models to mix have different word lists; read them with one vocabulary.")
    parts = [_Part(trie) for trie in tries]
    begin = [0]
    parents, words, scores = [], [], []
    for order in range(1, max(trie.order for trie in tries) + 1):
        keys = np.unique(np.concatenate([part.keys(order) for part in parts if order <= part.order]))
        parent, word = np.divmod(keys, len(vocabulary))
        log_weight = np.log(np.asarray(weights))[:, None]
        if by_history and order > 1:
            log_weight = log_weight + np.stack([part.history for part in parts])[:, parent - begin[-2]]
            log_weight -= np.logaddexp.reduce(log_weight, axis=0)
        log_prob = np.stack([part.advance(order, keys, begin) for part in parts])
        scores.append(np.minimum(np.logaddexp.reduce(log_weight + log_prob, axis=0), 0.0).astype(np.float32))
        parents.append((parent if order > 1 else np.full(len(parent), ROOT)).astype(np.int32))
        words.append(word.astype(np.int32))
        begin.append(begin[-1] + len(keys))
    score = np.concatenate(scores)
    mixed = NgramTrie(
        *(vocabulary, tuple(begin), np.concatenate(parents), np.concatenate(words), score, np.zeros_like(score)),
        any(trie.lists_bos for trie in tries),
    )
    return set_backoffs(mixed)


class _Part:
    """One of the models while the union grows order by order."""

    def __init__(self, trie: NgramTrie) -> None:
        self._trie = trie
        self._lm = NgramLM.from_trie(trie)
        self._is_listed = trie.listed()
        self.order = trie.order
        # Of the order before: where this model's n-grams are in the union, and, for each n-gram of the union, this
        # model's state after it and log-probability of the whole n-gram.
        self._position: IntArray = np.zeros(0, dtype=np.int64)
        self._state = torch.full((1,), ROOT_STATE)
        self.history: DoubleArray = np.zeros(1)

    def keys(self, order: int) -> IntArray:
        """This model's n-grams of an order as `parent in the union * V + word`, (M,)."""
        span = self._trie.span(order)
        word_id = self._trie.word_id[span]
        if order == 1:
            return word_id.astype(np.int64)
        parent = self._position[self._trie.parent[span] - self._trie.order_begin[order - 2]]
        return pack(parent, word_id, len(self._trie.vocabulary))

    def advance(self, order: int, keys: IntArray, begin: Sequence[int]) -> DoubleArray:
        """This model's log P(last word | words before) of the union's n-grams of an order, given as keys (M,); (M,)."""
        if order <= self.order:
            self._position = find_sorted(keys, self.keys(order)) + begin[-1]
        parent, word = np.divmod(keys, len(self._trie.vocabulary))
        before = parent - begin[-2] if order > 1 else np.zeros(len(keys), dtype=np.int64)
        score, self._state = self._lm.score(self._state[torch.from_numpy(before)], torch.from_numpy(word))
        log_prob = np.where(self._is_listed[word], score.numpy().astype(np.float64), -np.inf)
        self.history = self.history[before] + np.where(word == BOS_ID, 0.0, log_prob)  # a sentence's start is given
        return log_prob
