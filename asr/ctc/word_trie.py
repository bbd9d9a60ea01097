"""A trie of characters with the known words of an open-vocabulary search, and what its nodes add to scores.

Shapes: W words, N nodes of the trie, A its arcs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from asr.lm.ngram.arpa import LN_10
from asr.lm.ngram.model import NgramLM
from asr.text.symbols import UNK_ID, Vocabulary

IntArray = npt.NDArray[np.int64]

LONG_WORD = 6.0
"""Characters from which on an unfinished word counts as long, as in pyctcdecode."""

LEAST_LOG_PROB = math.log(1e-15)
"""The lowest log-probability that counts, as in pyctcdecode."""


@dataclass(frozen=True, eq=False)
class WordTrie:
    """A trie in arrays: node 0 is the root, and the arcs of a node are adjacent, sorted by character.

    Attributes:
        begin: (N + 1,) int64, the first arc of each node.
        char: (A,) int64.
        next: (A,) int64, the node that an arc leads to.
        depth: (N,) int64, number of characters from the root to a node.
        parent: (N,) int64, -1 for the root.
        word_node: (W,) int64, the node at which each word ends.
    """

    begin: IntArray
    char: IntArray
    next: IntArray
    depth: IntArray
    parent: IntArray
    word_node: IntArray

    @classmethod
    def of_characters(cls, characters: IntArray, length: IntArray) -> WordTrie:
        """Builds the trie of words one after the other, in character numbers from 1, given the length (W,) of each."""
        num_words, longest = len(length), int(length.max(initial=0))
        matrix = np.zeros((num_words, longest), dtype=np.int64)
        rows = np.repeat(np.arange(num_words), length)
        columns = np.arange(len(characters)) - np.repeat(np.cumsum(length) - length, length)
        matrix[rows, columns] = characters
        node = np.zeros(num_words, dtype=np.int64)
        parents, chars, depths = [np.array([-1])], [np.array([0])], [np.array([0])]
        num_nodes = 1
        width = int(matrix.max(initial=0)) + 1
        for depth in range(longest):
            longer = np.flatnonzero(length > depth)
            key, number = np.unique(node[longer] * width + matrix[longer, depth], return_inverse=True)
            parents.append(key // width)
            chars.append(key % width)
            depths.append(np.full(len(key), depth + 1))
            node[longer] = num_nodes + number.reshape(-1)
            num_nodes += len(key)
        parent, char, depth_of = np.concatenate(parents), np.concatenate(chars), np.concatenate(depths)
        # Children of a node are adjacent, in the order of their characters.
        counts = np.bincount(parent[1:], minlength=num_nodes)
        order = np.argsort(parent[1:], kind="stable")
        begin = np.concatenate([[0], np.cumsum(counts)])
        return cls(begin, char[1:][order], 1 + order, depth_of, parent, node)

    def extended(self, words: Sequence[Sequence[int]]) -> WordTrie:
        """The trie with a few more words, new or not; nodes keep their numbers, and new ones follow."""
        begin, char = self.begin, self.char
        added: dict[tuple[int, int], int] = {}
        word_node, depth, parent = [], [], []
        for word in words:
            node = 0
            for length, symbol in enumerate(word, 1):
                following = added.get((node, symbol), -1)
                if following < 0 and node < self.num_nodes:
                    arc = begin[node] + int(np.searchsorted(char[begin[node] : begin[node + 1]], symbol))
                    if arc < begin[node + 1] and char[arc] == symbol:
                        following = int(self.next[arc])
                if following < 0:
                    following = added[node, symbol] = self.num_nodes + len(added)
                    depth.append(length)
                    parent.append(node)
                node = following
            word_node.append(node)
        arcs = sorted(added)
        source = np.array([node for node, _ in arcs], dtype=np.int64)
        new_char = np.array([symbol for _, symbol in arcs], dtype=np.int64)
        # Among the arcs of an old node, or after all arcs.
        place = [
            begin[node] + np.searchsorted(char[begin[node] : begin[node + 1]], symbol)
            if node < self.num_nodes
            else len(char)
            for node, symbol in arcs
        ]
        counts = np.concatenate([np.diff(begin), np.zeros(len(arcs), dtype=np.int64)])
        np.add.at(counts, source, 1)
        return WordTrie(
            np.concatenate([[0], np.cumsum(counts)]),
            np.insert(char, np.array(place, dtype=np.int64), new_char),
            np.insert(self.next, np.array(place, dtype=np.int64), [added[arc] for arc in arcs]),
            np.concatenate([self.depth, np.array(depth, dtype=np.int64)]),
            np.concatenate([self.parent, np.array(parent, dtype=np.int64)]),
            np.concatenate([self.word_node, np.array(word_node, dtype=np.int64)]),
        )

    @property
    def num_nodes(self) -> int:
        """N, the number of nodes."""
        return len(self.depth)

    def is_prefix_of(self, words: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Which nodes are prefixes of one of the words, given by their indices; (N,)."""
        lies = np.zeros(self.num_nodes, dtype=bool)
        node = self.word_node[np.fromiter(words, np.int64)]
        while len(node):
            lies[node] = True
            node = self.parent[node[node > 0]]
            node = node[~lies[node]]
        return lies

    def shortest_of(self, words: Iterable[int]) -> IntArray:
        """The length of the shortest of the words below each node, 0 if there is none; (N,)."""
        node = self.word_node[np.fromiter(words, np.int64)]
        shortest = -self._highest(node, -self.depth[node].astype(np.float64))
        return np.where(shortest == np.inf, 0, shortest).astype(np.int64)

    def highest_of(self, words: Iterable[int], value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The highest value (W',) of the W' words at or below each node, -inf if there is none; (N,)."""
        return self._highest(self.word_node[np.fromiter(words, np.int64)], value)

    def _highest(self, node: IntArray, value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        highest = np.full(self.num_nodes, -np.inf)
        while len(node):
            np.maximum.at(highest, node, value)
            is_below = node > 0
            node, value = self.parent[node[is_below]], value[is_below]
        return highest


class Characters:
    """The characters of a CTC network's labels, numbered from 1 in their order; 0 is the word boundary.

    Args:
        labels: strings of characters, with spaces between words.
    """

    def __init__(self, labels: Iterable[str]) -> None:
        chars = sorted({char for label in labels for char in label} - {" "})
        self.symbols = [" ", *chars]
        self._number = {char: number for number, char in enumerate(chars, 1)}

    def can_write(self, word: str) -> bool:
        """Whether all characters of a word are among these."""
        return self._number.keys() >= set(word)

    def numbers_of(self, word: str) -> list[int]:
        """The numbers of a word's characters."""
        return list(map(self._number.__getitem__, word))

    def trie_of(self, words: Sequence[str]) -> WordTrie:
        """The trie of words, all of which can be written."""
        length = np.fromiter(map(len, words), np.int64, len(words))
        code = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), dtype="<u4")
        # Characters are numbered from 1 in their order.
        known = np.fromiter(map(ord, self._number), np.int64, len(self._number))
        return WordTrie.of_characters(1 + np.searchsorted(known, code), length)


