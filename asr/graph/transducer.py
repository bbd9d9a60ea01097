"""Lexicon and grammar as plain arrays, before the finite-state library composes them.

Shapes: S states, A arcs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

EPSILON = 0


@dataclass(frozen=True)
class Transducer:
    """A weighted transducer with one label on either side of an arc, arcs sorted by source state.

    Attributes:
        start: the start state.
        arc_begin: (S + 1,) int64, first arc of each state.
        input_label: (A,) int32, 0 reads nothing.
        output_label: (A,) int32, 0 writes nothing.
        score: (A,) float32, natural log, higher is better.
        dst_state: (A,) int32.
        final_score: (S,) float32, -inf where a path may not end.
    """

    start: int
    arc_begin: npt.NDArray[np.int64]
    input_label: npt.NDArray[np.int32]
    output_label: npt.NDArray[np.int32]
    score: npt.NDArray[np.float32]
    dst_state: npt.NDArray[np.int32]
    final_score: npt.NDArray[np.float32]

    @classmethod
    def from_arcs(
        cls,
        start: int,
        src_state: npt.NDArray[Any],
        input_label: npt.NDArray[Any],
        output_label: npt.NDArray[Any],
        score: npt.NDArray[Any],
        dst_state: npt.NDArray[Any],
        final_score: npt.NDArray[Any],
        sort_by: str,
    ) -> Transducer:
        """Sorts arcs by source state and within it by `sort_by`, `input` or `output`: composition needs that."""
        order = np.lexsort((input_label if sort_by == "input" else output_label, src_state))
        arc_begin = np.zeros(len(final_score) + 1, dtype=np.int64)
        np.cumsum(np.bincount(src_state, minlength=len(final_score)), out=arc_begin[1:])
        return cls(
            start,
            arc_begin,
            input_label[order].astype(np.int32),
            output_label[order].astype(np.int32),
            score[order].astype(np.float32),
            dst_state[order].astype(np.int32),
            final_score.astype(np.float32),
        )


def round_scores(score: npt.NDArray[Any], step: float) -> npt.NDArray[np.float32]:
    """Scores as multiples of `step`, a power of two: their sums and differences in float32 are then exact.

    Determinisation moves scores along paths; with exact sums equal futures stay equal and can be merged.
    """
    return (np.round(score.astype(np.float64) / step) * step).astype(np.float32)
