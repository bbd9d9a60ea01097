"""ARPA file to n-gram trie and back.

Shapes: M n-grams of one order, V words.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.lm.ngram.arpa import LN_10, ArpaBlock, ArpaReader
from asr.lm.ngram.trie import ROOT, FloatArray, IntArray, NgramTrie, find_sorted, pack
from asr.text.vocabulary import BOS_ID, SPECIAL_WORDS, UNK_ID, Vocabulary
from asr.whole_file import written_whole

UNLISTED = -1
NO_UNKNOWN_SCORE = np.float32(-100.0 * LN_10)
_BLOCK = 1 << 18


def read_arpa(path: str | Path, vocabulary: Vocabulary | None = None) -> NgramTrie:
    """Reads an ARPA file (plain, .gz, .xz) in bounded memory: the n-grams as numbers and one block of text.

    Args:
        path: the file.
        vocabulary: word ids to use; n-grams with other words are left out. By default the file's words, in its order.

    Raises:
        AsrError: the file is not a well-formed ARPA file; the sentence names the line.
    """
    reader = ArpaReader(path)
    builder = _TrieBuilder(reader, vocabulary)
    for block in reader.blocks():
        builder.add(block)
    return builder.finish()


def read_arpa_words(path: str | Path) -> list[str]:
    """The words of an ARPA file in its order, the special ones left out; n-grams longer than one word are not read.

    Raises:
        AsrError: the file's beginning is not that of a well-formed ARPA file.
    """
    words: list[str] = []
    for block in ArpaReader(path).blocks():
        if block.order > 1:
            break
        words += [word for raw in block.words[0] if (word := _as_word(raw)) not in SPECIAL_WORDS]
    return words


def _as_word(raw: bytes) -> str:
    return "<unk>" if raw == b"<UNK>" else raw.decode()


class _TrieBuilder:
    """Collects the sorted n-grams of one order after the other."""

    def __init__(self, reader: ArpaReader, vocabulary: Vocabulary | None) -> None:
        self._reader = reader
        self._vocabulary = vocabulary
        self._id_of: dict[bytes, int] = {}
        self._unigrams: list[ArpaBlock] = []
        self._keys: list[IntArray] = []
        self._begin = [0]
        self._blocks: list[tuple[IntArray, FloatArray, FloatArray]] = []
        self._sorted: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], FloatArray, FloatArray]] = []
        self._order = 1

    def add(self, block: ArpaBlock) -> None:
        if block.order > self._order:
            self._close_order()
        if block.order == 1:
            self._unigrams.append(block)
        else:
            self._add_longer(block)

    def finish(self) -> NgramTrie:
        while self._order <= self._reader.order:
            self._close_order()
        assert self._vocabulary is not None
        columns = [list(column) for column in zip(*self._sorted, strict=True)]
        self._sorted, self._keys = [], []
        whole = []
        for column in columns:  # freeing the orders' own arrays as soon as they are in the whole one
            whole.append(np.concatenate(column))
            column.clear()
        parent, word_id, score, backoff = whole
        np.nan_to_num(backoff, copy=False, nan=0.0)
        return NgramTrie(self._vocabulary, tuple(self._begin), parent, word_id, score, backoff)

    def _close_order(self) -> None:
        if self._order == 1:
            self._close_unigrams()
        else:
            self._close_longer()
        self._begin.append(self._begin[-1] + len(self._sorted[-1][0]))
        self._order += 1

    def _close_unigrams(self) -> None:
        words: list[str] = []
        for block in self._unigrams:
            for line, raw in enumerate(block.words[0], start=block.first_line):
                if raw in self._id_of:
                    self._fail(line, f"the word {raw.decode()!r} stands twice among the unigrams; remove one")
                self._id_of[raw] = UNLISTED
                words.append(_as_word(raw))
        for special in SPECIAL_WORDS[1:3]:
            if special not in words:
                raise AsrError(f"{self._reader.path}: the unigrams lack {special}; rebuild with sentence ends.")
        if self._vocabulary is None:
            ordinary = [word for word in words if word not in SPECIAL_WORDS]
            self._vocabulary = Vocabulary(ordinary, name=str(self._reader.path))
        num_words = len(self._vocabulary)
        score = np.full(num_words, -np.inf, dtype=np.float32)
        score[UNK_ID] = NO_UNKNOWN_SCORE
        backoff = np.zeros(num_words, dtype=np.float32)
        for raw, word in zip(self._id_of, words, strict=True):
            if word in self._vocabulary:
                self._id_of[raw] = self._vocabulary.id_of(word)
        word_id = np.fromiter(self._id_of.values(), np.int64, len(words))
        known = word_id >= 0
        score[word_id[known]] = np.concatenate([block.score for block in self._unigrams])[known]
        backoff[word_id[known]] = np.concatenate([block.backoff for block in self._unigrams])[known]
        score[BOS_ID] = -np.inf
        parent = np.full(num_words, ROOT, dtype=np.int32)
        self._sorted.append((parent, np.arange(num_words, dtype=np.int32), score, backoff))
        self._keys.append(np.arange(-num_words, 0, dtype=np.int64))
        self._unigrams = []

    def _add_longer(self, block: ArpaBlock) -> None:
        ids: list[IntArray] = []
        for column in block.words:
            try:
                ids.append(np.fromiter(map(self._id_of.__getitem__, column), np.int64, len(column)))
            except KeyError:
                row = next(row for row, word in enumerate(column) if word not in self._id_of)
                self._fail(block.first_line + row, f"the word {column[row].decode()!r} has no unigram; add it")
        usable = np.flatnonzero(np.all([column >= 0 for column in ids], axis=0))
        parent = ids[0][usable]
        for order in range(2, block.order):
            keys = pack(parent, ids[order - 1][usable], self._num_words)
            position = find_sorted(self._keys[order - 1], keys)
            if (position < 0).any():
                row = int(usable[np.flatnonzero(position < 0)[0]])
                words = b" ".join(column[row] for column in block.words[:order]).decode()
                what = f"the {block.order}-gram begins with {words!r}, which is not among the {order}-grams"
                self._fail(block.first_line + row, f"{what}; rebuild the model with all lower orders")
            parent = position + self._begin[order - 1]
        no_backoff = np.isnan(self._sorted[-1][3][parent - self._begin[-2]])
        if no_backoff.any():
            row = int(usable[np.flatnonzero(no_backoff)[0]])
            words = b" ".join(column[row] for column in block.words[:-1]).decode()
            what = f"{words!r} is the context of a {block.order}-gram but has no backoff weight in its own line"
            self._fail(block.first_line + row, f"{what}; add the weight or rebuild the model")
        keys = pack(parent, ids[-1][usable], self._num_words)
        self._blocks.append((keys, block.score[usable], block.backoff[usable]))

    def _close_longer(self) -> None:
        keys = np.concatenate([block[0] for block in self._blocks] or [np.zeros(0, dtype=np.int64)])
        score, backoff = (
            np.concatenate([block[column] for block in self._blocks] or [np.zeros(0, dtype=np.float32)])
            for column in (1, 2)
        )
        self._blocks = []
        by_key = np.argsort(keys, kind="stable")
        keys = keys[by_key]
        if (keys[1:] == keys[:-1]).any():
            raise AsrError(f"{self._reader.path}: a {self._order}-gram stands twice; rebuild the file without repeats.")
        parent, word_id = np.divmod(keys, self._num_words)
        self._sorted.append((parent.astype(np.int32), word_id.astype(np.int32), score[by_key], backoff[by_key]))
        self._keys.append(keys)

    @property
    def _num_words(self) -> int:
        assert self._vocabulary is not None
        return len(self._vocabulary)

    def _fail(self, line: int, what: str) -> None:
        raise AsrError(f"{self._reader.path}, line {line}: {what}.")


def write_arpa(trie: NgramTrie, path: str | Path) -> None:
    """Writes the model as ARPA text, whole or not at all: the file appears under its name once it is complete.

    Raises:
        AsrError: the file cannot be written, for want of space for instance.
    """
    with written_whole(Path(path)) as stream:
        _write(trie, stream)


def _write(trie: NgramTrie, stream: BinaryIO) -> None:
    counts = trie.counts
    header = "".join(f"ngram {order}={count}\n" for order, count in enumerate(counts, start=1))
    stream.write(f"\\data\\\n{header}".encode())
    words = [word.encode() for word in trie.vocabulary.words]
    for order in range(1, trie.order + 1):
        stream.write(b"\n\\%d-grams:\n" % order)
        span = trie.span(order)
        positions = np.arange(span.start, span.stop)
        if order == 1:
            positions = positions[trie.listed()]
        for first in range(0, len(positions), _BLOCK):
            block = positions[first : first + _BLOCK]
            stream.write(_lines(trie, block, order, words))
    stream.write(b"\n\\end\\\n")


def _lines(trie: NgramTrie, positions: IntArray, order: int, words: list[bytes]) -> bytes:
    score = _log10(trie.score[positions])
    columns = []
    ancestor = positions
    for _ in range(order):
        columns.append([words[word_id] for word_id in trie.word_id[ancestor].tolist()])
        ancestor = trie.parent[ancestor].astype(np.int64)
    ngrams = map(b" ".join, zip(*columns[::-1], strict=True))
    if order == trie.order:
        return b"".join(b"%.7g\t%s\n" % row for row in zip(score.tolist(), ngrams, strict=True))
    backoff = _log10(trie.backoff[positions])
    return b"".join(b"%.7g\t%s\t%.7g\n" % row for row in zip(score.tolist(), ngrams, backoff.tolist(), strict=True))


def _log10(score: FloatArray) -> npt.NDArray[np.float64]:
    """Natural logs (M,) as the format has them; -99 stands for the log of zero."""
    in_file = score.astype(np.float64) / LN_10
    in_file[np.isneginf(in_file)] = -99.0
    return in_file
