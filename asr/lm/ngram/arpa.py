"""ARPA files in: plain, gzip or xz, read in blocks of bounded memory. log10 becomes the natural logarithm here.

Shapes: M n-grams of one block, n their order.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.text.text_file import READING_ERRORS, open_text, unreadable

LN_10 = math.log(10.0)
BLOCK_LINES = 200_000
_COUNT_LINE = re.compile(rb"ngram\s+(\d+)\s*=\s*(\d+)$")


@dataclass(frozen=True)
class ArpaBlock:
    """Some n-grams of one order as they stand in the file.

    Attributes:
        order: n.
        words: n columns of M words each; the last column holds the predicted words.
        score: (M,) float32 natural log probability.
        backoff: (M,) float32 natural log backoff weight, NaN where the line has none.
        first_line: line number of the block's first n-gram.
    """

    order: int
    words: list[list[bytes]]
    score: npt.NDArray[np.float32]
    backoff: npt.NDArray[np.float32]
    first_line: int


class ArpaReader:
    """Reads an ARPA file front to back. The header is read at once, `blocks` then yields the n-grams.

    Args:
        path: the file; `.gz` and `.xz` are unpacked on the way.

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
            if line == b"" or self._num_lines > 10_000:
                self._fail("no \\data\\ line; this is not an ARPA file")
        counts: list[int] = []
        while (peeked := self._take(1)) and peeked[0].strip():
            match = _COUNT_LINE.match(peeked[0].strip())
            if match is None:
                self._fail(f"{_shown(peeked[0].strip())} is no count; the header needs lines like 'ngram 2=1000'")
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
        if not (score <= 0.0).all() or np.isinf(backoff).any():
            self._find_bad_line(lines, order, first_line, num_before)
        columns = [fields[column::width] for column in range(1, order + 1)]
        return ArpaBlock(order, columns, score.astype(np.float32), backoff.astype(np.float32), first_line)

    def _find_bad_line(self, lines: list[bytes], order: int, first_line: int, num_before: int) -> NoReturn:
        """Says what is wrong with the first line that is wrong; called only once some line is."""
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
                    self._fail(f"the log10 probability {_shown(field)} is above 0")
        raise AssertionError("a block was rejected though each of its lines is well formed")

    def _fail_short(self, order: int, num_real: int) -> NoReturn:
        declared = self.counts[order - 1]
        self._fail(f"the header declares {declared} {order}-grams, the section holds {num_real}; rebuild the file")

    def _fail_heading(self, heading: bytes, order: int) -> NoReturn:
        if heading and not heading.startswith(b"\\"):
            declared = f"{self.counts[order - 2]} {order - 1}-grams"
            self._fail(f"the header declares {declared}, the section holds more; rebuild the file")
        due = f"\\{order}-grams:" if order <= self.order else "\\end\\"
        self._fail(f"found {_shown(heading)} where {due} is due; the file is cut short or damaged, rebuild it")

    def _fail(self, what: str) -> NoReturn:
        raise AsrError(f"{self.path}, line {self._num_lines}: {what}.")


def _padded(fields: list[bytes], order: int, width: int) -> list[bytes]:
    """The fields of a line with `nan` for a backoff weight left out."""
    if len(fields) == order + 1 and width == order + 2:
        return [*fields, b"nan"]
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
