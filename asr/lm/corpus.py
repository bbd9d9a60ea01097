"""Reads text files as word ids: in blocks of sentences, and as one stream for n-gram counting.

Shapes: L words of a block or stream, with the `<s>` and `</s>` of each sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.text.documents import READING_ERRORS, open_text, unreadable
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID, SPECIAL_WORDS, UNK_ID, Vocabulary

BLOCK_BYTES = 1 << 23
_SENTENCE_BREAK = " </s> <s> "


def read_word_ids(
    texts: Iterable[str | Path],
    transcripts: Iterable[str | Path],
    id_of: Mapping[str, int],
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[npt.NDArray[np.int32]]:
    """The sentences of texts, one per line, then of transcripts, with lines `utterance-id WORDS` as in Kaldi's `text`.

    Blank lines are skipped; an utterance without words counts as a sentence. Files are plain, .gz or .xz.

    Args:
        texts: the files, read in this order.
        transcripts: the files after them.
        id_of: gives the id of every word; it chooses the ids of unknown words itself.
        block_bytes: how much of a file is read at a time, up to the next end of a line.

    Yields:
        a block of sentences `<s> ... </s>`, one after the other, (L,).

    Raises:
        AsrError: a file is missing, damaged or not UTF-8, or contains a sentence mark as a word.
    """
    for path in texts:
        yield from _blocks(Path(path), id_of, block_bytes, has_id=False)
    for path in transcripts:
        yield from _blocks(Path(path), id_of, block_bytes, has_id=True)


def _blocks(path: Path, id_of: Mapping[str, int], block_bytes: int, has_id: bool) -> Iterator[npt.NDArray[np.int32]]:
    first_line = 1
    with open_text(path, "text") as stream:
        while True:
            try:
                block = stream.read(block_bytes) + stream.readline()
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
    """Raises an error if ids, of `num` sentences, contain other sentence marks than one `<s>` and `</s>` for each."""
    for special, expected in ((EPSILON_ID, 0), (BOS_ID, num), (EOS_ID, num)):
        if (ids == special).sum() != expected:
            word = SPECIAL_WORDS[special]
            line = next(number for number, line in enumerate(lines, first_line) if word in line.split())
            raise AsrError(f"{path}, line {line}: the text contains the mark {word} as a word; remove it.")


class _WordNumbers(dict[str, int]):
    """The id of every word; new words are numbered after the others.

    `<UNK>` is `<unk>`, as in ARPA files: a model with both could not be read again.
    """

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__((word, word_id) for word_id, word in enumerate(words))
        if "<UNK>" in self:
            self["<UNK>"] = UNK_ID

    def __missing__(self, word: str) -> int:
        if word == "<UNK>":
            return UNK_ID
        return self.setdefault(word, len(self))


@dataclass(frozen=True)
class WordStream:
    """Sentences one after the other, each `<s> ... </s>`.

    Attributes:
        word_id: (L,) int32; ids below `num_listed` are those of the given vocabulary.
        vocabulary: the given vocabulary, followed by all other words of the text.
        num_listed: size of the given vocabulary; size of `vocabulary` if none was given.
    """

    word_id: npt.NDArray[np.int32]
    vocabulary: Vocabulary
    num_listed: int

    @property
    def num_sentences(self) -> int:
        """How many sentences the stream holds."""
        return int((self.word_id == BOS_ID).sum())

    @property
    def num_words(self) -> int:
        """How many words the stream holds, sentence marks left out."""
        return len(self.word_id) - 2 * self.num_sentences

    @property
    def num_unlisted(self) -> int:
        """How many words of the stream are outside the given vocabulary."""
        return int((self.word_id >= self.num_listed).sum())

    def with_unknown(self) -> WordStream:
        """The same stream with every word outside the given vocabulary replaced by `<unk>`."""
        listed = Vocabulary(self.vocabulary.words[len(SPECIAL_WORDS) : self.num_listed])
        word_id = np.where(self.word_id < self.num_listed, self.word_id, np.int32(UNK_ID))
        return WordStream(word_id, listed, self.num_listed)


def read_word_stream(
    paths: Iterable[str | Path],
    vocabulary: Vocabulary | None = None,
    transcripts: Iterable[str | Path] = (),
    block_bytes: int = BLOCK_BYTES,
) -> WordStream:
    """Reads texts and transcripts as `read_word_ids` does; `<UNK>` is read as `<unk>`.

    Args:
        paths: the texts.
        vocabulary: its words keep their ids, and further words are numbered after them. By default the vocabulary is
            made of all words of the text.
        transcripts: the transcripts.
        block_bytes: as for `read_word_ids`.

    Raises:
        AsrError: a file cannot be read, or there is no sentence.
    """
    paths, transcripts = list(paths), list(transcripts)
    id_of = _WordNumbers(vocabulary.words if vocabulary is not None else SPECIAL_WORDS)
    num_listed = len(id_of)
    parts = list(read_word_ids(paths, transcripts, id_of, block_bytes))
    if not parts:
        names = ", ".join(map(str, [*paths, *transcripts]))
        raise AsrError(f"{names}: the text contains no sentence; give files with one sentence per line.")
    words = list(id_of)
    everything = Vocabulary(words[len(SPECIAL_WORDS) :], name="the text")
    return WordStream(np.concatenate(parts), everything, num_listed if vocabulary is not None else len(words))
