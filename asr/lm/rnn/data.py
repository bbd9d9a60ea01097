"""Text as word ids: memory-mapped token files, and how training and scoring walk through them in batches.

`TokenFile` holds `w1 .. wn </s>` for each sentence. Training reads it in parallel streams (`TokenStreams`), each of
which continues in the next batch where it stopped. Scoring packs whole sentences side by side (`pack_sentences`).

Shapes: L words of the text, B streams, T steps, M history words.
"""

from __future__ import annotations

import functools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from asr.distributed import WHOLE, Share
from asr.errors import AsrError
from asr.lm.corpus import read_word_ids
from asr.serialization import open_atomic, write_whole_text
from asr.text.documents import parse_json
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID, UNK_ID, Vocabulary

_WORDS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class TokenCounts:
    """Counts of a token file's text; `num_unknown` is the number of words that became `<unk>`."""

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

        An existing file is used again if it was made from the same texts, unchanged since, and the same vocabulary, and
        the file with its counts beside it is whole and of this file. Trainings that use one path for different texts at
        the same time get their own tokens.

        Raises:
            AsrError: a text cannot be read, or none of them contains a word of the vocabulary.
        """
        key = _fingerprint(texts, transcripts, vocabulary)
        counts_path = path.with_suffix(".json")
        if path.exists() and counts_path.exists():
            with path.open("rb") as file:
                if (kept := _kept_counts(counts_path, key, _stamp(file))) is not None:
                    return cls(np.memmap(file, dtype=np.int32, mode="r"), kept)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as out:
            counts = _write_tokens(texts, transcripts, vocabulary, out)
            names = ", ".join(str(text) for text in (*texts, *transcripts)) or "no file given"
            if counts.num_words == 0:
                raise AsrError(f"The language model text is empty ({names}); it needs one sentence per line.")
            if counts.num_unknown == counts.num_words:
                raise AsrError(
                    f"The language model text ({names}) has no word of the vocabulary; check that both have the same "
                    "case."
                )
            out.flush()
            # Opened before it gets its name, under which another process may put the tokens of another text.
            tokens = np.memmap(out.name, dtype=np.int32, mode="r")
            stamp = _stamp(out)
            # The old counts must not stay beside new tokens if the process ends here.
            counts_path.unlink(missing_ok=True)
        write_whole_text(counts_path, json.dumps({**asdict(counts), "fingerprint": key, "stamp": stamp}))
        return cls(tokens, counts)

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of the word ids; of a large text it takes seconds."""
        return sha256(np.ascontiguousarray(self.token_id).data).hexdigest()

    def unigram_counts(self, vocabulary_size: int, *, words_at_once: int = _WORDS_AT_ONCE) -> NDArray[np.int64]:
        """How often each id is predicted, `</s>` included, (V,); counts are added up for `words_at_once` words each."""
        counts = np.zeros(vocabulary_size, dtype=np.int64)
        for begin in range(0, len(self.token_id), words_at_once):
            counts += np.bincount(self.token_id[begin : begin + words_at_once], minlength=vocabulary_size)
        return counts