@dataclass(frozen=True, eq=False)
class KnownWords:
    """The trie of the unigrams and of the language model's words, N nodes; it depends on neither weights nor hot words.

    Attributes:
        trie: the trie.
        word: (N,) int64, the language model's word that ends at each node; `UNK_ID` where none does.
        ends: (N,) bool, whether a known word that the language model has ends at each node.
        inside: (N,) bool, whether such a word ends at or below each node.
        best_below: (N,) the highest unigram score of these words, relative to the best of all; zeros without `ahead`.
    """

    trie: WordTrie
    word: npt.NDArray[np.int64]
    ends: npt.NDArray[np.bool_]
    inside: npt.NDArray[np.bool_]
    best_below: npt.NDArray[np.float64]

    @classmethod
    def build(
        cls,
        characters: Characters,
        known: Collection[str],
        listed: frozenset[str],
        vocabulary: Vocabulary | None,
        ahead: NgramLM | None,
    ) -> KnownWords:
        """Builds the trie of the words that can be written.

        Args:
            characters: those that words can be written with.
            known: the known words.
            listed: the words that the language model has.
            vocabulary: of the language model, or None.
            ahead: an n-gram model over this vocabulary, for `best_below`, or None.
        """
        written = [word for word in dict.fromkeys([*known, *listed]) if characters.can_write(word)]
        trie = characters.trie_of(written)
        word = np.full(trie.num_nodes, UNK_ID, dtype=np.int64)
        ends, best_below = np.zeros(trie.num_nodes, dtype=bool), np.zeros(trie.num_nodes)
        if vocabulary is not None:
            word[trie.word_node] = [vocabulary.id_of(each) if each in listed else UNK_ID for each in written]
        scored = listed.intersection(known)
        usable = [place for place, each in enumerate(written) if each in scored]
        ends[trie.word_node[usable]] = True
        if ahead is not None and usable:
            word_id = torch.from_numpy(word[trie.word_node[usable]])
            unigram = ahead.arrays.arc_score(word_id).cpu().double().clamp(min=LEAST_LOG_PROB)
            best_below = trie.highest_of(usable, unigram.numpy())
            # Relative to the best of all words, any of which may follow a finished one.
            best_below -= best_below[0]
        return cls(trie, word, ends, trie.is_prefix_of(usable), best_below)


