"""Text files to word ids, a block of sentences at a time: what n-gram counting and token files are made from.

Shapes: L words of a block, `<s>` and `</s>` of each sentence among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.text.text_file import READING_ERRORS, open_text, unreadable
from asr.text.vocabulary import BOS_ID, EOS_ID, EPSILON_ID, SPECIAL_WORDS

_BLOCK_BYTES = 1 << 23
_SENTENCE_BREAK = " </s> <s> "


def read_word_ids(
    texts: Iterable[str | Path], transcripts: Iterable[str | Path], id_of: Mapping[str, int]
) -> Iterator[npt.NDArray[np.int32]]:
    """The sentences of texts, one a line, then of transcripts, `utterance-id WORDS` a line as in Kaldi's `text`.

    Blank lines are no sentences; an utterance without words is one. Files are plain, .gz or .xz.

    Args:
        texts: the files, read in this order.
        transcripts: the files after them.
        id_of: asked for every word, with ids of its own choice for words that it does not know.

    Yields:
        `<s> ... </s>` of some sentences, one after the other, (L,).

    Raises:
        AsrError: a file is missing, damaged or not UTF-8, or holds a sentence mark as a word.
    """
    for path in texts:
        yield from _blocks(Path(path), id_of, has_id=False)
    for path in transcripts:
        yield from _blocks(Path(path), id_of, has_id=True)


def _blocks(path: Path, id_of: Mapping[str, int], has_id: bool) -> Iterator[npt.NDArray[np.int32]]:
    first_line = 1
    with open_text(path, "text") as stream:
        while True:
            try:
                block = stream.read(_BLOCK_BYTES) + stream.readline()
                lines = block.decode().split("\n")
            except UnicodeDecodeError as error:
                line = first_line + block.count(b"\n", 0, error.start)
                raise AsrError(f"{path}, line {line}: the text is not UTF-8; convert it first.") from error
            except READING_ERRORS as error:
                raise unreadable(path, "text", error) from error
            if not block:
                return
            sentences = [line for line in lines if line and not line.isspace()]
            if has_id:
                sentences = [" ".join(line.split(None, 1)[1:]) for line in sentences]
            if sentences:
                words = _SENTENCE_BREAK.join(["", *sentences, ""]).split()[1:-1]
                ids = np.fromiter(map(id_of.__getitem__, words), np.int32, len(words))
                _refuse_marks(path, first_line, lines, ids, len(sentences))
                yield ids
            first_line += len(lines) - 1


def _refuse_marks(path: Path, first_line: int, lines: list[str], ids: npt.NDArray[np.int32], num: int) -> None:
    """Of the marks, so many sentences have one `<s>` and one `</s>` each."""
    for special, expected in ((EPSILON_ID, 0), (BOS_ID, num), (EOS_ID, num)):
        if (ids == special).sum() != expected:
            word = SPECIAL_WORDS[special]
            line = next(number for number, line in enumerate(lines, first_line) if word in line.split())
            raise AsrError(f"{path}, line {line}: the text holds the mark {word} as a word; take it out.")