def _kept_counts(path: Path, fingerprint: str, stamp: list[int]) -> TokenCounts | None:
    """The counts in a file; None if they are of other tokens, or the file is damaged."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        is_same = found.pop("fingerprint") == fingerprint and found.pop("stamp") == stamp
        return TokenCounts(**found) if is_same else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _stamp(file: BinaryIO) -> list[int]:
    """Size and time of an open file, which tell it from others that had its name."""
    status = os.fstat(file.fileno())
    return [status.st_size, status.st_mtime_ns]


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


class TokenBatch(NamedTuple):
    """T words of B streams.

    Attributes:
        input_id: the word before each target, `<s>` at the start of a sentence, (B, T) int64.
        target_id: the word to predict, (B, T) int64.
        history: the last M words before each target, newest first, (B, T, M) int64.
        is_start: a sentence starts here, (B, T) bool.
        is_first: these are the streams' first words, so that no state is carried over.
        first_stream: where these streams begin in the whole batch, if several processes train.
        num_all_streams: streams of the whole batch; 0 for B.
    """

    input_id: Tensor
    target_id: Tensor
    history: Tensor
    is_start: Tensor
    is_first: bool
    first_stream: int = 0
    num_all_streams: int = 0

    @property
    def num_all_words(self) -> int:
        """Words of the whole batch."""
        num_streams, num_steps = self.target_id.shape
        return (self.num_all_streams or num_streams) * num_steps


class TokenStreams(Dataset[TokenBatch]):
    """Item i is the i-th window of `num_steps` words in each of `num_streams` equal, contiguous parts of the text.

    The last window may be shorter; only words that do not divide evenly among the streams are left out (fewer than
    num_streams). A text too short for the streams gets fewer streams. If several processes train, each always reads the
    same streams of its own.

    Raises:
        AsrError: there are fewer streams than processes.
    """

    def __init__(
        self,
        token_id: NDArray[np.int32],
        num_streams: int,
        num_steps: int,
        num_history_words: int,
        share: Share = WHOLE,
    ) -> None:
        self.token_id = token_id
        self.num_steps = min(num_steps, len(token_id))
        self.num_streams = max(1, min(num_streams, len(token_id) // self.num_steps))
        self.num_history_words = num_history_words
        self.stream_length = len(token_id) // self.num_streams
        if self.num_streams < share.num:
            raise AsrError(
                f"the text of {len(token_id)} words makes {self.num_streams} streams for {share.num} processes; raise "
                "num_streams, lower num_steps or use fewer devices."
            )
        self.own_streams = share.block(self.num_streams)

    def __len__(self) -> int:
        return (self.stream_length + self.num_steps - 1) // self.num_steps

    def __getitem__(self, batch_idx: int) -> TokenBatch:
        if not 0 <= batch_idx < len(self):
            raise IndexError(batch_idx)
        num_before = max(1, self.num_history_words)
        stream_begin = np.arange(self.num_streams)[self.own_streams, None] * self.stream_length
        begin = batch_idx * self.num_steps
        position = np.arange(begin - num_before, min(begin + self.num_steps, self.stream_length))[None, :]
        # Before a stream's first word a sentence is taken to end.
        window = np.where(position < 0, EOS_ID, self.token_id[stream_begin + np.maximum(position, 0)])
        tokens = torch.from_numpy(window.astype(np.int64))
        history = history_of(tokens, num_before, self.num_history_words)
        previous_id = tokens[:, num_before - 1 : -1]
        is_start = previous_id == EOS_ID
        input_id = torch.where(is_start, BOS_ID, previous_id)
        place = self.own_streams.start, self.num_streams
        return TokenBatch(input_id, tokens[:, num_before:], history, is_start, batch_idx == 0, *place)


def history_of(token_id: Tensor, num_before: int, num_history_words: int) -> Tensor:
    """The histories of all but the first `num_before` columns of token_id (B, num_before + T), in the same sentence.

    Returns:
        (B, T, M), newest first: `<s>` where the sentence started, `<eps>` before it.
    """
    num_steps = token_id.shape[1] - num_before
    history = token_id.new_full((token_id.shape[0], num_steps, num_history_words), EPSILON_ID)
    in_sentence = torch.ones_like(history[..., :1]).squeeze(-1).bool()
    for age in range(num_history_words):
        column = token_id[:, num_before - 1 - age : num_before - 1 - age + num_steps]
        is_end = column == EOS_ID
        history[..., age] = torch.where(in_sentence, torch.where(is_end, BOS_ID, column), EPSILON_ID)
        in_sentence = in_sentence & ~is_end
    return history


@dataclass(frozen=True)
class PackedSentences:
    """Sentences sorted from long to short, stored step by step: step t has word t of the first sizes[t] sentences.

    Attributes:
        sizes: the number of sentences that have a word at each step; it never increases.
        place: the position of each word in the text, (L,) int64.
        input_id: the word before it, `<s>` at a sentence's start, (L,).
        history: the last M words before it, newest first, `<eps>` before `<s>`, (L, M).
        word_id: the word, (L,).
    """

    sizes: list[int]
    place: Tensor
    input_id: Tensor
    history: Tensor
    word_id: Tensor

    def chunks(self, num_words: int) -> Iterator[tuple[list[int], slice]]:
        """Splits the steps into runs of about `num_words` words: the sizes of each run's steps, and its words in L."""
        begin = end = first = 0
        for step, size in enumerate(self.sizes):
            end += size
            if end - begin >= num_words or step == len(self.sizes) - 1:
                yield self.sizes[first : step + 1], slice(begin, end)
                begin, first = end, step + 1


def pack_sentences(
    token_id: NDArray[np.int32], num_history_words: int, sentences_at_once: int, words_at_once: int | None = None
) -> Iterator[PackedSentences]:
    """Groups the sentences of a text `w1 .. wn </s> ...` by length; the last one may be without its `</s>`.

    A group has `sentences_at_once` sentences; it ends earlier with the sentence that reaches `words_at_once` words.
    """
    sentence_end = np.flatnonzero(token_id == EOS_ID) + 1
    if len(token_id) and token_id[-1] != EOS_ID:
        sentence_end = np.append(sentence_end, len(token_id))
    begin = np.concatenate(([0], sentence_end[:-1]))
    length = sentence_end - begin
    order = np.argsort(-length, kind="stable")
    words_before = np.concatenate(([0], np.cumsum(length[order])))
    end = 0
    while end < len(order):
        first = end
        end = min(first + sentences_at_once, len(order))
        if words_at_once is not None:
            end = min(end, int(np.searchsorted(words_before, words_before[first] + words_at_once)))
        chosen = order[first:end]
        # The number of sentences at step t is the number of lengths, sorted from long to short, that exceed t.
        sizes = np.searchsorted(-length[chosen], -np.arange(length[chosen[0]]), side="left")
        offset = np.concatenate(([0], np.cumsum(sizes)))
        step = np.repeat(np.arange(len(sizes)), sizes)
        place = begin[chosen[np.arange(offset[-1]) - offset[step]]] + step
        ages = []
        for age in range(max(1, num_history_words)):
            word = np.where(step > age, token_id[np.maximum(place - 1 - age, 0)], EPSILON_ID)
            word[step == age] = BOS_ID
            ages.append(word)
        past = torch.from_numpy(np.stack(ages, axis=1).astype(np.int64))
        word_id = torch.from_numpy(token_id[place].astype(np.int64))
        yield PackedSentences(sizes.tolist(), torch.from_numpy(place), past[:, 0], past[:, :num_history_words], word_id)
