"""Counts all n-grams of a word stream, order by order, with sorts of packed int64 keys.

Shapes: L words of the stream, M distinct n-grams of one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asr.lm.ngram.trie import pack
from asr.text.vocabulary import BOS_ID

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class NgramCounts:
    """The distinct n-grams of one order, sorted by (parent, word).

    Attributes:
        parent: (M,) position of the n-gram without its last word among those of the order below.
        word_id: (M,) its last word.
        suffix: (M,) position of the n-gram without its first word among those of the order below.
        count: (M,) how often it stands in the text.
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
    """Counts the n-grams of orders 1 to `order` in a stream of sentences `<s> ... </s>`; unigram w stands at w.

    Takes about 40 bytes a word of the stream besides the results, which are not held on to.
    """
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
