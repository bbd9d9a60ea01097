"""Entropy pruning (Stolcke 1998): makes a model small for a decoding graph, at the least loss for its size.

Shapes: A n-grams of all orders, M of one order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.lm.ngram.counts import Int32Array
from asr.lm.ngram.trie import ROOT, NgramTrie
from asr.text.vocabulary import BOS_ID, EOS_ID

DoubleArray = npt.NDArray[np.float64]
_LEAST_MASS = 1e-9
_NUM_BISECTIONS = 50


def prune_to_threshold(trie: NgramTrie, threshold: float, count: Int32Array | None = None) -> NgramTrie:
    """Drops n-grams without which the relative entropy grows by less than `threshold`, and sets backoffs anew.

    Unigrams stay. An n-gram stays too where a longer one that begins with it does.

    Args:
        trie: the full model.
        threshold: in nats a word of text; 1e-8 is mild, 1e-6 harsh.
        count: (A,) how often each n-gram stands in the training text. With it histories weigh as often as they
            occur; without it as often as the model says, which is wrong for Kneser-Ney's lower orders.
    """
    return _keep(trie, _with_parents(trie, _losses(trie, count) >= threshold))


def prune_to_size(trie: NgramTrie, num_ngrams: int, count: Int32Array | None = None) -> NgramTrie:
    """The same with the threshold that leaves at most `num_ngrams` n-grams of all orders.

    Raises:
        AsrError: the unigrams alone are more than that.
    """
    num_unigrams = trie.counts[0]
    if num_ngrams < num_unigrams:
        raise AsrError(
            f"prune: {num_ngrams} n-grams are fewer than the {num_unigrams} words; give more or fewer words."
        )
    if num_ngrams >= sum(trie.counts):
        return trie
    loss = _losses(trie, count)
    longer = np.log(np.maximum(loss[trie.order_begin[1] :], 1e-300))
    low, high = float(longer.min()), float(longer.max()) + 1.0
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        num_kept = int(_with_parents(trie, loss >= np.exp(middle))[trie.order_begin[1] :].sum())
        low, high = (middle, high) if num_kept + num_unigrams > num_ngrams else (low, middle)
    return _keep(trie, _with_parents(trie, loss >= np.exp(high)))


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
    result = NgramTrie(
        trie.vocabulary,
        trie.order_begin,
        trie.parent,
        trie.word_id,
        trie.score,
        np.zeros_like(trie.backoff),
        trie.lists_bos,
    )
    for order in range(2, trie.order + 1):
        contexts = trie.span(order - 1)
        left, left_lower = _left_over(result, suffix, order)
        weight = np.log(left) - np.log(left_lower)
        weight[left == 1.0] = 0.0
        result.backoff[contexts] = weight
    return result


def _left_over(trie: NgramTrie, suffix: npt.NDArray[np.int32], order: int) -> tuple[DoubleArray, DoubleArray]:
    """What a context's listed words leave of its probability, and of its backoff distribution's; (contexts,) each."""
    contexts, span = trie.span(order - 1), trie.span(order)
    context = trie.parent[span] - contexts.start
    num_contexts = contexts.stop - contexts.start
    listed = np.bincount(context, weights=np.exp(trie.score[span].astype(np.float64)), minlength=num_contexts)
    lower = np.bincount(context, weights=np.exp(lower_order_scores(trie, suffix, order)), minlength=num_contexts)
    return np.maximum(1.0 - listed, _LEAST_MASS), np.maximum(1.0 - lower, _LEAST_MASS)


def _losses(trie: NgramTrie, count: Int32Array | None) -> DoubleArray:
    """Growth of relative entropy when an n-gram alone is dropped, (A,); infinite for unigrams."""
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
        change = probability * (lower + new_weight - score) + left * (new_weight - weight)
        loss[span] = -history[contexts][context] * change
    return loss


def _history_probabilities(trie: NgramTrie, count: Int32Array | None) -> DoubleArray:
    """How much of a text's words follow each n-gram, (A,)."""
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
