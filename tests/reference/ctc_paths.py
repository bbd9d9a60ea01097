"""What a path of CTC labels spells."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def collapsed(labels: Iterable[int]) -> list[int]:
    """Repeats taken together and blanks (0) left out."""
    return [label for label, _ in groupby(labels) if label]
