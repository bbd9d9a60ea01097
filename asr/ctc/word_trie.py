"""A trie of characters with the known words of an open-vocabulary search.

Shapes: W words, N nodes of the trie, A its arcs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


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
    def build(cls, words: Sequence[Sequence[int]]) -> WordTrie:
        """Builds the trie of words, each a sequence of character numbers from 1."""
        length = np.fromiter(map(len, words), np.int64, len(words))
        chars = np.fromiter((char for word in words for char in word), np.int64, int(length.sum()))
        return cls.of_characters(chars, length)

    @classmethod
    def of_characters(cls, characters: IntArray, length: IntArray) -> WordTrie:
        """The same of words one after the other, given the length (W,) of each."""
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
