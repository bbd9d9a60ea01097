"""Converts phones to letters, for out-of-vocabulary words found with a network of phones.

A word is a sequence of pairs of a phone and zero to three letters. The probabilities of pairs are estimated from the
listed words by expectation maximization over all alignments. An n-gram model of pairs, estimated from the best
alignments, then chooses among spellings (Bisani and Ney, Joint-sequence models for grapheme-to-phoneme conversion,
Speech Communication 2008; here each pair has exactly one phone).

Shapes: N words, P phones of each, L letters of the longest, K = 4 possible numbers of letters in a pair, C distinct
letter strings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from asr.ctc.word_models import ngram_of_spellings
from asr.errors import AsrError
from asr.lm.ngram.model import NgramLM
from asr.text.lexicon import Lexicon
from asr.text.symbols import SPECIAL_WORDS

_JOINT = "="
_MOST_LETTERS = 3
_NUM_ITERATIONS = 5
_ORDER = 6
_BEAM = 200
# Products of more probabilities might underflow float64.
_MOST_PHONES = 24
_WORDS_AT_A_TIME = 4096

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


class PhonesToLetters:
    """Spells sequences of phones.

    Args:
        ngram: model of pairs, named `PHONE=LETTERS`; each of its sentences is a word.
    """

    def __init__(self, ngram: NgramLM) -> None:
        self.ngram = ngram
        self._letters = [""] * len(ngram.vocabulary)
        self._pairs_of: dict[str, list[int]] = {}
        for number, pair in enumerate(ngram.vocabulary.words):
            if number >= len(SPECIAL_WORDS):
                phone, _, self._letters[number] = pair.rpartition(_JOINT)
                self._pairs_of.setdefault(phone, []).append(number)

    @classmethod
    def estimate(cls, lexicon: Lexicon) -> PhonesToLetters:
        """Estimates the model from the first pronunciation of each word.

        Raises:
            AsrError: no word can be aligned with its phones.
        """
        words = {
            word: ways[0]
            for word, ways in lexicon.pronunciations.items()
            if len(ways[0]) <= _MOST_PHONES and len(word) <= _MOST_LETTERS * len(ways[0]) and _JOINT not in word
        }
        if not words:
            raise AsrError(
                f"{lexicon.name}: no word can be aligned with its phones, so the spelling of phones cannot be learned; "
                "check its pronunciations."
            )
        phones = sorted({phone for sounds in words.values() for phone in sounds})
        # Number 0 is a dummy letter string that no word has; its probability is 0.
        kinds: dict[str | None, int] = {None: 0}
        batches = list(_batches(words, {phone: number for number, phone in enumerate(phones)}, kinds))
        probability = np.full((len(phones), len(kinds)), 1.0 / len(kinds))
        for _ in range(_NUM_ITERATIONS):
            probability[:, 0] = 0.0
            count = np.sum([_counts(batch, probability) for batch in batches], 0)
            probability = count / np.maximum(count.sum(1, keepdims=True), 1e-300)
        aligned = itertools.chain.from_iterable(_best_alignments(batch, probability) for batch in batches)
        spelled = [[f"{phone}{_JOINT}{letters}" for phone, letters in pairs] for pairs in aligned]
        names = sorted({name for pairs in spelled for name in pairs})
        return cls(ngram_of_spellings(spelled, names, _ORDER))

    def spell(self, phones: Sequence[str]) -> str:
        """The most probable letters; phones that no listed word has are skipped.

        Returns:
            The letters; "" if none of the phones is known.
        """
        context, score, texts = self.ngram.start(1), torch.zeros(1, dtype=torch.float32), [""]
        for phone in phones:
            pairs = self._pairs_of.get(phone)
            if pairs is None:
                continue
            num_old, choices = len(texts), torch.tensor(pairs)
            log_prob, reached = self.ngram.score(
                context.repeat_interleave(len(pairs)), choices.repeat(num_old).to(context.dtype)
            )
            total = score.repeat_interleave(len(pairs)) + log_prob
            best: dict[int, int] = {}
            for position in total.argsort(descending=True).tolist():
                best.setdefault(int(reached[position]), position)
                if len(best) == _BEAM:
                    break
            kept = torch.tensor(list(best.values()))
            texts = [texts[at // len(pairs)] + self._letters[pairs[at % len(pairs)]] for at in kept.tolist()]
            context, score = reached[kept], total[kept]
        total = score + self.ngram.final(context)
        return next((texts[at] for at in total.argsort(descending=True).tolist() if texts[at]), "")


@dataclass(frozen=True)
class _Batch:
    """Words with the same number of phones.

    Attributes:
        words: (N,) the words.
        names: (N,) their phones.
        phones: (N, P) the phones as numbers.
        kind: (N, L + 1, K) number of the string of k letters that ends at a position; 0 if there are fewer letters.
        length: (N,) the number of letters.
    """

    words: Sequence[str]
    names: Sequence[Sequence[str]]
    phones: _Ints
    kind: _Ints
    length: _Ints

    def weights(self, probability: _Floats, position: int) -> _Floats:
        """The probabilities of letter strings given the phone at a position, (N, L + 1, K)."""
        return probability[self.phones[:, position, None, None], self.kind]


def _batches(
    words: Mapping[str, Sequence[str]], numbers: Mapping[str, int], kinds: dict[str | None, int]
) -> Iterator[_Batch]:
    """All words in batches with equal numbers of phones; letter strings are numbered in order of appearance."""
    by_length = sorted(words, key=lambda word: (len(words[word]), len(word)))
    for _, group in itertools.groupby(by_length, key=lambda word: len(words[word])):
        equal = list(group)
        for first in range(0, len(equal), _WORDS_AT_A_TIME):
            some = equal[first : first + _WORDS_AT_A_TIME]
            # At least as wide as a string of letters is long.
            width = max(len(some[-1]), _MOST_LETTERS) + 1
            kind = np.zeros((len(some), width, _MOST_LETTERS + 1), dtype=np.int64)
            for row, word in enumerate(some):
                for end in range(len(word) + 1):
                    for count in range(min(end, _MOST_LETTERS) + 1):
                        kind[row, end, count] = kinds.setdefault(word[end - count : end], len(kinds))
            names = [words[word] for word in some]
            phones = np.array([[numbers[phone] for phone in sounds] for sounds in names], dtype=np.int64)
            yield _Batch(some, names, phones, kind, np.array([len(word) for word in some], dtype=np.int64))


def _earlier(values: _Floats) -> _Floats:
    """(N, L + 1) -> (N, L + 1, K): the value k letters earlier, 0 before the word."""
    moved = np.zeros((*values.shape, _MOST_LETTERS + 1))
    for count in range(_MOST_LETTERS + 1):
        moved[:, count:, count] = values[:, : values.shape[1] - count]
    return moved


def _counts(batch: _Batch, probability: _Floats) -> _Floats:
    """Expected counts of (phone, letter string) over all alignments, (phones, C)."""
    num_words, num_phones = batch.phones.shape
    forward: list[_Floats] = [np.zeros(batch.kind.shape[:2])]
    forward[0][:, 0] = 1.0
    for position in range(num_phones):
        forward.append((_earlier(forward[-1]) * batch.weights(probability, position)).sum(2))
    rows = np.arange(num_words)
    total = forward[-1][rows, batch.length]
    backward: _Floats = np.zeros_like(forward[0])
    backward[rows, batch.length] = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0.0)
    count = np.zeros(probability.size)
    for position in reversed(range(num_phones)):
        onward = batch.weights(probability, position) * backward[:, :, None]
        place = batch.phones[:, position, None, None] * probability.shape[1] + batch.kind
        joint = _earlier(forward[position]) * onward
        count += np.bincount(place.ravel(), joint.ravel(), probability.size)
        backward = np.zeros_like(backward)
        for letters in range(_MOST_LETTERS + 1):
            backward[:, : backward.shape[1] - letters] += onward[:, letters:, letters]
    return count.reshape(probability.shape)


def _best_alignments(batch: _Batch, probability: _Floats) -> Iterator[list[tuple[str, str]]]:
    """Yields the most probable pairs of each word."""
    best = np.zeros(batch.kind.shape[:2])
    best[:, 0] = 1.0
    chosen = []
    for position in range(batch.phones.shape[1]):
        joint = _earlier(best) * batch.weights(probability, position)
        chosen.append(joint.argmax(2))
        best = joint.max(2)
    for row, (word, phones) in enumerate(zip(batch.words, batch.names, strict=True)):
        end, pairs = len(word), []
        for phone, letters in zip(reversed(phones), reversed(chosen), strict=True):
            begin = end - int(letters[row, end])
            pairs.append((phone, word[begin:end]))
            end = begin
        yield pairs[::-1]
