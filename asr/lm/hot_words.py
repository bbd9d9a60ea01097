"""Hot words: words and phrases that are expected, and that the search therefore prefers.

The scores of their words are raised in the decoding graph (`HotWords.gain`), so that they survive every pass. Of a
phrase of several words only whole occurrences should gain. A language model, `HotWords.model`, takes back what its
words have gained elsewhere: an automaton that matches all phrases at once (Aho and Corasick, 1975), in the form of a
backoff n-gram model, which all searches can query. Words keep what they have gained as long as the phrase may follow.

A word whose probability after itself exceeded 1, as that of HA may with a high score, would be found over and over. So
a word gains at most as much as that probability allows.

Shapes: V words, A n-grams.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.lm.combine import Interpolated
from asr.lm.interface import LanguageModel, device_of
from asr.lm.ngram.model import NgramLM
from asr.lm.ngram.trie import ROOT, NgramTrie
from asr.options import require_type
from asr.text.documents import read_text
from asr.text.normalize import written_in_any_case
from asr.text.symbols import SPECIAL_WORDS, Vocabulary

_LOGGER = logging.getLogger(__name__)

DEFAULT_SCORE = 4.0
"""Natural log, added for each word of a phrase."""

_LARGEST = 1000.0
_SHOWN = 5  # unknown phrases in a warning

_Phrase = tuple[int, ...]


def read_hot_words(path: str | Path) -> dict[str, float | None]:
    """Reads a phrase from each line, with its score after a colon if it has its own, as in `NEW YORK :3.5`.

    A file without any, such as one that a program wrote for nobody, is told in a warning.

    Raises:
        AsrError: the file is missing or not UTF-8, or a score is not a number.
    """
    found: dict[str, float | None] = {}
    for number, line in enumerate(read_text(path, "list of hot words").splitlines(), 1):
        phrase, colon, score = line.rpartition(" :")
        try:
            if words := " ".join((phrase if colon else line).split()):
                found[words] = float(score) if colon else None
        except ValueError as error:
            raise AsrError(f"{path}, line {number}: {score.strip()!r} is not a score; write `WORDS :4.0`.") from error
    if not found:
        _LOGGER.warning("%s: there are no hot words in this file; write one word or phrase per line.", path)
    return found


def as_phrases(phrases: Iterable[str] | Mapping[str, float | None] | None) -> dict[str, float | None]:
    """Hot words and their scores, None for those without one; none if there is no list.

    Raises:
        AsrError: they are of another type.
    """
    if phrases is None:
        return {}
    wanted = "words or phrases, such as ['KENSHO', 'NEW YORK']"
    require_type(phrases, Iterable, "hot_words", wanted)
    listed = [phrases] if isinstance(phrases, str) else phrases
    given: dict[str, float | None] = dict(listed) if isinstance(listed, Mapping) else dict.fromkeys(listed)
    for phrase in given:
        require_type(phrase, str, "hot_words", wanted)
    return given


class HotWords:
    """Words and phrases to prefer.

    Args:
        phrases: words, or phrases with spaces between their words; a mapping gives each its score, or None for `score`.
            A word that the vocabulary lacks is taken in an equivalent form (`asr.text.normalize`), in upper case or in
            lower case if it has that.
        vocabulary: the words of the decoding graph.
        score: natural log, added for each word of a phrase.
        ngram: the language model in the graph, which limits the gain of each word; None for no limits.

    Attributes:
        scores: phrase -> its score.

    Raises:
        AsrError: the vocabulary has none of the phrases, or a score is out of range.
    """

    def __init__(
        self,
        phrases: Iterable[str] | Mapping[str, float | None],
        vocabulary: Vocabulary,
        score: float = DEFAULT_SCORE,
        ngram: LanguageModel | None = None,
    ) -> None:
        given = as_phrases(phrases)
        self.scores: dict[tuple[str, ...], float] = {}
        unknown = []
        for phrase, own in given.items():
            words = [_as_listed(word, vocabulary) for word in phrase.split()]
            if words and all(words):
                self.scores[tuple(words)] = _checked(score if own is None else own)
            else:
                unknown.append(phrase)
        if not self.scores:
            shown = f"; it does not have {_shown(unknown)}" if unknown else ""
            raise AsrError(
                f"hot_words: give words of the vocabulary{shown}. A decoder takes others as its words or in its n-gram "
                "model; docs/training.md says how to make a bundle with your own words."
            )
        if unknown:
            _LOGGER.warning("hot words that the vocabulary lacks are left out: %s.", _shown(unknown))
        self._limits = {} if ngram is None else _limits({word for words in self.scores for word in words}, ngram)
        lowered = {
            phrase: self._limits[phrase[0]]
            for phrase, asked in self.scores.items()
            if len(set(phrase)) == 1 and asked > self._limits.get(phrase[0], asked)
        }
        if lowered:
            self.scores |= lowered
            shown = _shown([" ".join(phrase) for phrase in lowered])
            _LOGGER.warning("hot words that tend to repeat themselves get lower scores: %s.", shown)

    def scaled(self, factor: float) -> HotWords:
        """The same with all scores times a factor."""
        scaled = copy.copy(self)
        scaled.scores = {words: factor * score for words, score in self.scores.items()}
        scaled._limits = {word: factor * limit for word, limit in self._limits.items()}
        return scaled

    def gain(self, vocabulary: Vocabulary) -> Tensor:
        """What the graph's score of each word gains, (V,) float32: the highest score of the phrases with the word."""
        most: dict[str, float] = {}
        for words, score in self.scores.items():
            for word in words:
                most[word] = max(most.get(word, 0.0), min(score, self._limits.get(word, score)))
        known = [word for word in most if word in vocabulary]
        gain = torch.zeros(len(vocabulary))
        gain[vocabulary.ids_of(known)] = torch.tensor([most[word] for word in known])
        return gain

    def model(self, vocabulary: Vocabulary) -> NgramLM | None:
        """A model whose scores come on top of those of others and of the gain; None if no phrase has several words."""
        scores = self._numbered(vocabulary)
        if all(len(words) == 1 for words in scores):
            return None
        return NgramLM.from_trie(_Phrases(scores).trie(vocabulary, self.gain(vocabulary)), "hot words")

    def _numbered(self, vocabulary: Vocabulary) -> dict[_Phrase, float]:
        """The phrases that a vocabulary has, by word ids."""
        known = {words: score for words, score in self.scores.items() if all(word in vocabulary for word in words)}
        return {tuple(map(vocabulary.id_of, words)): score for words, score in known.items()}


