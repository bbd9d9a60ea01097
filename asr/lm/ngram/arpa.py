"""Reads and writes ARPA files, plain, gzip or xz, in blocks of bounded memory.

ARPA's base-10 logarithms become natural logarithms here and nowhere else.

Shapes: M n-grams of one block or order, n their order, V words.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.lm.ngram.trie import MOST_NGRAMS, ROOT, FloatArray, IntArray, NgramTrie, find_sorted, joined, pack
from asr.serialization import open_atomic
from asr.text.documents import READING_ERRORS, open_text, unreadable
from asr.text.symbols import BOS_ID, SPECIAL_WORDS, UNK_ID, Vocabulary

_LOGGER = logging.getLogger(__name__)

KENLM_MAGIC = b"mmap lm http://kheafield.com/code"
"""How a file of KenLM's `build_binary` begins."""

LN_10 = math.log(10.0)
BLOCK_LINES = 200_000
_COUNT_LINE = re.compile(rb"ngram\s+(\d{1,18})\s*=\s*(\d{1,18})$")


@dataclass(frozen=True)
class ArpaBlock:
    """A block of n-grams of one order, in the order of the file.

    Attributes:
        order: n.
        words: n columns of M words each; the last column holds the predicted words.
        score: (M,) float32 natural log probability.
        backoff: (M,) float32 natural log backoff weight, 0 where the line has none.
        first_line: line number of the block's first n-gram.
    """

    order: int
    words: list[list[bytes]]
    score: npt.NDArray[np.float32]
    backoff: npt.NDArray[np.float32]
    first_line: int


