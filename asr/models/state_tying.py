"""Context-dependent HMM states tied by decision trees (Young, Odell and Woodland 1994), for left biphones.

The topology is that of lattice-free MMI (Povey et al. 2016): a phone's first frame reads one column of the network, any
further frames another. Each of these two states is the root of a tree that splits left contexts by phonetic questions.
Silence has one column, 0, for all its frames and contexts.

Shapes: P phones, silence first; C columns; D dimensions of the frames that the trees are grown on.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asr.errors import AsrError
from asr.graph.context import ENTRY, LOOP, TiedStates

_VARIANCE_FLOOR = 1e-2

# Classes of ARPAbet phones, by place, manner and voice; a question asks whether the phone before is one of them.
QUESTIONS: dict[str, str] = {
    "silence": "SIL",
    "vowel": "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW",
    "front vowel": "AE EH EY IH IY",
    "back vowel": "AA AO OW UH UW",
    "central vowel": "AH ER",
    "high vowel": "IH IY UH UW",
    "low vowel": "AA AE AO AW AY",
    "mid vowel": "AH EH ER EY OW",
    "diphthong": "AW AY EY OW OY",
    "ends high and front": "IY EY AY OY IH Y",
    "ends high and back": "UW OW AW UH W",
    "rounded": "AO OW OY UH UW W",
    "schwa": "AH IH",
    "rhotic": "R ER",
    "liquid": "L R ER",
    "glide": "W Y",
    "semivowel": "L R W Y",
    "nasal": "M N NG",
    "stop": "P T K B D G",
    "unvoiced stop": "P T K",
    "voiced stop": "B D G",
    "affricate": "CH JH",
    "fricative": "F V TH DH S Z SH ZH HH",
    "unvoiced fricative": "F TH S SH HH",
    "voiced fricative": "V DH Z ZH",
    "sibilant": "S Z SH ZH CH JH",
    "strident alveolar": "S Z",
    "palatal": "SH ZH CH JH Y",
    "labial": "P B M F V W",
    "labiodental": "F V",
    "dental": "TH DH",
    "alveolar": "T D N S Z L",
    "alveolar stop": "T D",
    "alveolar closure": "T D N",
    "velar": "K G NG",
    "unvoiced": "P T K F TH S SH HH CH",
    "voiced consonant": "B D G V DH Z ZH JH M N NG L R W Y",
    "sonorant consonant": "M N NG L R W Y",
}


@dataclass
class ContextStatistics:
    """Sufficient statistics of a Gaussian for each (state, phone before, phone).

    Attributes:
        count: (2, P, P) frames.
        total: (2, P, P, D) sums.
        square: (2, P, P, D) sums of squares.
    """

    count: npt.NDArray[np.float64]
    total: npt.NDArray[np.float64]
    square: npt.NDArray[np.float64]

    @classmethod
    def empty(cls, num_phones: int, dim: int) -> ContextStatistics:
        """Statistics of no frames."""
        shape = (2, num_phones, num_phones)
        return cls(np.zeros(shape), np.zeros((*shape, dim)), np.zeros((*shape, dim)))

    def add(
        self,
        state: npt.NDArray[np.int64],
        before: npt.NDArray[np.int64],
        phone: npt.NDArray[np.int64],
        frames: npt.NDArray[Any],
    ) -> None:
        """Adds frames (T, D), each with its state, phone before and phone, (T,) each."""
        index = (state, before, phone)
        np.add.at(self.count, index, 1.0)
        np.add.at(self.total, index, frames)
        np.add.at(self.square, index, np.square(frames, dtype=np.float64))


def require_columns(phones: Sequence[str], max_columns: int) -> None:
    """Checks that there is a column for each root of the trees.

    Raises:
        AsrError: there are fewer.
    """
    least = 2 * len(phones) - 1
    if max_columns < least:
        raise AsrError(f"{max_columns} columns are too few: {len(phones)} phones need at least {least}.")


def grow_trees(
    phones: Sequence[str], statistics: ContextStatistics, max_columns: int, min_frames: float = 60.0
) -> TiedStates:
    """Splits the leaf with the largest gain in likelihood until there are enough leaves.

    Args:
        phones: silence first.
        statistics: of aligned frames.
        max_columns: C, silence included.
        min_frames: frames that each leaf must have.

    Raises:
        AsrError: there are fewer columns than roots.
    """
    require_columns(phones, max_columns)
    num_phones = len(phones)
    roots = [(state, phone) for phone in range(1, num_phones) for state in (ENTRY, LOOP)]
    number = {phone: index for index, phone in enumerate(phones)}
    questions = [[number[name] for name in names.split() if name in number] for names in QUESTIONS.values()]
    # Each single phone is a question, too.
    questions += [[index] for index in range(num_phones)]
    asked = np.zeros((len(questions), num_phones), dtype=bool)
    for row, named in enumerate(questions):
        asked[row, named] = True
    leaves: list[tuple[int, int, npt.NDArray[np.bool_]]] = []
    heap: list[tuple[float, int, int]] = []

    def add(state: int, phone: int, members: npt.NDArray[np.bool_]) -> None:
        leaves.append((state, phone, members))
        gain, question = _best_question(statistics, state, phone, members, asked, min_frames)
        if question >= 0:
            heapq.heappush(heap, (-gain, len(leaves) - 1, question))

    for state, phone in roots:
        add(state, phone, np.ones(num_phones, dtype=bool))
    num_leaves = len(leaves)
    split: set[int] = set()
    while heap and num_leaves + 1 < max_columns:
        _, leaf, question = heapq.heappop(heap)
        state, phone, members = leaves[leaf]
        split.add(leaf)
        add(state, phone, members & asked[question])
        add(state, phone, members & ~asked[question])
        num_leaves += 1
    tables = np.zeros((2, num_phones, num_phones), dtype=np.int64)
    kept = [leaf for index, leaf in enumerate(leaves) if index not in split]
    for column, (state, phone, members) in enumerate(sorted(kept, key=lambda leaf: (leaf[1], leaf[0])), start=1):
        tables[state, members, phone] = column
    return TiedStates(tuple(phones), tables[ENTRY], tables[LOOP])


def _best_question(
    statistics: ContextStatistics,
    state: int,
    phone: int,
    members: npt.NDArray[np.bool_],
    asked: npt.NDArray[np.bool_],
    min_frames: float,
) -> tuple[float, int]:
    """The best gain in log likelihood and its question; -1 if no split leaves enough frames on both sides."""
    count = statistics.count[state, :, phone]
    total = statistics.total[state, :, phone]
    square = statistics.square[state, :, phone]
    yes = (asked & members).astype(np.float64)
    everything = members.astype(np.float64)[None]
    whole, of_yes, of_no = (
        (selection @ count, selection @ total, selection @ square) for selection in (everything, yes, everything - yes)
    )
    enough = (of_yes[0] >= min_frames) & (of_no[0] >= min_frames)
    gain = _log_likelihood(*of_yes) + _log_likelihood(*of_no) - _log_likelihood(*whole)
    gain = np.where(enough, gain, -np.inf)
    best = int(gain.argmax())
    return (float(gain[best]), best) if gain[best] > 0 else (0.0, -1)


def _log_likelihood(
    count: npt.NDArray[np.float64], total: npt.NDArray[np.float64], square: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Log likelihood of frames under their own Gaussian with diagonal covariance, up to a constant per frame."""
    frames = np.maximum(count, 1e-10)[:, None]
    variance = np.maximum(square / frames - np.square(total / frames), _VARIANCE_FLOOR)
    likelihood: npt.NDArray[np.float64] = -0.5 * count * np.log(variance).sum(1)
    return likelihood