def with_phrases(model: LanguageModel | None, phrases: NgramLM) -> LanguageModel:
    """A model, if there is one, with the scores of `HotWords.model` for its vocabulary on top."""
    if model is None:
        return phrases
    return Interpolated([model, phrases.to(device_of(model))], [1.0, 1.0], "log-linear")


def _checked(score: float) -> float:
    if isinstance(score, bool) or not isinstance(score, Real) or not 0.0 <= score <= _LARGEST:
        raise AsrError(f"the score of hot words is {score!r}; give a number from 0 to {_LARGEST:g}, such as 4.")
    return float(score)


def _limits(words: Collection[str], ngram: LanguageModel) -> dict[str, float]:
    """-log P(word | word word) of each word."""
    word_id = ngram.vocabulary.ids_of(list(words)).to(device_of(ngram))
    context = ngram.start(len(word_id))
    for _ in range(2):
        _, context = ngram.score(context, word_id)
    limits = ngram.score(context, word_id)[0].neg().clamp(min=0.0)
    return dict(zip(words, limits.tolist(), strict=True))


def _shown(phrases: list[str]) -> str:
    more = f" and {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
    return ", ".join(map(repr, phrases[:_SHOWN])) + more


def _as_listed(word: str, vocabulary: Vocabulary) -> str:
    """The word as the vocabulary writes it; empty if it lacks the word."""
    return next((way for way in written_in_any_case(word, vocabulary) if way not in SPECIAL_WORDS), "")


class _Phrases:
    """The automaton. Its states are the beginnings of phrases; the state after some words is their longest suffix that
    is one.

    Args:
        scores: of each word of a phrase.
    """

    def __init__(self, scores: Mapping[_Phrase, float]) -> None:
        self._scores = scores
        self._states = {phrase[:length] for phrase in scores for length in range(1, len(phrase))}
        self._most: dict[_Phrase, float] = {}  # the highest score of the phrases that begin so
        for phrase, score in scores.items():
            for length in range(1, len(phrase) + 1):
                self._most[phrase[:length]] = max(score, self._most.get(phrase[:length], 0.0))

    def _value(self, words: _Phrase) -> float:
        """What the phrases among some words gain, where each word counts for one of them: the most of all ways."""
        most = [0.0]
        for end in range(1, len(words) + 1):
            most.append(most[-1])
            for begin in range(end):
                score = self._scores.get(words[begin:end])
                if score is not None:
                    most[end] = max(most[end], most[begin] + (end - begin) * score)
        return most[-1]

    def _lent(self, state: _Phrase) -> float:
        """What the words of a state have gained beyond that, for a phrase that is not complete yet."""
        return max(0.0, len(state) * self._most[state] - self._value(state)) if state else 0.0

    def _suffix(self, words: _Phrase) -> _Phrase:
        """The longest suffix that is a state, but not all of the words."""
        return next((words[begin:] for begin in range(1, len(words)) if words[begin:] in self._states), ())

    def _gained(self, words: _Phrase) -> float:
        """The score of the last of the words, which begin a phrase, in the state of the others."""
        before, following = words[:-1], words if words in self._states else self._suffix(words)
        return self._value(words) - self._value(before) + self._lent(following) - self._lent(before)

    def trie(self, vocabulary: Vocabulary, gain: Tensor) -> NgramTrie:
        """The automaton as a backoff model, whose scores are reduced by the gain (V,) of each word."""
        listed = sorted(self._most, key=len)
        number: dict[_Phrase, int] = {(word,): word for word in range(len(vocabulary))}
        order_begin, parent, word_id = [0, len(vocabulary)], [ROOT] * len(vocabulary), list(range(len(vocabulary)))
        for order in range(2, len(listed[-1]) + 1):
            ngrams = [words for words in listed if len(words) == order]
            for words in sorted(ngrams, key=lambda words: (number[words[:-1]], words[-1])):
                number[words] = len(parent)
                parent.append(number[words[:-1]])
                word_id.append(words[-1])
            order_begin.append(len(parent))
        words_of, gains = np.array(word_id, np.int32), gain.numpy()
        score, backoff = -gains[words_of], np.zeros(len(parent), np.float32)
        for words in listed:
            score[number[words]] += self._gained(words)
            if words in self._states:
                backoff[number[words]] = self._lent(self._suffix(words)) - self._lent(words)
        return NgramTrie(vocabulary, tuple(order_begin), np.array(parent, np.int32), words_of, score, backoff)