class ArpaReader:
    """Reads an ARPA file from front to back: the constructor reads the header, `blocks` yields the n-grams.

    Args:
        path: the file; `.gz` and `.xz` are decompressed while reading.

    Attributes:
        counts: the number of n-grams of each order, as the header declares it.

    Raises:
        AsrError: the file cannot be read or its header is not that of an ARPA file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stream = open_text(self.path, "n-gram model")
        self._num_lines = 0
        self.counts = self._read_header()

    @property
    def order(self) -> int:
        """The length of the longest n-grams."""
        return len(self.counts)

    def blocks(self) -> Iterator[ArpaBlock]:
        """Yields all n-grams, order after order, at most `BLOCK_LINES` at a time.

        Raises:
            AsrError: a line is malformed, a section does not hold what the header declares, or the file ends early.
        """
        with self._stream:
            for order, count in enumerate(self.counts, start=1):
                heading = self._next_line()
                if heading != b"\\%d-grams:" % order:
                    self._fail_heading(heading, order)
                left = count
                while left:
                    lines = self._take(min(left, BLOCK_LINES))
                    if not lines:
                        self._fail_short(order, count - left)
                    yield self._parse(lines, order, count - left)
                    left -= len(lines)
            if (ending := self._next_line()) != b"\\end\\":
                self._fail_heading(ending, self.order + 1)

    def _read_header(self) -> tuple[int, ...]:
        while (line := self._next_line()) != b"\\data\\":
            if line.startswith(KENLM_MAGIC):
                self._fail("a KenLM binary does not list its n-grams; give the ARPA file that it was built from")
            if line == b"" or self._num_lines > 10_000:
                self._fail("no \\data\\ line; this is not an ARPA file")
        counts: list[int] = []
        while (peeked := self._take(1)) and peeked[0].strip():
            match = _COUNT_LINE.match(peeked[0].strip())
            if match is None:
                self._fail(f"{_shown(peeked[0].strip())} is not a count; the header needs lines like 'ngram 2=1000'")
            if int(match[1]) != len(counts) + 1:
                self._fail(
                    f"the header counts {int(match[1])}-grams after {len(counts)}-grams; "
                    "every lower order must be present, rebuild the file with all of them"
                )
            counts.append(int(match[2]))
        if not counts or not counts[0]:
            self._fail("the header declares no n-grams; rebuild the file")
        return tuple(counts)

    def _take(self, num_lines: int) -> list[bytes]:
        try:
            lines = list(itertools.islice(self._stream, num_lines))
        except READING_ERRORS as error:
            raise unreadable(self.path, "n-gram model", error) from error
        self._num_lines += len(lines)
        return lines

    def _next_line(self) -> bytes:
        """The next line that is not blank, stripped; empty at the end of the file."""
        while lines := self._take(1):
            if line := lines[0].strip():
                return line
        return b""

    def _parse(self, lines: list[bytes], order: int, num_before: int) -> ArpaBlock:
        first_line = self._num_lines - len(lines) + 1
        width = order + (2 if order < self.order else 1)
        text = b"".join(lines)
        fields = text.split()
        try:
            text.decode("utf-8")
            uniform = len(fields) == width * len(lines) and all(line.count(b"\t") == width - order for line in lines)
            if not uniform or any(line.count(b" ") != order - 1 for line in lines):
                fields = [field for line in lines for field in _padded(line.split(), order, width)]
            score = np.fromiter(map(float, fields[0::width]), np.float64, len(lines)) * LN_10
            backoff = np.zeros(len(lines))
            if width == order + 2:
                backoff = np.fromiter(map(float, fields[width - 1 :: width]), np.float64, len(lines)) * LN_10
        except ValueError:
            self._find_bad_line(lines, order, first_line, num_before)
        if not (score <= 0.0).all() or not np.isfinite(backoff).all():
            self._find_bad_line(lines, order, first_line, num_before)
        columns = [fields[column::width] for column in range(1, order + 1)]
        return ArpaBlock(order, columns, score.astype(np.float32), backoff.astype(np.float32), first_line)

    def _find_bad_line(self, lines: list[bytes], order: int, first_line: int, num_before: int) -> NoReturn:
        """Raises an error about the first malformed line; called only if there is one."""
        widths = (order + 1, order + 2) if order < self.order else (order + 1,)
        for self._num_lines, line in enumerate(lines, start=first_line):
            if not line.strip() or line.startswith(b"\\"):
                self._fail_short(order, num_before + self._num_lines - first_line)
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                self._fail("the line is not UTF-8; convert the file")
            fields = line.split()
            if len(fields) not in widths:
                expected = f"a log10 probability, {order} words" + (" and a backoff weight" if len(widths) == 2 else "")
                self._fail(f"{len(fields)} fields where {expected} are due: {_shown(line.strip())}")
            for name, field in (("probability", fields[0]), ("backoff weight", (fields[order + 1 :] or [b"0"])[0])):
                value = _number(field)
                if not math.isfinite(value) and not (name == "probability" and value == -math.inf):
                    self._fail(f"the {name} {_shown(field)} is not a number")
                if name == "probability" and value > 0.0:
                    self._fail(f"the log10 probability {_shown(field)} is above 0; write 0 if it is a rounding error")
        raise AssertionError("a block was rejected though each of its lines is well formed")

    def _fail_short(self, order: int, num_real: int) -> NoReturn:
        declared = self.counts[order - 1]
        self._fail(f"the header declares {declared} {order}-grams, the section contains {num_real}; rebuild the file")

    def _fail_heading(self, heading: bytes, order: int) -> NoReturn:
        if heading and not heading.startswith(b"\\"):
            declared = f"{self.counts[order - 2]} {order - 1}-grams"
            self._fail(f"the header declares {declared}, the section contains more; rebuild the file")
        due = f"\\{order}-grams:" if order <= self.order else "\\end\\"
        self._fail(f"found {_shown(heading)} instead of {due}; the file is cut short or damaged, rebuild it")

    def _fail(self, what: str) -> NoReturn:
        raise AsrError(f"{self.path}, line {self._num_lines}: {what}.")


def _padded(fields: list[bytes], order: int, width: int) -> list[bytes]:
    """The fields of a line, with 0 for a missing backoff weight."""
    if len(fields) == order + 1 and width == order + 2:
        return [*fields, b"0"]
    if len(fields) != width:
        raise ValueError
    return fields


def _number(field: bytes) -> float:
    try:
        return float(field)
    except ValueError:
        return math.nan


def _shown(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", errors="replace")) if text else "the end of the file"


UNLISTED = -1
NO_UNKNOWN_SCORE = np.float32(-100.0 * LN_10)

# By convention, files write this log10 of zero.
_LOG10_ZERO = -99.0


def read_arpa(path: str | Path, vocabulary: Vocabulary | None = None) -> NgramTrie:
    """Reads an ARPA file (plain, .gz, .xz); memory holds the n-grams as numbers and only one block of the text.

    Args:
        path: the file.
        vocabulary: word ids to use; n-grams with other words are left out. By default the file's words, in its order,
            without those that have white space such as U+00A0 in them.

    Raises:
        AsrError: the file is not a well-formed ARPA file, and the message names the line; or it has too many n-grams.
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
    return _without_spaces(words, path)


