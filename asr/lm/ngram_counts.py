"""Counts all n-grams of a word stream, order by order, with sorts of packed int64 keys.

Shapes: L words of the stream, M distinct n-grams of one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asr.lm.ngram_trie import IntArray, pack
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
    count: IntArray
    from_start: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.parent)


def count_ngrams(word_id: Int32Array, num_words: int, order: int) -> list[NgramCounts]:
    """Counts the n-grams of orders 1 to `order` in a stream of sentences `<s> ... </s>`; unigram w stands at w.

    Takes about 30 bytes a word of the stream besides the result.
    """
    words = np.arange(num_words, dtype=np.int32)
    no_ngram = np.zeros(num_words, dtype=np.int32)
    frequency = np.bincount(word_id, minlength=num_words)
    counts = [NgramCounts(no_ngram, words, no_ngram, frequency, words == BOS_ID)]
    ngram_at = word_id  # the n-gram that ends at each position of the stream, -1 before there is one
    for _ in range(2, order + 1):
        shorter, longer = counts[-1], np.full(len(word_id), -1, dtype=np.int32)
        end = np.flatnonzero((word_id[1:] != BOS_ID) & (ngram_at[:-1] >= 0)) + 1
        keys = pack(ngram_at[end - 1], word_id[end], num_words)
        by_key = np.argsort(keys)
        keys = keys[by_key]
        is_first = np.ones(len(keys), dtype=np.bool_)
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        first = np.flatnonzero(is_first)
        parent, last_word = np.divmod(keys[first], num_words)
        del keys
        suffix = ngram_at[end[by_key[first]]]
        longer[end[by_key]] = np.cumsum(is_first, dtype=np.int32) - np.int32(1)
        frequency = np.diff(first, append=len(by_key))
        parent = parent.astype(np.int32)
        from_start = shorter.from_start[parent]
        counts.append(NgramCounts(parent, last_word.astype(np.int32), suffix, frequency, from_start))
        ngram_at = longer
    return counts
