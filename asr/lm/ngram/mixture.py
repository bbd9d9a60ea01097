"""Linear interpolation of n-gram models once and for all: several models become one that a graph can hold.

Shapes: M n-grams of one order, V words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asr.errors import AsrError
from asr.lm.ngram.arrays import ROOT_STATE
from asr.lm.ngram.ngram_lm import NgramLM
from asr.lm.ngram.pruning import DoubleArray, set_backoffs
from asr.lm.ngram.trie import ROOT, IntArray, NgramTrie, find_sorted, pack
from asr.text.vocabulary import BOS_ID


def mix_linearly(tries: Sequence[NgramTrie], weights: Sequence[float], by_history: bool = False) -> NgramTrie:
    """The model of all n-grams that any of the models lists, with the weighted sum of the models' probabilities.

    As SRILM's `-mix-lm`: the n-grams listed are exactly interpolated, backoff weights are set anew so that every
    history sums to one. A word that a model does not list has no probability there; as history it is that model's
    `<unk>`.

    Args:
        tries: the models, over one vocabulary.
        weights: one weight a model, positive, of sum one.
        by_history: in each history a model's weight is multiplied by the probability that it gives the history itself
            (and normalised), so that the model that explains the words so far decides the next one; SRILM's `-bayes`.

    Raises:
        AsrError: the vocabularies differ, or the weights make no sense.
    """
    if len(tries) != len(weights) or not min(weights, default=0.0) > 0.0 or not abs(sum(weights) - 1.0) < 1e-6:
        raise AsrError(f"weights: {tuple(weights)} for {len(tries)} models; give a positive one each, of sum one.")
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
        vocabulary,
        tuple(begin),
        np.concatenate(parents),
        np.concatenate(words),
        score,
        np.zeros_like(score),
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
        self._position: IntArray = np.zeros(0, dtype=np.int64)  # in the union, of our n-grams of the order before
        self._state = torch.full((1,), ROOT_STATE)  # ours, after each of the union's n-grams of the order before
        self.history: DoubleArray = np.zeros(1)  # our log-probability of each of these n-grams as a whole

    def keys(self, order: int) -> IntArray:
        """Our n-grams of an order as `parent in the union * V + word`, (M,)."""
        span = self._trie.span(order)
        word_id = self._trie.word_id[span]
        if order == 1:
            return word_id.astype(np.int64)
        parent = self._position[self._trie.parent[span] - self._trie.order_begin[order - 2]]
        return pack(parent, word_id, len(self._trie.vocabulary))

    def advance(self, order: int, keys: IntArray, begin: Sequence[int]) -> DoubleArray:
        """Our log P(last word | words before) of the union's n-grams of an order, given as keys (M,), (M,)."""
        if order <= self.order:
            self._position = find_sorted(keys, self.keys(order)) + begin[-1]
        parent, word = np.divmod(keys, len(self._trie.vocabulary))
        before = parent - begin[-2] if order > 1 else np.zeros(len(keys), dtype=np.int64)
        score, self._state = self._lm.score(self._state[torch.from_numpy(before)], torch.from_numpy(word))
        log_prob = np.where(self._is_listed[word], score.numpy().astype(np.float64), -np.inf)
        self.history = self.history[before] + np.where(word == BOS_ID, 0.0, log_prob)  # a sentence's start is given
        return log_prob
