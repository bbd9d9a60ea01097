"""A simulation of speech: any text as frame log-probabilities, put together from segments of real speech.

An acoustic model's frames on real speech are cut into phones by forced alignment. Each phone of a sentence takes the
frames of some occurrence of that phone, drawn at random among those with the most similar context. One number for all
frames (`clarity`) then makes the right tokens more or less probable, until the word error rate is that of the
recognizer one wants to stand for. Confusions between phones, their durations and the blanks between them are those of
real speech. That neighbouring phones come from different speakers, and that pauses occur only where the segments have
them, is not. Call it a simulation wherever it is quoted.

Shapes: M segments, F frames of all segments together, T frames of an utterance, C tokens, L phones.
"""

from __future__ import annotations

import io
import lzma
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from asr.errors import AsrError
from asr.models.alignment import align_ctc
from asr.text.lexicon import Lexicon
from asr.text.symbols import BLANK_ID, TokenTable

Words = tuple[str, ...]


_T = TypeVar("_T")


@dataclass(frozen=True)
class SimulationFolder:
    """What `scripts/bench simulate prepare` makes of a corpus.

    Args:
        path: the folder.
    """

    path: Path

    @property
    def segments(self) -> Path:
        """The pool of segments of real speech (`SegmentPool`)."""
        return self.path / "segments.npz.xz"

    @property
    def sentences(self) -> Path:
        """`id words` a line."""
        return self.path / "sentences.txt"

    @property
    def lexicon(self) -> Path:
        """The pronunciations of the sentences' words."""
        return self.path / "lexicon.txt"

    @property
    def is_complete(self) -> bool:
        return all(file.is_file() for file in (self.segments, self.sentences, self.lexicon))

    def require(self) -> SimulationFolder:
        """Itself.

        Raises:
            AsrError: a file is missing.
        """
        if not self.is_complete:
            raise AsrError(
                f"{self.path} lacks segments, sentences or lexicon: make it with `scripts/bench simulate prepare`, or "
                "leave the option out, and benchmarks make one for themselves."
            )
        return self


def speaker_of(utt_id: str) -> str:
    """In LibriSpeech's ids (`1272-128104-0000`), what stands before the first hyphen."""
    return utt_id.partition("-")[0]


def sayable(lexicon: Lexicon, tokens: TokenTable, token_ids: Container[int]) -> Lexicon:
    """The words whose first pronunciation has phones of `token_ids` only."""
    ids = {phone: tokens.id_of(phone) in token_ids for phone in lexicon.phones if phone in tokens}
    words = [word for word, variants in lexicon.pronunciations.items() if all(ids.get(one) for one in variants[0])]
    return lexicon.restricted_to(words)[0]


def choose_sentences(
    texts: Sequence[Mapping[str, Words]],
    num: int,
    words: Container[str],
    left_out: Container[str],
    lengths: tuple[int, int] = (5, 25),
) -> dict[str, Words]:
    """So many sentences, in equal parts from the texts, spread evenly over each.

    Args:
        texts: of each, words by utterance id.
        num: how many; fewer come back where a text has less than its part.
        words: sentences with any other word are not chosen.
        left_out: speakers whose sentences are not chosen.
        lengths: the fewest and most words of a sentence.
    """
    chosen: dict[str, Words] = {}
    for place, text in enumerate(texts):
        fit = [
            utt_id
            for utt_id, sentence in text.items()
            if lengths[0] <= len(sentence) <= lengths[1]
            and speaker_of(utt_id) not in left_out
            and all(word in words for word in sentence)
        ]
        part = num * (place + 1) // len(texts) - num * place // len(texts)
        chosen.update((utt_id, text[utt_id]) for utt_id in evenly(fit, part))
    return chosen


