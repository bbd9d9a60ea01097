"""Text as word ids in one memory-mapped file: `w1 .. wn </s>` for each sentence, one after the other."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from asr.errors import AsrError
from asr.lm.word_ids import read_word_ids
from asr.text.vocabulary import BOS_ID, EOS_ID, UNK_ID, Vocabulary
from asr.whole_file import written_whole

_WORDS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class TokenCounts:
    """What went into a token file; `num_unknown` counts the words that became `<unk>`."""

    num_sentences: int
    num_words: int
    num_unknown: int


@dataclass(frozen=True)
class TokenFile:
    """Word ids of a text and their counts; `token_id` (L,) int32 ends each sentence with `</s>`."""

    token_id: NDArray[np.int32]
    counts: TokenCounts

    @classmethod
    def build(cls, texts: Sequence[Path], transcripts: Sequence[Path], vocabulary: Vocabulary, path: Path) -> TokenFile:
        """Writes `path` from texts and transcripts, read as `read_word_ids` does.

        A file that was made from the same texts, unchanged since, and the same vocabulary is opened, not made again.

        Raises:
            AsrError: a text cannot be read, or there is no word in all of them.
        """
        key = _fingerprint(texts, transcripts, vocabulary)
        counts_path = path.with_suffix(".json")
        if path.exists() and counts_path.exists():
            found = json.loads(counts_path.read_text(encoding="utf-8"))
            if found.pop("fingerprint") == key:
                return cls(np.memmap(path, dtype=np.int32, mode="r"), TokenCounts(**found))
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as out:
            counts = _write_tokens(texts, transcripts, vocabulary, out)
            if counts.num_words == 0:
                names = ", ".join(str(text) for text in (*texts, *transcripts)) or "no file given"
                raise AsrError(f"The language model text is empty ({names}); it needs one sentence a line.")
        counts_path.write_text(json.dumps({**asdict(counts), "fingerprint": key}), encoding="utf-8")
        return cls(np.memmap(path, dtype=np.int32, mode="r"), counts)

    def unigram_counts(self, vocabulary_size: int) -> NDArray[np.int64]:
        """How often each id is predicted, `</s>` included, (V,)."""
        counts = np.zeros(vocabulary_size, dtype=np.int64)
        for begin in range(0, len(self.token_id), _WORDS_AT_ONCE):
            counts += np.bincount(self.token_id[begin : begin + _WORDS_AT_ONCE], minlength=vocabulary_size)
        return counts


def _write_tokens(
    texts: Sequence[Path], transcripts: Sequence[Path], vocabulary: Vocabulary, out: IO[bytes]
) -> TokenCounts:
    id_of = defaultdict(lambda: UNK_ID, {word: word_id for word_id, word in enumerate(vocabulary.words)})
    num_tokens = num_sentences = num_unknown = 0
    for ids in read_word_ids(texts, transcripts, id_of):
        tokens = ids[ids != BOS_ID]
        tokens.tofile(out)
        num_tokens += len(tokens)
        num_sentences += int((tokens == EOS_ID).sum())
        num_unknown += int((tokens == UNK_ID).sum())
    return TokenCounts(num_sentences, num_tokens - num_sentences, num_unknown)


def _fingerprint(texts: Sequence[Path], transcripts: Sequence[Path], vocabulary: Vocabulary) -> str:
    digest = sha256("\n".join(vocabulary.words).encode())
    for kind, paths in (("text", texts), ("transcript", transcripts)):
        for path in paths:
            status = path.stat() if path.exists() else None
            state = (status.st_size, status.st_mtime_ns) if status is not None else "missing"
            digest.update(f"\n{kind} {path.resolve()} {state}".encode())
    return digest.hexdigest()
