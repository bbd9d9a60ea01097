"""Kneser-Ney and backoff look-up done slowly, with dictionaries of tuples of words."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

from asr.lm.ngram.trie import NgramTrie

Ngram = tuple[str, ...]


def toy_sentences(seed: int, num_sentences: int = 60, num_words: int = 9) -> list[str]:
    """Sentences of a skewed distribution with some structure; word frequencies allow discounts to be estimated."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(num_words)] + [f"rare{i}" for i in range(num_sentences // 2)]
    weights = [10.0 / (i + 1) for i in range(num_words)] + [0.2] * (num_sentences // 2)
    sentences = []
    for _ in range(num_sentences):
        sentence = rng.choices(words, weights, k=rng.randint(1, 9))
        sentences.append(" ".join(word for word in sentence for _ in range(1 + (rng.random() < 0.1))))
    return sentences


class BackoffModel:
    """log P(word | history) by the definition of a backoff model, from the n-grams of a trie."""

    def __init__(self, trie: NgramTrie) -> None:
        self.score: dict[Ngram, float] = {}
        self.backoff: dict[Ngram, float] = {}
        for order in range(1, trie.order + 1):
            span = trie.span(order)
            for ids, score, backoff in zip(
                trie.words_of(order).tolist(), trie.score[span].tolist(), trie.backoff[span].tolist(), strict=True
            ):
                ngram = tuple(trie.vocabulary.words[i] for i in ids)
                if order > 1 or score > -math.inf or ngram == ("<s>",):
                    self.score[ngram], self.backoff[ngram] = score, backoff
        self.order = trie.order

    def log_prob(self, history: Ngram, word: str) -> float:
        history = history[max(0, len(history) - self.order + 1) :]
        if (*history, word) in self.score:
            return self.score[(*history, word)]
        if not history:
            return self.score[("<unk>",)]
        return self.backoff.get(history, 0.0) + self.log_prob(history[1:], word)


def kneser_ney(
    sentences: list[str], order: int, thresholds: list[int], allowed: set[str] | None = None
) -> dict[Ngram, float]:
    """P(last word | words before) of every n-gram kept: Chen and Goodman's equations, written out."""
    raw: list[Counter[Ngram]] = [Counter() for _ in range(order + 1)]
    for sentence in sentences:
        words = ["<s>", *sentence.split(), "</s>"]
        for n in range(1, order + 1):
            for end in range(max(n, 2), len(words) + 1):
                raw[n][tuple(words[end - n : end])] += 1
    adjusted: list[Counter[Ngram]] = [Counter() for _ in range(order + 1)]
    adjusted[order] = Counter(raw[order])
    for n in range(1, order):
        num_preceding = Counter(longer[1:] for longer in raw[n + 1])
        for ngram, count in raw[n].items():
            adjusted[n][ngram] = count if ngram[0] == "<s>" else num_preceding[ngram]
    kept = {
        ngram
        for n in range(1, order + 1)
        for ngram, count in raw[n].items()
        if (count > thresholds[n - 1] or ngram == ("</s>",))
        and (allowed is None or all(word in allowed or word in ("<s>", "</s>") for word in ngram))
    }
    probability: dict[Ngram, float] = {}
    num_uniform = sum(len(ngram) == 1 for ngram in kept) + 1
    for n in range(1, order + 1):
        with_count = Counter(adjusted[n].values())
        y = with_count[1] / (with_count[1] + 2 * with_count[2])
        discount = [0.0, *(j - (j + 1) * y * with_count[j + 1] / with_count[j] for j in (1, 2, 3))]
        totals: defaultdict[Ngram, float] = defaultdict(float)
        freed: defaultdict[Ngram, float] = defaultdict(float)
        for ngram, count in adjusted[n].items():
            totals[ngram[:-1]] += count
            freed[ngram[:-1]] += discount[min(count, 3)] if ngram in kept else count
        for ngram, count in adjusted[n].items():
            context = ngram[:-1]
            lower = probability[ngram[1:]] if n > 1 else 1.0 / num_uniform
            own = (count - discount[min(count, 3)]) / totals[context]
            probability[ngram] = own + freed[context] / totals[context] * lower
        if n == 1:
            probability[("<unk>",)] = freed[()] / totals[()] / num_uniform
    return {ngram: value for ngram, value in probability.items() if ngram in kept or ngram == ("<unk>",)}
