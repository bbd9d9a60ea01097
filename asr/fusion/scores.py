"""What language models and word lists add to the scores of hypotheses, token by token.

Shapes: Q extensions of a hypothesis by a token, C tokens, W words, N nodes of a trie, A its arcs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from asr.ctc.prefix_search import token_word_ids
from asr.ctc.word_trie import LEAST_LOG_PROB, WordTrie
from asr.fusion.interface import FloatArray, FusionConfig, IntArray
from asr.fusion.spelling import SpelledWords
from asr.lm.ngram.model import NgramLM
from asr.text.ctc_tokens import CTCTokens
from asr.text.symbols import UNK_ID, Vocabulary

OUTSIDE = -1
"""The place of an unfinished word that no listed word begins with."""
NO_WORD = -1

# The numbers of a byte, and 0 for none.
_WIDTH = 257


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
    """What texts gain while they grow."""

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

    def __init__(self, tokens: CTCTokens, config: FusionConfig, vocabulary: Vocabulary | None) -> None:
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
        spelled: the listed words, as the tokens spell them.
        config: scales.
        vocabulary: that of the language model, or None without one.
        unigrams: an n-gram model for unfinished words, or None.
        gains: of hot words, by word.
    """

    def __init__(
        self,
        tokens: CTCTokens,
        spelled: SpelledWords,
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
        if spelled.form is not None and spelled.form.separators:
            self._begins |= [spelled.form.separates(tokens.text_of(entry)) for entry in entries]
        written = [spelled.bytes_of(tokens, entry) for entry in entries]
        longest = max(map(len, written))
        self._bytes = np.zeros((len(written), longest), dtype=np.int64)
        for entry, text in enumerate(written):
            self._bytes[entry, : len(text)] = 1 + np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        texts, listed = [*spelled.words], [*spelled.words.values()]
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
        ahead, unknown = unigrams_of(listed, unigrams)
        ahead = config.lm_scale * ahead
        best = trie.highest_of(range(len(listed)), ahead + self._gain[node])
        # Relative to the best of all words, any of which may follow a finished one. If unlisted words cost nothing,
        # most words are such.
        top = 0.0 if unigrams is None and self._penalty >= 0.0 else float(best[0])
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


def unigrams_of(words: Sequence[str], ngram: NgramLM | None) -> tuple[FloatArray, float]:
    """The unigram scores of words (W,) and of `<unk>`; zeros without a model."""
    if ngram is None:
        return np.zeros(len(words)), 0.0
    vocabulary = ngram.vocabulary
    word_id = torch.tensor([UNK_ID, *(vocabulary.id_of(word) if word in vocabulary else UNK_ID for word in words)])
    score = ngram.arrays.arc_score(word_id.to(ngram.device)).cpu().double().clamp(min=LEAST_LOG_PROB)
    return score[1:].numpy(), float(score[0])
