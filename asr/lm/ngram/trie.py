"""All n-grams of a backoff model as one sorted trie, the form that ARPA files, the estimator and pruning share.

Shapes: A n-grams of all orders, V words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asr.text.symbols import BOS_ID, Vocabulary

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
ROOT = -1
MOST_NGRAMS = 2**31 - 1  # positions are int32


@dataclass(frozen=True)
class NgramTrie:
    """N-grams sorted by (order, parent, word). An n-gram's number is its position; its parent is the n-gram without the
    last word.

    Unigrams come first, one for each word of the vocabulary, so that a unigram's number is its word id; a word that
    the model does not list has the score -inf. `<s>` is listed if `lists_bos` says so, with the score -inf.

    Attributes:
        vocabulary: the words that `word_id` numbers.
        order_begin: order n occupies positions `order_begin[n - 1]` to `order_begin[n]`.
        parent: (A,) int32, position of the n-gram without its last word, `ROOT` for unigrams.
        word_id: (A,) int32, the last word.
        score: (A,) float32, natural log P(last word | the words before).
        backoff: (A,) float32, natural log of the weight with which the n-gram as a context backs off.
        lists_bos: whether the model has `<s>`.
    """

    vocabulary: Vocabulary
    order_begin: tuple[int, ...]
    parent: npt.NDArray[np.int32]
    word_id: npt.NDArray[np.int32]
    score: FloatArray
    backoff: FloatArray
    lists_bos: bool = True

    @property
    def order(self) -> int:
        """The length of the longest n-grams."""
        return len(self.order_begin) - 1

    @property
    def counts(self) -> tuple[int, ...]:
        """How many n-grams each order lists."""
        longer = tuple(self.order_begin[n] - self.order_begin[n - 1] for n in range(2, self.order + 1))
        return (int(self.listed().sum()), *longer)

    def listed(self) -> npt.NDArray[np.bool_]:
        """Which words have a unigram, (V,)."""
        listed: npt.NDArray[np.bool_] = self.score[: self.order_begin[1]] > -np.inf
        listed[BOS_ID] = self.lists_bos
        return listed

    def span(self, order: int) -> slice:
        """The positions of one order's n-grams."""
        return slice(self.order_begin[order - 1], self.order_begin[order])

    def words_of(self, order: int) -> npt.NDArray[np.int32]:
        """The words of every n-gram of an order, (M, order)."""
        columns = []
        position: npt.NDArray[Any] = np.arange(self.order_begin[order - 1], self.order_begin[order])
        for _ in range(order):
            columns.append(self.word_id[position])
            position = self.parent[position]
        return np.stack(columns[::-1], axis=1)

    def keys(self, order: int) -> IntArray:
        """`parent * V + word` of one order's n-grams, ascending, (M,)."""
        span = self.span(order)
        return pack(self.parent[span], self.word_id[span], len(self.vocabulary))

    def suffixes(self) -> npt.NDArray[np.int32]:
        """For each n-gram its longest listed proper suffix, (A,) int32; `ROOT` for unigrams.

        If the suffix without the first word is not listed, shorter ones are tried.
        """
        num_words = len(self.vocabulary)
        suffix = np.full(len(self.parent), ROOT, dtype=np.int32)
        keys = [self.keys(order) for order in range(1, self.order)]
        for order in range(2, self.order + 1):
            span = self.span(order)
            word = self.word_id[span]
            candidate = suffix[self.parent[span]]
            found = np.full(len(word), ROOT, dtype=np.int32)
            missing = np.arange(len(word))
            for shorter in range(order - 1, 1, -1):
                at_this_order = candidate[missing] >= self.order_begin[shorter - 2]
                ask = missing[at_this_order]
                position = find_sorted(keys[shorter - 1], pack(candidate[ask], word[ask], num_words))
                hit = position >= 0
                found[ask[hit]] = position[hit] + self.order_begin[shorter - 1]
                candidate[ask[~hit]] = suffix[candidate[ask[~hit]]]
                missing = np.concatenate([missing[~at_this_order], ask[~hit]])
            found[missing] = word[missing]
            suffix[span] = found
        return suffix


def joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The arrays as one; the list gives them up, so that their memory is free before the next column is joined."""
    whole = np.concatenate(parts)
    parts.clear()
    return whole


def pack(parent: npt.NDArray[Any], word_id: npt.NDArray[Any], num_words: int) -> IntArray:
    """(parent, word) in one int64 that sorts the same way, (M,)."""
    packed: IntArray = parent.astype(np.int64) * num_words + word_id
    return packed


def find_sorted(keys: IntArray, wanted: IntArray) -> IntArray:
    """Position of each wanted key in the ascending `keys`, -1 where it is absent, (Q,)."""
    if len(keys) == 0:
        return np.full(len(wanted), -1, dtype=np.int64)
    position: IntArray = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    position[keys[position] != wanted] = -1
    return position
