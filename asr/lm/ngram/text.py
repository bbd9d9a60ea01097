"""Text files to one stream of word ids, as n-gram counting wants them.

Shapes: L words of the stream, `<s>` and `</s>` of each sentence among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.lm.word_ids import read_word_ids
from asr.text.vocabulary import BOS_ID, SPECIAL_WORDS, UNK_ID, Vocabulary


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
        word_id = np.where(self.word_id < self.num_listed, self.word_id, np.int32(UNK_ID))
        return WordStream(word_id, listed, self.num_listed)


def read_word_stream(
    paths: Iterable[str | Path], vocabulary: Vocabulary | None = None, transcripts: Iterable[str | Path] = ()
) -> WordStream:
    """Reads texts and transcripts as `read_word_ids` does.

    Args:
        paths: the texts.
        vocabulary: gives its words their ids; further words are numbered after it. By default every word counts.
        transcripts: the transcripts.

    Raises:
        AsrError: a file cannot be read, or there is no sentence.
    """
    id_of: defaultdict[str, int] = defaultdict()
    id_of.default_factory = id_of.__len__
    for word in vocabulary.words if vocabulary is not None else SPECIAL_WORDS:
        id_of[word]
    num_listed = len(id_of)
    parts = list(read_word_ids(paths, transcripts, id_of))
    if not parts:
        raise AsrError("The text holds no sentence; give files with one sentence a line.")
    words = list(id_of)
    everything = Vocabulary(words[len(SPECIAL_WORDS) :], name="the text")
    return WordStream(np.concatenate(parts), everything, num_listed if vocabulary is not None else len(words))
