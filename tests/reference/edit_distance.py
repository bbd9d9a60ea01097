"""The number of errors in a sentence, by the textbook recursion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def edit_distance(reference: Sequence[Any], hypothesis: Sequence[Any]) -> int:
    """The least number of substitutions, insertions and deletions, row by row."""
    row = list(range(len(hypothesis) + 1))
    for i, ref_word in enumerate(reference, start=1):
        diagonal, row[0] = row[0], i
        for j, hyp_word in enumerate(hypothesis, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (ref_word != hyp_word))
    return row[-1]
