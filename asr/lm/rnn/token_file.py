"""Text as word ids in one memory-mapped file: `w1 .. wn </s>` for each sentence, one after the other."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from asr.errors import AsrError
from asr.text.vocabulary import EOS_ID, Vocabulary
from asr.whole_file import written_whole

_WORDS_PER_WRITE = 1 << 20


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
        """Writes `path` from plain texts (one sentence a line) and Kaldi transcripts (`utt-id WORDS`); blank lines
        are left out.

        A file that was made from the same texts and the same vocabulary is opened, not made again.

        Raises:
            AsrError: a text is missing, unreadable or not UTF-8, or there is no word in all of them.
        """
        key = _fingerprint(texts, transcripts, vocabulary)
        counts_path = path.with_suffix(".json")
        if path.exists() and counts_path.exists():
            found = json.loads(counts_path.read_text(encoding="utf-8"))
            if found.pop("fingerprint") == key:
                return cls(np.memmap(path, dtype=np.int32, mode="r"), TokenCounts(**found))
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as out:
            counts = _write_tokens(_sentences(texts, transcripts), vocabulary, out)
            if counts.num_words == 0:
                names = ", ".join(str(text) for text in (*texts, *transcripts)) or "no file given"
                raise AsrError(f"The language model text is empty ({names}); it needs one sentence a line.")
        counts_path.write_text(json.dumps({**asdict(counts), "fingerprint": key}), encoding="utf-8")
        return cls(np.memmap(path, dtype=np.int32, mode="r"), counts)

    def unigram_counts(self, vocabulary_size: int) -> NDArray[np.int64]:
        """How often each id is predicted, `</s>` included, (V,)."""
        counts = np.zeros(vocabulary_size, dtype=np.int64)
        for begin in range(0, len(self.token_id), _WORDS_PER_WRITE):
            counts += np.bincount(self.token_id[begin : begin + _WORDS_PER_WRITE], minlength=vocabulary_size)
        return counts


def read_sentences(path: Path, *, is_transcript: bool = False) -> Iterator[list[str]]:
    """The words of each line of a plain, .gz or .xz text that has any; `is_transcript` drops the utterance id.

    Raises:
        AsrError: the file is missing, unreadable or not UTF-8.
    """
    openers: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}
    opener: Callable[..., IO[str]] = openers.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                words = line.split()[1:] if is_transcript else line.split()
                if words:
                    yield words
    except UnicodeDecodeError as error:
        raise AsrError(f"{path}: the text is not UTF-8 ({error.reason}); convert it first.") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise AsrError(f"{path}: the text cannot be read ({error}); give a plain, .gz or .xz text file.") from error


def _sentences(texts: Sequence[Path], transcripts: Sequence[Path]) -> Iterator[list[str]]:
    for text in texts:
        yield from read_sentences(text)
    for transcript in transcripts:
        yield from read_sentences(transcript, is_transcript=True)


def _write_tokens(sentences: Iterable[list[str]], vocabulary: Vocabulary, out: IO[bytes]) -> TokenCounts:
    id_of = {word: word_id for word_id, word in enumerate(vocabulary.words)}
    unk_id = id_of["<unk>"]
    num_sentences = num_words = num_unknown = 0
    pending: list[int] = []
    for words in sentences:
        ids = [id_of.get(word, unk_id) for word in words]
        num_sentences += 1
        num_words += len(ids)
        num_unknown += ids.count(unk_id)
        pending.extend(ids)
        pending.append(EOS_ID)
        if len(pending) >= _WORDS_PER_WRITE:
            np.asarray(pending, dtype=np.int32).tofile(out)
            pending.clear()
    np.asarray(pending, dtype=np.int32).tofile(out)
    return TokenCounts(num_sentences, num_words, num_unknown)


def _fingerprint(texts: Sequence[Path], transcripts: Sequence[Path], vocabulary: Vocabulary) -> str:
    digest = sha256("\n".join(vocabulary.words).encode())
    for kind, paths in (("text", texts), ("transcript", transcripts)):
        for path in paths:
            size = path.stat().st_size if path.exists() else -1
            digest.update(f"\n{kind} {path.resolve()} {size}".encode())
    return digest.hexdigest()
