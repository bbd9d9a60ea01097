"""Estimates an n-gram model from text: counts, and interpolated modified Kneser-Ney smoothing.

The smoothing is that of Chen and Goodman (1998), with the conventions of KenLM's `lmplz` (Heafield et al. 2013). Counts
come from sorting packed int64 keys, order by order.

Shapes: L words of the text, M distinct n-grams of one order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.lm.corpus import WordStream
from asr.lm.ngram.trie import MOST_NGRAMS, ROOT, FloatArray, IntArray, NgramTrie, joined, pack
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID, SPECIAL_WORDS, UNK_ID, Vocabulary

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class NgramCounts:
    """The distinct n-grams of one order, sorted by (parent, word).

    Attributes:
        parent: (M,) position of the n-gram without its last word among those of the order below.
        word_id: (M,) its last word.
        suffix: (M,) position of the n-gram without its first word among those of the order below.
        count: (M,) how often it occurs in the text.
        from_start: (M,) whether it begins with `<s>`.
    """

    parent: Int32Array
    word_id: Int32Array
    suffix: Int32Array
    count: Int32Array
    from_start: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.parent)


def count_ngrams(word_id: Int32Array, num_words: int, order: int) -> Iterator[NgramCounts]:
    """Counts the n-grams of orders 1 to `order` in a stream of sentences `<s> ... </s>`; unigram w is at position w.

    Takes about 40 bytes per word of the stream besides the results, of which it keeps no reference.

    Raises:
        AsrError: the stream has 2^31 words or more.
    """
    if len(word_id) > MOST_NGRAMS:
        raise AsrError(f"The text has {len(word_id)} words with sentence marks, the limit is {MOST_NGRAMS}; give less.")
    words = np.arange(num_words, dtype=np.int32)
    no_ngram = np.zeros(num_words, dtype=np.int32)
    frequency = np.bincount(word_id, minlength=num_words).astype(np.int32)
    from_start = words == BOS_ID
    yield NgramCounts(no_ngram, words, no_ngram, frequency, from_start)
    ngram_at = word_id  # the n-gram that ends at each position of the stream, -1 before there is one
    for _ in range(2, order + 1):
        end = np.flatnonzero((word_id[1:] != BOS_ID) & (ngram_at[:-1] >= 0)) + 1
        keys = pack(ngram_at[end - 1], word_id[end], num_words)
        by_key = np.argsort(keys)
        keys = keys[by_key]
        is_first = np.ones(len(keys), dtype=np.bool_)
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        first = np.flatnonzero(is_first)
        keys = keys[first]
        frequency = np.diff(first, append=len(by_key)).astype(np.int32)
        end = end[by_key]
        del by_key
        suffix = ngram_at[end[first]]
        ngram_at = np.full(len(word_id), -1, dtype=np.int32)
        ngram_at[end] = np.cumsum(is_first, dtype=np.int32) - np.int32(1)
        del end, first, is_first
        parent = (keys // num_words).astype(np.int32)
        last_word = (keys - parent.astype(np.int64) * num_words).astype(np.int32)
        del keys
        from_start = from_start[parent]
        yield NgramCounts(parent, last_word, suffix, frequency, from_start)


DoubleArray = npt.NDArray[np.float64]
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class KneserNeyModel:
    """An estimated model, and how it was estimated.

    Attributes:
        trie: the n-grams that were kept, with their probabilities.
        count: (A,) how often each of them occurs in the text, in the trie's order.
        discounts: for each order, the discounts of n-grams counted once, twice, and three times or more.
        fallback_orders: orders whose discounts the text does not determine, so that `FALLBACK_DISCOUNTS` were used.
        num_distinct: the number of distinct n-grams of each order in the text, before pruning.
    """

    trie: NgramTrie
    count: Int32Array
    discounts: tuple[tuple[float, ...], ...]
    fallback_orders: tuple[int, ...]
    num_distinct: tuple[int, ...]


def estimate_kneser_ney(
    stream: WordStream,
    order: int,
    prune: Sequence[int] = (),
    keep_unseen: bool = False,
) -> KneserNeyModel:
    """Estimates a model of `<s> ... </s>` sentences.

    All words of the text are counted. N-grams are pruned only after that, and their probability goes to the backoff:
    n-grams seen no more often than `prune` says, and n-grams with words outside the vocabulary that the stream was
    read with. Unigrams are interpolated with the uniform distribution over the words kept, `</s>` and `<unk>`; a
    `<unk>` in the text counts like any other word.

    Args:
        stream: the text.
        order: length of the longest n-grams.
        prune: a threshold for each order; the last one holds for all further orders; never decreasing.
        keep_unseen: whether words of the vocabulary that do not occur in the text are listed, each as probable as
            `<unk>`.

    Raises:
        AsrError: `order` or `prune` is invalid.
    """
    thresholds = thresholds_of(order, prune)
    num_words = len(stream.vocabulary)
    collector = _Collector(stream.num_listed)
    discounts: list[tuple[float, ...]] = []
    fallback_orders, num_distinct = [], []
    lower: DoubleArray = np.zeros(0)
    kept: npt.NDArray[np.bool_] | None = None
    # Only the counts of two orders are in memory at a time.
    counts = itertools.chain(count_ngrams(stream.word_id, num_words, order), [None])
    for n, (ngrams, longer) in enumerate(itertools.pairwise(counts), start=1):
        assert ngrams is not None
        adjusted = _adjusted(ngrams, longer, n)
        kept = _kept(ngrams, thresholds[n - 1], stream.num_listed, keep_unseen, kept)
        estimated = _discounts(adjusted)
        if estimated is None:
            fallback_orders.append(n)
        discounts.append(estimated or FALLBACK_DISCOUNTS)
        usable = np.ones(len(ngrams), dtype=np.bool_)
        if n == 1:
            usable = _predicted(num_words)
            lower = np.full(1, 1.0 / (int(kept.sum()) - 1))  # <s> is never predicted
        num_distinct.append(len(ngrams) if n > 1 else int(usable.sum()) + 1)
        share, gamma = _discounted(ngrams, adjusted, kept, usable, discounts[-1], len(lower))
        lower = share + gamma[ngrams.parent] * lower[ngrams.suffix]
        collector.add(ngrams, kept, lower, gamma)
    listed = stream.vocabulary.words[len(SPECIAL_WORDS) : stream.num_listed]
    trie, count = collector.finish(Vocabulary(listed))
    return KneserNeyModel(trie, count, tuple(discounts), tuple(fallback_orders), tuple(num_distinct))


def thresholds_of(order: int, prune: Sequence[int]) -> list[int]:
    """The threshold of each order; see `estimate_kneser_ney`.

    Raises:
        AsrError: `order` or `prune` is invalid.
    """
    if order < 1:
        raise AsrError(f"order: {order} is not an n-gram order; give 1 or more.")
    if len(prune) > order:
        raise AsrError(f"prune: {len(prune)} thresholds for {order} orders; give one for each order at most.")
    last = prune[-1] if prune else 0
    thresholds = [*prune, *[last] * (order - len(prune))]
    if any(low > high for low, high in itertools.pairwise(thresholds)) or thresholds[0] < 0:
        raise AsrError(
            f"prune: {thresholds} has a negative or decreasing threshold; give thresholds that never decrease."
        )
    return thresholds


def _adjusted(ngrams: NgramCounts, longer: NgramCounts | None, n: int) -> Int32Array:
    """Kneser-Ney counts: the number of distinct words before an n-gram; of the longest ones, and of those that begin
    with `<s>`, how often they occur."""
    adjusted = ngrams.count.copy()
    if longer is not None:
        num_preceding = np.bincount(longer.suffix, minlength=len(ngrams))
        np.copyto(adjusted, num_preceding, where=~ngrams.from_start, casting="same_kind")
    if n == 1:
        adjusted[BOS_ID] = 0
    return adjusted


def _kept(
    ngrams: NgramCounts, threshold: int, num_listed: int, keep_unseen: bool, shorter: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.bool_]:
    """Which n-grams of an order are kept; `shorter` is the same for the order below."""
    kept = (ngrams.count > threshold) & (ngrams.word_id < num_listed)
    if shorter is None:
        if keep_unseen:
            kept |= (ngrams.count == 0) & (ngrams.word_id < num_listed)
        kept[[BOS_ID, EOS_ID, UNK_ID]] = True
        kept[EPSILON_ID] = False
    else:
        kept &= shorter[ngrams.parent]
    return kept


def _discounts(adjusted: Int32Array) -> tuple[float, ...] | None:
    """Discounts by equation 26 of Chen and Goodman (1998); None if one of them is invalid."""
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
    adjusted: Int32Array,
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


class _Collector:
    """Collects the n-grams that are kept in one trie, order after order."""

    def __init__(self, num_listed: int) -> None:
        self._num_listed = num_listed
        self._begin = [0]
        self._position = np.zeros(0, dtype=np.int32)  # of each n-gram of the latest order, ROOT where it was left out
        self._chosen: IntArray = np.zeros(0, dtype=np.int64)
        self._parent: list[Int32Array] = []
        self._word_id: list[Int32Array] = []
        self._score: list[FloatArray] = []
        self._backoff: list[FloatArray] = []
        self._count: list[Int32Array] = []

    def add(
        self, ngrams: NgramCounts, kept: npt.NDArray[np.bool_], probability: DoubleArray, gamma: DoubleArray
    ) -> None:
        """Adds an order: `kept` and `probability` of its n-grams (M,), `gamma` of the contexts before them."""
        if len(self._begin) == 1:
            chosen = np.arange(self._num_listed)
            probability = np.where(kept[: self._num_listed], probability[: self._num_listed], 0.0)
            probability[BOS_ID] = 0.0
            parent = np.full(len(chosen), ROOT, dtype=np.int32)
        else:
            # A context that lost all its n-grams backs off with weight 1, like one that never had any.
            is_context = np.zeros(len(gamma), dtype=np.bool_)
            is_context[ngrams.parent[kept]] = True
            self._backoff.append(_log(np.where(is_context, gamma, 1.0)[self._chosen]))
            chosen = np.flatnonzero(kept)
            probability = probability[chosen]
            parent = self._position[ngrams.parent[chosen]]
        self._position = np.full(len(ngrams), ROOT, dtype=np.int32)
        self._position[chosen] = np.arange(self._begin[-1], self._begin[-1] + len(chosen))
        self._begin.append(self._begin[-1] + len(chosen))
        self._chosen = chosen
        self._parent.append(parent)
        self._word_id.append(ngrams.word_id[chosen])
        self._score.append(np.minimum(_log(probability), 0.0))
        self._count.append(ngrams.count[chosen])

    def finish(self, vocabulary: Vocabulary) -> tuple[NgramTrie, Int32Array]:
        """The trie, and how often each of its n-grams occurs in the text."""
        self._backoff.append(np.zeros(len(self._chosen), dtype=np.float32))
        parent, word_id, score = joined(self._parent), joined(self._word_id), joined(self._score)
        trie = NgramTrie(vocabulary, tuple(self._begin), parent, word_id, score, joined(self._backoff))
        return trie, joined(self._count)


def _log(probability: DoubleArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.log(probability).astype(np.float32)