@dataclass(frozen=True, eq=False)
class ScoredWords:
    """The trie of known and hot words, and their contributions to scores; see `Rules`."""

    trie: WordTrie
    word: npt.NDArray[np.int64]
    end: npt.NDArray[np.float64]
    guess: npt.NDArray[np.float64]
    outside_end: float
    outside_guess: float
    most_end: float
    most_guess: float

    @classmethod
    def build(
        cls,
        known: KnownWords,
        characters: Characters,
        hot: list[str],
        hotword_weight: float,
        weights: tuple[float, float] | None,
    ) -> ScoredWords:
        """Adds hot words to the trie of known words, and scores both.

        Args:
            known: the known words.
            characters: those that words can be written with.
            hot: the hot words; those that cannot be written are left out.
            hotword_weight: natural log, added for each hot word.
            weights: the weight of the language model, and log10 for each unknown word; None without a language model.
        """
        hot = [word for word in hot if characters.can_write(word)]
        trie = known.trie.extended([characters.numbers_of(word) for word in hot]) if hot else known.trie
        num_known, num_nodes = known.trie.num_nodes, trie.num_nodes
        word = np.full(num_nodes, UNK_ID, dtype=np.int64)
        word[:num_known] = known.word
        end, guess = np.zeros(num_nodes), np.zeros(num_nodes)
        outside_end = outside_guess = 0.0
        if weights is not None:
            alpha, outside_guess = weights
            outside_end = alpha * outside_guess * LN_10
            end[:] = outside_end
            end[:num_known][known.ends] = 0.0
            guess = outside_guess * np.maximum(1.0, trie.depth / LONG_WORD)
            guess[:num_known][known.inside] = alpha * known.best_below[known.inside]
        if hot:
            places = range(len(trie.word_node) - len(hot), len(trie.word_node))
            shortest = trie.shortest_of(places)
            guess = np.where(shortest > 0, hotword_weight * trie.depth / np.maximum(shortest, 1), guess)
            end[trie.word_node[places]] += hotword_weight
        most = (max(0.0, float(values.max())) for values in (end, guess))
        return cls(trie, word, end, guess, outside_end, outside_guess, *most)
