"""What recognition answers for a stream while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asr.result import Word


@dataclass(frozen=True)
class StreamResult:
    """What is known of an utterance of a stream.

    Args:
        stream: the stream's number.
        is_final: whether the utterance has ended; its words then are as they stay.
        reason: why it has ended: `pause`, or `end` of the stream; empty for partial results. Each closed stream has
            exactly one result whose reason is `end`, its last, with or without words.
        begin, end: the utterance, in seconds from the stream's beginning; `end` is how far it has been heard.
        words: in order, times from the stream's beginning.
        num_settled: so many of them cannot change any more.
        is_complete: of final results: False where no complete sentence survived the beam.
        am_score, graph_score, lm_score, total: of final results, as in `asr.result.RecognitionResult`.
    """

    stream: int
    is_final: bool
    reason: str
    begin: float
    end: float
    words: tuple[Word, ...]
    num_settled: int
    is_complete: bool = True
    am_score: float = 0.0
    graph_score: float = 0.0
    lm_score: float = 0.0
    total: float = 0.0

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    def as_dict(self) -> dict[str, Any]:
        """JSON values, for a line of output."""
        record: dict[str, Any] = {
            "type": "final" if self.is_final else "partial",
            "begin": round(self.begin, 3),
            "end": round(self.end, 3),
            "text": self.text,
            "words": [word.as_dict() for word in self.words],
        }
        if not self.is_final:
            return {**record, "settled": self.num_settled}
        scores = {"am": self.am_score, "graph": self.graph_score, "lm": self.lm_score, "total": self.total}
        return {
            **record,
            "reason": self.reason,
            "complete": self.is_complete,
            "scores": {name: round(score, 4) for name, score in scores.items()},
        }


def num_equal(one: Sequence[object], other: Sequence[object]) -> int:
    """How many words both begin with."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))
