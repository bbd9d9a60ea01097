"""A simulation of speech at the size of a large corpus: any text as frame log-probabilities, made of real segments.

Each phone of a sentence takes the frames that an acoustic model gave on some occurrence of that phone in real speech,
drawn at random among those with the most alike context. What is right is then made more probable or less, by one number
for all frames (`clarity`), until the word error rate is that of the recognizer that one wants to stand for. Confusions
between phones, their length and the blanks between them are those of real speech; that neighbouring phones come from
different speakers, and pauses only where the pool has them, is not. Call it a simulation wherever it is quoted.

Shapes: T frames, C tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asr.errors import AsrError
from asr.evaluation.segment_pool import SegmentPool
from asr.text.lexicon import Lexicon
from asr.text.tokens import BLANK_ID

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
