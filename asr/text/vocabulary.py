"""The word list that graphs and language models share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from asr.errors import AsrError
from asr.text.text_file import read_text

EPSILON_ID = 0
BOS_ID = 1
EOS_ID = 2
UNK_ID = 3
SPECIAL_WORDS = ("<eps>", "<s>", "</s>", "<unk>")


class Vocabulary:
    """Words and their ids: 0 `<eps>`, 1 `<s>`, 2 `</s>`, 3 `<unk>`, then the words in the order given.

    Args:
        words: the ordinary words, without the four special ones.
        name: where the list came from; named in error messages.

    Raises:
        AsrError: a word stands twice, is empty, contains white space or is one of the special ones.
    """

    def __init__(self, words: Iterable[str], name: str = "vocabulary") -> None:
        self.words: tuple[str, ...] = (*SPECIAL_WORDS, *words)
        self._id_of: dict[str, int] = {}
        for word_id, word in enumerate(self.words):
            if not word or word.split() != [word]:
                raise AsrError(
                    f"{name}: entry {word_id} is {word!r}; a word is not empty and has no white space in it."
                )
            if word in self._id_of:
                raise AsrError(f"{name}: the word {word!r} stands twice; remove one of the two entries.")
            self._id_of[word] = word_id

    @classmethod
    def from_file(cls, path: str | Path) -> Vocabulary:
        """Reads one word a line, or Kaldi's `word id` (ids are given anew; special words are skipped).

        Raises:
            AsrError: the file is missing, empty, not UTF-8, or holds a word twice.
        """
        words = [line.split()[0] for line in read_text(path, "word list").splitlines() if line.strip()]
        words = [word for word in words if word not in SPECIAL_WORDS]
        if not words:
            raise AsrError(f"{path}: the word list is empty; it needs one word a line.")
        return cls(words, name=str(path))

    def save(self, path: str | Path) -> None:
        """Writes the ordinary words, one a line."""
        Path(path).write_text("".join(f"{word}\n" for word in self.words[len(SPECIAL_WORDS) :]), encoding="utf-8")

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._id_of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self.words)

    def id_of(self, word: str) -> int:
        """The word's id, or `UNK_ID` where the word is not listed."""
        return self._id_of.get(word, UNK_ID)

    def ids_of(self, words: Sequence[str]) -> Tensor:
        """The ids of several words, (len(words),) int64."""
        return torch.tensor([self.id_of(word) for word in words], dtype=torch.int64)

    def map_to(self, other: Vocabulary) -> Tensor:
        """For each of our ids the id of the same word in `other`, `UNK_ID` where it has none; (V,) int64."""
        return other.ids_of(self.words)