def evenly(items: list[_T], num: int) -> list[_T]:
    """So many of them, spread over the whole list."""
    return [items[i * len(items) // num] for i in range(num)] if num < len(items) else items


# In a file, a log-probability is a multiple of -1/4, of which -12 is the least.
_STEPS_A_NAT = 4


_MOST_STEPS = 12 * _STEPS_A_NAT


@dataclass(frozen=True, eq=False)
class SegmentPool:
    """Segments of aligned speech. A segment begins with the first frame of its phone and ends before the next phone;
    the blanks before the first phone of an utterance are a segment of the blank.

    Args:
        tokens: the acoustic model's.
        log_prob: (F, C) float32.
        aligned: (F,) int64, the token that each frame reads: its segment's or the blank.
        begin: (M + 1,) int64, segment m has frames begin[m] : begin[m + 1].
        token_id: (M,) int64, the phone, or the blank at an utterance's beginning.
        left, right: (M,) int64, the phones beside it, the blank where there is none.
        ends_word: (M,) bool, whether a word ends with it.
    """

    tokens: TokenTable
    log_prob: NDArray[np.float32]
    aligned: NDArray[np.int64]
    begin: NDArray[np.int64]
    token_id: NDArray[np.int64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    ends_word: NDArray[np.bool_]

    @property
    def num_segments(self) -> int:
        return len(self.token_id)

    @classmethod
    def from_utterances(
        cls, tokens: TokenTable, utterances: Sequence[tuple[NDArray[np.float32], Sequence[Sequence[str]]]]
    ) -> SegmentPool:
        """Aligns utterances and cuts them up.

        Args:
            tokens: the acoustic model's.
            utterances: log_prob (T, C) and the pronunciation of each word; an utterance with fewer frames than its
                phones need is left out.

        Raises:
            AsrError: no utterance could be aligned.
        """
        frames, aligned, length, parts = [], [], [], []
        for log_prob, words in utterances:
            phones = np.array([token for word in words for token in tokens.ids_of(word)], dtype=np.int64)
            position, found = align_ctc(
                torch.from_numpy(log_prob)[None],
                torch.tensor([len(log_prob)]),
                torch.from_numpy(phones)[None],
                torch.tensor([len(phones)]),
            )
            if not found or not len(phones):
                continue
            path = position[0].numpy()
            first = np.array([np.flatnonzero(path == position)[0] for position in range(len(phones))])
            bounds = np.concatenate(([0], first, [len(path)]))
            context = np.concatenate(([BLANK_ID, BLANK_ID], phones, [BLANK_ID]))
            ends = np.zeros(len(phones) + 1, dtype=bool)
            ends[np.cumsum([len(word) for word in words])] = True
            chosen = np.flatnonzero(np.diff(bounds) > 0)
            length.append(np.diff(bounds)[chosen])
            parts.append(np.stack([context[1:-1], context[:-2], context[2:], ends])[:, chosen])
            frames.append(log_prob)
            aligned.append(np.where(path < 0, BLANK_ID, phones[path]))
        if not frames:
            raise AsrError(
                "no utterance could be aligned with its transcript; check that text and audio belong together."
            )
        token_id, left, right, ends_word = np.concatenate(parts, axis=1)
        begin = np.concatenate(([0], np.cumsum(np.concatenate(length))))
        return cls(
            tokens,
            np.concatenate(frames),
            np.concatenate(aligned),
            begin,
            token_id,
            left,
            right,
            ends_word.astype(bool),
        )

    def save(self, path: str | Path) -> None:
        """Writes an xz-compressed npz; log-probabilities in steps of 1/4, from -12 on."""
        steps = np.clip(np.rint(-self.log_prob * _STEPS_A_NAT), 0, _MOST_STEPS).astype(np.uint8)
        content = io.BytesIO()
        np.savez(
            content,
            tokens=np.array(self.tokens.tokens[1:]),
            # Columns lie together, so that neighbours are alike.
            steps=np.ascontiguousarray(steps.T),
            aligned=self.aligned.astype(np.uint8 if len(self.tokens) <= 256 else np.int32),
            begin=self.begin.astype(np.int32),
            context=np.stack([self.token_id, self.left, self.right, self.ends_word]).astype(np.int16),
        )
        Path(path).write_bytes(lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME))

    @classmethod
    def load(cls, path: str | Path) -> SegmentPool:
        """Reads what `save` wrote.

        Raises:
            AsrError: the file is missing, damaged, or no pool.
        """
        try:
            with np.load(io.BytesIO(lzma.decompress(Path(path).read_bytes()))) as archive:
                token_id, left, right, ends_word = archive["context"].astype(np.int64)
                return cls(
                    TokenTable(archive["tokens"].tolist(), name=str(path)),
                    np.ascontiguousarray(archive["steps"].T).astype(np.float32) * np.float32(-1.0 / _STEPS_A_NAT),
                    archive["aligned"].astype(np.int64),
                    archive["begin"].astype(np.int64),
                    token_id,
                    left,
                    right,
                    ends_word.astype(bool),
                )
        except OSError as error:
            raise AsrError(f"{path}: the pool of segments cannot be read ({error.strerror or error}).") from error
        except (lzma.LZMAError, ValueError, KeyError) as error:
            raise AsrError(
                f"{path}: this is no pool of segments ({error}); make it with `scripts/bench simulate pool`."
            ) from error


# So many segments at least must fit a context, else a wider one is taken.
_FEWEST_CHOICES = 3


class FrameSimulator:
    """Draws frames for sentences.

    Args:
        pool: the segments.
        clarity: nats by which the log-probability of each frame's right token is raised before it is normalised again;
            negative to make the speech less clear.
        seed: the same one gives the same frames for the same sentences in the same order.
    """

    def __init__(self, pool: SegmentPool, clarity: float = 0.0, seed: int = 0) -> None:
        if not math.isfinite(clarity):
            raise AsrError(f"simulated frames: the clarity is {clarity}; give a finite number of nats.")
        self.pool = pool
        self.clarity = clarity
        self._generator = np.random.default_rng(seed)
        self._segments: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(5)]
        for segment in range(pool.num_segments):
            for level, key in enumerate(self._contexts(segment)):
                self._segments[level].setdefault(key, []).append(segment)

    def frames(self, pronunciations: Sequence[Sequence[str]]) -> NDArray[np.float32]:
        """The pronunciation of each word of a sentence -> log_prob (T, C).

        Raises:
            AsrError: the pool has no segment of some phone.
        """
        phones = [token for word in pronunciations for token in self.pool.tokens.ids_of(word)]
        ends = {int(end) for end in np.cumsum([len(word) for word in pronunciations])}
        context = [BLANK_ID, BLANK_ID, *phones, BLANK_ID]
        pieces = []
        for position in range(len(phones) + 1):
            chosen = self._draw(context[position + 1], context[position], context[position + 2], position in ends)
            if chosen is not None:
                pieces.append(np.arange(self.pool.begin[chosen], self.pool.begin[chosen + 1]))
        frame = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
        log_prob = self.pool.log_prob[frame].astype(np.float64)
        log_prob[np.arange(len(frame)), self.pool.aligned[frame]] += self.clarity
        normalizer = np.log(np.exp(log_prob).sum(1, keepdims=True))
        return (log_prob - normalizer).astype(np.float32)

    def _contexts(self, segment: int) -> list[tuple[int, ...]]:
        pool = self.pool
        return _widening(
            int(pool.token_id[segment]),
            int(pool.left[segment]),
            int(pool.right[segment]),
            bool(pool.ends_word[segment]),
        )

    def _draw(self, token: int, left: int, right: int, ends_word: bool) -> int | None:
        found: list[int] = []
        for level, key in enumerate(_widening(token, left, right, ends_word)):
            found = self._segments[level].get(key, [])
            if len(found) >= _FEWEST_CHOICES:
                break
        if found:
            return found[int(self._generator.integers(len(found)))]
        if token == BLANK_ID:
            return None  # speech that begins at once
        raise AsrError(
            f"simulated frames: the pool has no segment of the phone {self.pool.tokens.tokens[token]}; make it from "
            "more speech."
        )


def simulate(
    simulator: FrameSimulator, sentences: Sequence[Sequence[str]], lexicon: Lexicon
) -> list[NDArray[np.float32]]:
    """Frames (T, C) for each sentence, every word in its first pronunciation.

    Raises:
        AsrError: the lexicon lacks a word, or the pool a phone.
    """
    frames = []
    for words in sentences:
        unknown = [word for word in words if word not in lexicon]
        if unknown:
            raise AsrError(f"{lexicon.name}: lacks the word {unknown[0]!r} of a sentence to simulate; add it.")
        frames.append(simulator.frames([lexicon[word][0] for word in words]))
    return frames


def _widening(token: int, left: int, right: int, ends_word: bool) -> list[tuple[int, ...]]:
    """Descriptions of a segment, the closest first."""
    return [
        (token, left, right, int(ends_word)),
        (token, right, int(ends_word)),
        (token, left, int(ends_word)),
        (token, int(ends_word)),
        (token,),
    ]