def _without_spaces(words: list[str], path: str | Path) -> list[str]:
    """The words without those that have white space in them, such as U+00A0: ARPA files separate words by ASCII's."""
    if len("".join(words).split()) <= 1:
        return words
    kept = [word for word in words if word.split() == [word]]
    if len(kept) < len(words):
        example = next(word for word in words if word.split() != [word])
        _LOGGER.warning(
            "%s: %d words have white space in them (%r) and are left out, as are their n-grams.",
            *(path, len(words) - len(kept), example),
        )
    return kept


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
        if vocabulary is None:
            self._require_room_for(sum(reader.counts))

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
        parent, word_id, score, backoff = (list(column) for column in zip(*self._sorted, strict=True))
        self._sorted, self._keys = [], []
        joint = joined(parent), joined(word_id), joined(score)
        return NgramTrie(self._vocabulary, tuple(self._begin), *joint, joined(backoff))

    def _close_order(self) -> None:
        if self._order == 1:
            self._close_unigrams()
        else:
            self._close_longer()
        self._begin.append(self._begin[-1] + len(self._sorted[-1][0]))
        self._require_room_for(self._begin[-1])
        self._order += 1

    def _close_unigrams(self) -> None:
        words: list[str] = []
        for block in self._unigrams:
            for line, raw in enumerate(block.words[0], start=block.first_line):
                if raw in self._id_of:
                    self._fail(line, f"the word {raw.decode()!r} occurs twice among the unigrams; remove one")
                self._id_of[raw] = UNLISTED
                words.append(_as_word(raw))
        for special in SPECIAL_WORDS[1:3]:
            if special not in words:
                raise AsrError(f"{self._reader.path}: {special} has no unigram; rebuild the model with sentence marks.")
        if self._vocabulary is None:
            ordinary = _without_spaces([word for word in words if word not in SPECIAL_WORDS], self._reader.path)
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
        # A word with -inf would count as one that the model does not list.
        in_file = np.concatenate([block.score for block in self._unigrams])[known]
        score[word_id[known]] = np.where(np.isneginf(in_file), np.float32(_LOG10_ZERO * LN_10), in_file)
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
            raise AsrError(f"{self._reader.path}: a {self._order}-gram occurs twice; rebuild the file without repeats.")
        parent, word_id = np.divmod(keys, self._num_words)
        self._sorted.append((parent.astype(np.int32), word_id.astype(np.int32), score[by_key], backoff[by_key]))
        self._keys.append(keys)

    def _require_room_for(self, num_ngrams: int) -> None:
        if num_ngrams > MOST_NGRAMS:
            raise AsrError(
                f"{self._reader.path}: {num_ngrams} n-grams are more than the {MOST_NGRAMS} that a model may have; "
                "prune it, or give fewer words."
            )

    @property
    def _num_words(self) -> int:
        assert self._vocabulary is not None
        return len(self._vocabulary)

    def _fail(self, line: int, what: str) -> None:
        raise AsrError(f"{self._reader.path}, line {line}: {what}.")


def write_arpa(trie: NgramTrie, path: str | Path, ngrams_at_once: int = 1 << 18) -> None:
    """Writes the model as ARPA text; the file appears under its name only when it is complete.

    Args:
        trie: the model.
        path: the file.
        ngrams_at_once: how many n-grams are formatted at a time, which takes memory.

    Raises:
        AsrError: the file cannot be written, for example because the disk is full.
    """
    with open_atomic(Path(path)) as stream:
        _write(trie, stream, ngrams_at_once)


def _write(trie: NgramTrie, stream: BinaryIO, ngrams_at_once: int) -> None:
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
        for first in range(0, len(positions), ngrams_at_once):
            block = positions[first : first + ngrams_at_once]
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
    """Natural logs (M,) as base-10 logs; -99 stands for the log of zero."""
    in_file = score.astype(np.float64) / LN_10
    in_file[np.isneginf(in_file)] = _LOG10_ZERO
    return in_file
