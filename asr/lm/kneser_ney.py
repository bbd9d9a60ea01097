"""Interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998), with the conventions of KenLM's `lmplz`.

Shapes: M n-grams of one order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.lm.ngram_counts import NgramCounts, count_ngrams
from asr.lm.ngram_text import WordStream
from asr.lm.ngram_trie import ROOT, IntArray, NgramTrie
from asr.text.vocabulary import BOS_ID, EOS_ID, EPSILON_ID, SPECIAL_WORDS, UNK_ID, Vocabulary

DoubleArray = npt.NDArray[np.float64]
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class KneserNeyModel:
    """An estimated model and how it came about.

    Attributes:
        trie: the n-grams that were kept, with their probabilities.
        count: (A,) how often each of them stands in the text, in the trie's order.
        discounts: for each order what is taken off n-grams counted once, twice, three times and more.
        fallback_orders: orders whose discounts the text does not determine, so that `fallback` was taken.
        num_distinct: how many n-grams of each order the text holds, before pruning.
    """

    trie: NgramTrie
    count: IntArray
    discounts: tuple[tuple[float, ...], ...]
    fallback_orders: tuple[int, ...]
    num_distinct: tuple[int, ...]


def estimate_kneser_ney(
    stream: WordStream,
    order: int,
    prune: Sequence[int] = (),
    fallback: tuple[float, float, float] | None = FALLBACK_DISCOUNTS,
    keep_unseen: bool = False,
) -> KneserNeyModel:
    """Estimates a model of `<s> ... </s>` sentences.

    All words of the text are counted. What is pruned is left out of the model only after that, its probability going to
    the backoff: n-grams seen no more often than `prune` says, and n-grams with words outside the vocabulary that
    the stream was read with. Unigrams are interpolated with the uniform distribution over the words kept, `</s>`
    and `<unk>`; a `<unk>` that stands in the text counts as any other word.

    Args:
        stream: the text.
        order: length of the longest n-grams.
        prune: threshold of each order, the last one holding for all further orders; never decreasing.
        fallback: discounts for orders too regular for the closed form; None makes that an error.
        keep_unseen: whether words of the vocabulary that the text lacks are listed, each as probable as `<unk>`.

    Raises:
        AsrError: `order` or `prune` make no sense, or discounts cannot be had.
    """
    thresholds = _thresholds(order, prune)
    num_words = len(stream.vocabulary)
    counts = count_ngrams(stream.word_id, num_words, order)
    adjusted = [_adjusted(counts, n) for n in range(1, order + 1)]
    kept = _kept(counts, thresholds, stream.num_listed, keep_unseen)
    discounts, fallback_orders = _all_discounts(adjusted, fallback)
    uniform = 1.0 / (int(kept[0].sum()) - 1)  # <s> is never predicted
    lower: DoubleArray = np.full(1, uniform)
    parts: list[tuple[DoubleArray, DoubleArray]] = []
    for n in range(1, order + 1):
        ngrams = counts[n - 1]
        num_contexts = 1 if n == 1 else len(counts[n - 2])
        usable = _predicted(num_words) if n == 1 else np.ones(len(ngrams), dtype=np.bool_)
        share, gamma = _discounted(ngrams, adjusted[n - 1], kept[n - 1], usable, discounts[n - 1], num_contexts)
        lower = share + gamma[ngrams.parent] * lower[ngrams.suffix]
        parts.append((lower, gamma))
    trie, count = _assemble(stream, counts, kept, parts)
    num_distinct = (int(_predicted(num_words).sum()) + 1, *(len(ngrams) for ngrams in counts[1:]))
    return KneserNeyModel(trie, count, discounts, fallback_orders, num_distinct)


def _thresholds(order: int, prune: Sequence[int]) -> list[int]:
    if order < 1:
        raise AsrError(f"order: {order} is no n-gram order; give 1 or more.")
    if len(prune) > order:
        raise AsrError(f"prune: {len(prune)} thresholds for {order} orders; give one for each order at most.")
    last = prune[-1] if prune else 0
    thresholds = [*prune, *[last] * (order - len(prune))]
    if any(low > high for low, high in itertools.pairwise(thresholds)) or thresholds[0] < 0:
        raise AsrError(
            f"prune: {thresholds} is not a row of thresholds that never decrease; contexts would go missing."
        )
    return thresholds


def _adjusted(counts: list[NgramCounts], n: int) -> IntArray:
    """Kneser-Ney counts: of how many different words an n-gram is preceded; for the longest how often it stands."""
    ngrams = counts[n - 1]
    adjusted: IntArray
    if n == len(counts):
        adjusted = ngrams.count.copy()
    else:
        num_preceding = np.bincount(counts[n].suffix, minlength=len(ngrams))
        adjusted = np.where(ngrams.from_start, ngrams.count, num_preceding)
    if n == 1:
        adjusted[BOS_ID] = 0
    return adjusted


def _kept(
    counts: list[NgramCounts], thresholds: list[int], num_listed: int, keep_unseen: bool
) -> list[npt.NDArray[np.bool_]]:
    kept: list[npt.NDArray[np.bool_]] = []
    for ngrams, threshold in zip(counts, thresholds, strict=True):
        mask = (ngrams.count > threshold) & (ngrams.word_id < num_listed)
        if not kept:
            if keep_unseen:
                mask |= (ngrams.count == 0) & (ngrams.word_id < num_listed)
            mask[[BOS_ID, EOS_ID, UNK_ID]] = True
            mask[EPSILON_ID] = False
        else:
            mask &= kept[-1][ngrams.parent]
        kept.append(mask)
    return kept


def _all_discounts(
    adjusted: list[IntArray], fallback: tuple[float, float, float] | None
) -> tuple[tuple[tuple[float, ...], ...], tuple[int, ...]]:
    discounts, fallback_orders = [], []
    for n, counts in enumerate(adjusted, start=1):
        estimated = _discounts(counts)
        if estimated is None and fallback is None:
            raise AsrError(
                f"order {n}: the text is too small or too regular to estimate the Kneser-Ney discounts of "
                f"{n}-grams; give --discount-fallback or more text."
            )
        if estimated is None:
            fallback_orders.append(n)
        discounts.append(estimated or fallback or FALLBACK_DISCOUNTS)
    return tuple(discounts), tuple(fallback_orders)


def _discounts(adjusted: IntArray) -> tuple[float, ...] | None:
    """Equation 26 of Chen and Goodman, or None where it gives no sensible value."""
    num_with = np.bincount(np.minimum(adjusted, 5), minlength=6)
    if (num_with[1:4] == 0).any():
        return None
    y = num_with[1] / (num_with[1] + 2.0 * num_with[2])
    discounts = tuple(j - (j + 1) * y * num_with[j + 1] / num_with[j] for j in (1, 2, 3))
    return discounts if all(0.0 <= discount <= j for j, discount in enumerate(discounts, start=1)) else None


def _predicted(num_words: int) -> npt.NDArray[np.bool_]:
    predicted = np.ones(num_words, dtype=np.bool_)
    predicted[[EPSILON_ID, BOS_ID]] = False
    return predicted


def _discounted(
    ngrams: NgramCounts,
    adjusted: IntArray,
    kept: npt.NDArray[np.bool_],
    usable: npt.NDArray[np.bool_],
    discounts: tuple[float, ...],
    num_contexts: int,
) -> tuple[DoubleArray, DoubleArray]:
    """Each n-gram's own share (M,) and each context's weight for the order below (num_contexts,)."""
    by_count = np.array([0.0, *discounts])
    discount = by_count[np.minimum(adjusted, 3)]
    total = np.bincount(ngrams.parent, weights=adjusted * usable, minlength=num_contexts)
    freed = np.where(kept, discount, adjusted) * usable
    left = np.bincount(ngrams.parent, weights=freed, minlength=num_contexts)
    total = np.maximum(total, 1e-300)
    share = (adjusted - discount) * usable / total[ngrams.parent]
    return share, left / total


def _assemble(
    stream: WordStream,
    counts: list[NgramCounts],
    kept: list[npt.NDArray[np.bool_]],
    parts: list[tuple[DoubleArray, DoubleArray]],
) -> tuple[NgramTrie, IntArray]:
    listed = stream.vocabulary.words[len(SPECIAL_WORDS) : stream.num_listed]
    num_listed = stream.num_listed
    begin = [0, num_listed]
    position = np.arange(len(counts[0]))
    columns: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], DoubleArray, DoubleArray, IntArray]] = []
    for n, (ngrams, mask) in enumerate(zip(counts, kept, strict=True), start=1):
        chosen = np.arange(num_listed) if n == 1 else np.flatnonzero(mask)
        probability = parts[n - 1][0][chosen]
        if n == 1:
            probability[~mask[:num_listed]] = 0.0
            probability[BOS_ID] = 0.0
            parent = np.full(num_listed, ROOT, dtype=np.int32)
        else:
            parent = position[ngrams.parent[chosen]].astype(np.int32)
            position = np.full(len(ngrams), ROOT)
            position[chosen] = np.arange(len(chosen)) + begin[-1]
            begin.append(begin[-1] + len(chosen))
        # a context that lost all its n-grams backs off with weight 1, as one that never had any
        weight = np.ones(len(chosen))
        if n < len(counts):
            is_context = np.zeros(len(ngrams), dtype=np.bool_)
            is_context[counts[n].parent[kept[n]]] = True
            weight = np.where(is_context, parts[n][1], 1.0)[chosen]
        columns.append((parent, ngrams.word_id[chosen], probability, weight, ngrams.count[chosen]))
    with np.errstate(divide="ignore"):
        score, backoff = (np.log(np.concatenate([column[i] for column in columns])).astype(np.float32) for i in (2, 3))
    parent, word_id = (np.concatenate([column[i] for column in columns]) for i in (0, 1))
    count = np.concatenate([column[4] for column in columns])
    return NgramTrie(Vocabulary(listed), tuple(begin), parent, word_id, np.minimum(score, 0.0), backoff), count
