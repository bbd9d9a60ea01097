"""What language models and word lists add to the scores of hypotheses, token by token.

Shapes: Q extensions of a hypothesis by a token, C tokens, W words, N nodes of a trie, A its arcs.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from asr.ctc.prefix_search import token_word_ids
from asr.ctc.word_trie import LEAST_LOG_PROB, WordTrie
from asr.errors import AsrError
from asr.fusion.interface import FloatArray, FusionConfig, IntArray
from asr.lm.ngram.model import NgramLM
from asr.text.ctc_tokens import CTCTokens
from asr.text.normalize import equivalent_forms
from asr.text.symbols import UNK_ID, Vocabulary

OUTSIDE = -1
"""The place of an unfinished word that no listed word begins with."""
NO_WORD = -1

# The numbers of a byte, and 0 for none.
_WIDTH = 257
_WORDS_LOOKED_AT = 1000


class Extension(NamedTuple):
    """What tokens add to hypotheses; all (Q,).

    Attributes:
        place: where the unfinished word is in the list of words; 0 between words.
        word: the word that the language model is asked for, `NO_WORD` for none.
        gain: added for good, beside the language model's score; -inf if the token may not follow.
        guess: added until the unfinished word is finished.
    """

    place: IntArray
    word: IntArray
    gain: FloatArray
    guess: FloatArray


class TextScores(ABC):
    """What texts gain while they grow.

    Attributes:
        listed_as: the listed words that the tokens spell in an equivalent form, by that form.
    """

    listed_as: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def extended(self, place: IntArray, entry: IntArray) -> Extension:
        """Extends hypotheses at some places (Q,) by tokens (Q,), entries of `CTCTokens.table`."""

    @abstractmethod
    def finished(self, place: IntArray) -> tuple[IntArray, FloatArray]:
        """Ends texts at some places (Q,) -> the words that the language model is asked for, and what is gained."""


class TokenScores(TextScores):
    """Each token is a word.

    Args:
        tokens: the network's.
        config: scales.
        vocabulary: that of the language model of tokens, or None without one.

    Raises:
        AsrError: the language model has none of the tokens.
    """

    def __init__(self, tokens: CTCTokens, config: FusionConfig, vocabulary: Vocabulary | None = None) -> None:
        self._word_of = np.full(len(tokens.table), NO_WORD, dtype=np.int64)
        if vocabulary is not None:
            self._word_of[:] = token_word_ids(tokens, vocabulary)
        self._gain = float(config.word_insertion_penalty)

    def extended(self, place: IntArray, entry: IntArray) -> Extension:
        return Extension(place, self._word_of[entry], np.full(len(entry), self._gain), np.zeros(len(entry)))

    def finished(self, place: IntArray) -> tuple[IntArray, FloatArray]:
        return np.full(len(place), NO_WORD), np.zeros(len(place))


class WordScores(TextScores):
    """Tokens spell words, listed or not. Until a word is finished, it has the best unigram of the words it may become.

    Args:
        tokens: the network's; letters with a boundary between words, or pieces.
        words: the listed words.
        config: scales.
        vocabulary: that of the language model, or None without one.
        unigrams: an n-gram model for unfinished words, or None.
        gains: of hot words, by word.

    Raises:
        AsrError: the tokens do not spell words, or hardly any of the words can be spelled.
    """

    def __init__(
        self,
        tokens: CTCTokens,
        words: Sequence[str],
        config: FusionConfig,
        vocabulary: Vocabulary | None = None,
        unigrams: NgramLM | None = None,
        gains: Mapping[str, float] | None = None,
    ) -> None:
        self._insertion, self._penalty = float(config.word_insertion_penalty), float(config.spelling_penalty)
        entries = range(len(tokens.table))
        separates = np.array([entry > 0 and tokens.separates_words(entry) for entry in entries])
        self._begins = separates | [
            tokens.kind == "pieces" and tokens.is_text(e) and tokens.begins_word(e) for e in entries
        ]
        spelled = [tokens.bytes_of(entry) for entry in entries]
        longest = max(map(len, spelled))
        self._bytes = np.zeros((len(spelled), longest), dtype=np.int64)
        for entry, text in enumerate(spelled):
            self._bytes[entry, : len(text)] = 1 + np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        written = spelled_words(words, tokens)
        texts, listed = [*written], [*written.values()]
        spelling = [text.decode("utf-8", "surrogatepass") for text in texts]
        self.listed_as = {text: word for text, word in zip(spelling, listed, strict=True) if text != word}
        trie = WordTrie.of_characters(
            1 + np.frombuffer(b"".join(texts), dtype=np.uint8).astype(np.int64), np.array([*map(len, texts)], np.int64)
        )
        self._arc = np.repeat(np.arange(trie.num_nodes), np.diff(trie.begin)) * _WIDTH + trie.char
        self._next = trie.next
        node = trie.word_node
        self._word = np.full(trie.num_nodes, UNK_ID, dtype=np.int64)
        self._is_listed = np.zeros(trie.num_nodes, dtype=bool)
        self._is_listed[node] = True
        if vocabulary is not None:
            self._word[node] = [vocabulary.id_of(word) if word in vocabulary else UNK_ID for word in listed]
        self._has_lm = vocabulary is not None
        self._gain = np.zeros(trie.num_nodes)
        if gains:
            self._gain[node] = [config.lm_scale * gains.get(word, 0.0) for word in listed]
        ahead, unknown = _unigrams(listed, unigrams)
        ahead = config.lm_scale * ahead
        best = trie.highest_of(range(len(listed)), ahead + self._gain[node])
        # Relative to the best of all words, any of which may follow a finished one.
        top = float(best[0])
        self._outside_guess = config.lm_scale * unknown + self._penalty - top
        self._guess = np.maximum(best - top, self._outside_guess)
        self._guess[0] = 0.0

    def extended(self, place: IntArray, entry: IntArray) -> Extension:
        word, gain = self.finished(np.where(self._begins[entry], place, 0))
        after = np.where(self._begins[entry], 0, place)
        for byte in self._bytes[entry].T:
            after = self._step(after, byte)
        guess = np.where(after == OUTSIDE, self._outside_guess, self._guess[after])
        return Extension(after, word, gain, guess)

    def finished(self, place: IntArray) -> tuple[IntArray, FloatArray]:
        is_listed = (place != OUTSIDE) & self._is_listed[place]
        gain = self._insertion + np.where(is_listed, self._gain[place], self._penalty)
        word = np.where(is_listed, self._word[place], UNK_ID) if self._has_lm else np.full(len(place), NO_WORD)
        return np.where(place == 0, NO_WORD, word), np.where(place == 0, 0.0, gain)

    def _step(self, node: IntArray, byte: IntArray) -> IntArray:
        """The nodes after one more byte, (Q,); 0 stands for no byte."""
        key = node * _WIDTH + byte
        arc = np.minimum(np.searchsorted(self._arc, key), len(self._arc) - 1)
        found = np.where((node != OUTSIDE) & (self._arc[arc] == key), self._next[arc], OUTSIDE)
        return np.where(byte == 0, node, found)


def spelled_words(words: Sequence[str], tokens: CTCTokens) -> dict[bytes, str]:
    """The words that can be spelled in some tokens, by their spelling: their own or an equivalent form's.

    Raises:
        AsrError: the tokens do not spell words, or hardly any of the words can be spelled.
    """
    if tokens.kind == "phones" or (tokens.kind == "letters" and tokens.boundary_id is None):
        raise AsrError(
            f"{tokens.name}: these tokens do not spell words, as they are neither pieces nor letters with a boundary "
            "between words; leave out words and language models of words, or give token_lm."
        )
    pairs = [(tokens.text_of(entry), tokens.bytes_of(entry)) for entry in range(len(tokens.table))]
    chars = {char for text, _ in pairs for char in text}
    # Of tokens that are parts of characters.
    parts = {byte for text, own in pairs if _utf8(text) != own for byte in own}

    def can_be_spelled(word: str) -> bool:
        return all(char in chars or parts.issuperset(_utf8(char)) for char in word)

    found: dict[bytes, str] = {}
    for word in words:
        if can_be_spelled(word):
            found[_utf8(word)] = word
        elif form := next(filter(can_be_spelled, equivalent_forms(word)), ""):
            found.setdefault(_utf8(form), word)
    if 2 * len(found) < len(words):
        lacking = set(words).difference(found.values())
        wrong = next(word for word in words if word in lacking)
        for change, case in ((str.upper, "upper"), (str.lower, "lower")):
            sample = [change(word) for word in itertools.islice(lacking, _WORDS_LOOKED_AT)]
            if 2 * sum(map(can_be_spelled, sample)) > len(sample):
                raise AsrError(
                    f"{tokens.name}: the words ({wrong!r}, ...) cannot be spelled in the tokens, which are in {case} "
                    "case; convert words and language models to that case."
                )
        raise AsrError(
            f"{tokens.name}: of {len(words)} words, only {len(found)} can be spelled in the tokens, unlike {wrong!r}; "
            "give words and language models of the network's language."
        )
    return found


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _unigrams(words: Sequence[str], ngram: NgramLM | None) -> tuple[FloatArray, float]:
    """The unigram scores of words (W,) and of `<unk>`; zeros without a model."""
    if ngram is None:
        return np.zeros(len(words)), 0.0
    vocabulary = ngram.vocabulary
    word_id = torch.tensor([UNK_ID, *(vocabulary.id_of(word) if word in vocabulary else UNK_ID for word in words)])
    score = ngram.arrays.arc_score(word_id.to(ngram.device)).cpu().double().clamp(min=LEAST_LOG_PROB)
    return score[1:].numpy(), float(score[0])
