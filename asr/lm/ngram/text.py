"""Text files to one stream of word ids, as n-gram counting wants them.

Shapes: L words of the stream, `<s>` and `</s>` of each sentence among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.text.text_file import READING_ERRORS, open_text, unreadable
from asr.text.vocabulary import BOS_ID, EOS_ID, EPSILON_ID, SPECIAL_WORDS, Vocabulary

_BLOCK_BYTES = 1 << 24
_SENTENCE_BREAK = b" </s> <s> "


@dataclass(frozen=True)
class WordStream:
    """Sentences one after the other, each `<s> ... </s>`.

    Attributes:
        word_id: (L,) int32; ids below `num_listed` are those of the vocabulary asked for.
        vocabulary: every word met, the vocabulary asked for at its beginning.
        num_listed: how many ids the vocabulary asked for has; all of them where none was.
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
        """How many words of the stream are outside the vocabulary asked for."""
        return int((self.word_id >= self.num_listed).sum())

    def with_unknown(self) -> WordStream:
        """The same stream with every word outside the vocabulary asked for as `<unk>`."""
        listed = Vocabulary(self.vocabulary.words[len(SPECIAL_WORDS) : self.num_listed])
        unknown = np.int32(listed.id_of("<unk>"))
        return WordStream(np.where(self.word_id < self.num_listed, self.word_id, unknown), listed, self.num_listed)


def read_word_stream(
    paths: Iterable[str | Path], vocabulary: Vocabulary | None = None, transcripts: Iterable[str | Path] = ()
) -> WordStream:
    """Reads one sentence a line from plain, .gz or .xz files; blank lines are no sentences.

    Args:
        paths: the files, read in this order.
        vocabulary: gives its words their ids; further words are numbered after it. By default every word counts.
        transcripts: further files, their lines being `utterance-id WORDS` as in Kaldi's `text`.

    Raises:
        AsrError: a file is missing, damaged or not UTF-8, or holds a sentence mark as a word, or there is no sentence.
    """
    id_of: defaultdict[bytes, int] = defaultdict()
    id_of.default_factory = id_of.__len__
    for word in vocabulary.words if vocabulary is not None else SPECIAL_WORDS:
        id_of[word.encode()]
    num_listed = len(id_of)
    files = [(path, False) for path in paths] + [(path, True) for path in transcripts]
    parts = [part for path, has_id in files for part in _read_file(Path(path), id_of, has_id)]
    if not parts:
        raise AsrError("The text holds no sentence; give files with one sentence a line.")
    words = [word.decode() for word in id_of]
    everything = Vocabulary(words[len(SPECIAL_WORDS) :], name="the text")
    return WordStream(np.concatenate(parts), everything, num_listed if vocabulary is not None else len(words))


def _read_file(path: Path, id_of: defaultdict[bytes, int], has_id: bool) -> Iterator[npt.NDArray[np.int32]]:
    num_before = 0
    with open_text(path, "text") as stream:
        while True:
            try:
                lines = stream.readlines(_BLOCK_BYTES)
            except READING_ERRORS as error:
                raise unreadable(path, "text", error) from error
            if not lines:
                return
            sentences = [line for line in lines if not line.isspace()]
            num_before += len(lines)
            if not sentences:
                continue
            if has_id:
                sentences = [b" ".join(line.split(None, 1)[1:]) for line in sentences]
            text = _SENTENCE_BREAK.join([b"", *sentences, b""])
            try:
                text.decode("utf-8")
            except UnicodeDecodeError:
                first = num_before - len(lines) + 1
                raise AsrError(f"{path}: the text is not UTF-8 near line {first}; convert it first.") from None
            words = text.split()[1:-1]
            ids = np.fromiter(map(id_of.__getitem__, words), np.int32, len(words))
            for special in (EPSILON_ID, BOS_ID, EOS_ID):
                if (ids == special).sum() != (0 if special == EPSILON_ID else len(sentences)):
                    word = SPECIAL_WORDS[special]
                    first = num_before - len(lines) + 1
                    line = next(i for i, text in enumerate(lines, first) if word.encode() in text.split())
                    raise AsrError(f"{path}, line {line}: the text holds the mark {word} as a word; take it out.")
            yield ids
