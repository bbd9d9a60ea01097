"""What recognition answers for one recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asr.evaluation.timing import StageTimes


@dataclass(frozen=True)
class Word:
    """A recognized word.

    Args:
        text: the word.
        start, end: in seconds from the recording's beginning.
    """

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class RecognitionResult:
    """The best words of a recording, and how they were found.

    Args:
        words: in order.
        am_score, graph_score, lm_score: natural logs of the best path, unscaled.
        total: their scaled sum, which the search maximized.
        is_complete: False where no complete sentence survived the beam somewhere; the words then are the best
            unfinished path.
        times: of each stage.
        cache: what the language model's caches did for this recording's batch; empty without a recurrent model.
    """

    words: tuple[Word, ...]
    am_score: float
    graph_score: float
    lm_score: float
    total: float
    is_complete: bool
    times: StageTimes
    cache: dict[str, int | float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    @property
    def duration(self) -> float:
        """Seconds of audio."""
        return self.times.audio_seconds

    def as_dict(self) -> dict[str, Any]:
        """JSON values, for a line of output."""
        return {
            "text": self.text,
            "duration": round(self.duration, 3),
            "words": [
                {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)} for word in self.words
            ],
            "scores": {
                "am": round(self.am_score, 4),
                "graph": round(self.graph_score, 4),
                "lm": round(self.lm_score, 4),
                "total": round(self.total, 4),
            },
            "complete": self.is_complete,
            "seconds": {stage: round(seconds, 4) for stage, seconds in self.times.stages.items()},
        }


def joined(pieces: Sequence[RecognitionResult], offsets: Sequence[float]) -> RecognitionResult:
    """The result of a recording from those of its pieces.

    Args:
        pieces: in order, at least one.
        offsets: where each begins, in seconds.
    """
    times = StageTimes()
    for piece in pieces:
        times.add(piece.times)
    return RecognitionResult(
        words=tuple(
            Word(word.text, word.start + offset, word.end + offset)
            for piece, offset in zip(pieces, offsets, strict=True)
            for word in piece.words
        ),
        am_score=sum(piece.am_score for piece in pieces),
        graph_score=sum(piece.graph_score for piece in pieces),
        lm_score=sum(piece.lm_score for piece in pieces),
        total=sum(piece.total for piece in pieces),
        is_complete=all(piece.is_complete for piece in pieces),
        times=times,
        cache=pieces[-1].cache,
    )
