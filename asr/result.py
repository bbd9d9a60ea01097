"""What recognition answers for one recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asr.decoding.lattice.posteriors import with_confidences
from asr.evaluation.timing import StageTimes

if TYPE_CHECKING:
    from asr.decoding.first_pass import DecodeResult, Hypothesis
    from asr.decoding.lattice.lattice import Lattice
    from asr.decoding.options import DecodingOptions
    from asr.decoding.word_alignment import WordAligner


@dataclass(frozen=True)
class Word:
    """A recognized word.

    Args:
        text: the word.
        start, end: in seconds from the recording's beginning.
        confidence: its share in all that the lattice holds, where lattices were kept.
    """

    text: str
    start: float
    end: float
    confidence: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        record: dict[str, Any] = {"word": self.text, "start": round(self.start, 3), "end": round(self.end, 3)}
        return record if self.confidence is None else {**record, "confidence": round(self.confidence, 4)}


@dataclass(frozen=True, eq=False)
class PieceLattice:
    """The alternatives for a piece of a recording.

    Args:
        begin, end: of the piece, in seconds from the recording's beginning.
        frame_seconds: between two frames of the lattice; where `blank_skip_threshold` leaves frames out, the lattice's
            own time is the shorter for them.
        lattice: of the piece alone.
    """

    begin: float
    end: float
    frame_seconds: float
    lattice: Lattice


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
        cache: what the recurrent model's caches have done since it was loaded, this recording's batch included; empty
            without one. With several workers, each counts for itself.
        lattices: of the recording's pieces, where they were kept; a piece without a complete sentence has none.
    """

    words: tuple[Word, ...]
    am_score: float
    graph_score: float
    lm_score: float
    total: float
    is_complete: bool
    times: StageTimes
    cache: dict[str, int | float] = field(default_factory=dict)
    lattices: tuple[PieceLattice, ...] = ()

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
            "words": [word.as_dict() for word in self.words],
            "scores": {
                "am": round(self.am_score, 4),
                "graph": round(self.graph_score, 4),
                "lm": round(self.lm_score, 4),
                "total": round(self.total, 4),
            },
            "complete": self.is_complete,
            "seconds": {stage: round(seconds, 4) for stage, seconds in self.times.stages.items()},
        }


def words_in_time(
    hypothesis: Hypothesis,
    frame_seconds: float,
    duration: float,
    first_frame: int = 0,
    confidences: Sequence[float] | None = None,
) -> tuple[Word, ...]:
    """A hypothesis's words with their times.

    Args:
        hypothesis: K words.
        frame_seconds: between two of its frames.
        duration: of the recording so far; no word ends behind it.
        first_frame: of the hypothesis, in the recording.
        confidences: (K,), where lattices were kept.
    """
    spans = zip(
        hypothesis.words,
        hypothesis.start_frames,
        hypothesis.end_frames,
        confidences if confidences is not None else [None] * len(hypothesis.words),
        strict=True,
    )
    return tuple(
        Word(
            text,
            (first_frame + start) * frame_seconds,
            min((first_frame + end) * frame_seconds, duration),
            confidence,
        )
        for text, start, end, confidence in spans
    )


def as_result(
    decoded: DecodeResult,
    frame_seconds: float,
    times: StageTimes,
    options: DecodingOptions,
    aligner: WordAligner | None,
    cache: dict[str, int | float],
) -> RecognitionResult:
    """What a first pass found in a piece of audio, as a result.

    Args:
        decoded: of the piece.
        frame_seconds: between two of its frames.
        times: of the piece, its length included.
        options: those of the search.
        aligner: gives words the times of their phones, or None: they stay where the graph writes them.
        cache: what the recurrent model's caches have done.
    """
    best = decoded.best
    if best is None:
        return RecognitionResult((), 0.0, 0.0, 0.0, 0.0, decoded.reached_final, times, cache)
    duration = times.audio_seconds
    # Confidences go by where the graph writes words, as the lattice does.
    confidences: Sequence[float] | None = None
    lattices: tuple[PieceLattice, ...] = ()
    if decoded.lattice is not None:
        scale, frame_of = 1.0 / options.am_scale, decoded.original_frame
        confidences = with_confidences(best, decoded.lattice, options, scale, original_frame=frame_of).confidences
        lattices = (PieceLattice(0.0, duration, frame_seconds, decoded.lattice.to("cpu")),)
    if aligner is not None:
        best = aligner.aligned(best)
    words = words_in_time(best, frame_seconds, duration, confidences=confidences)
    scores = (best.am_score, best.graph_score, best.lm_score, best.total)
    return RecognitionResult(words, *scores, decoded.reached_final, times, cache, lattices)


def later_cache(*caches: dict[str, int | float]) -> dict[str, int | float]:
    """Of counts that only grow those that were taken last; recordings are not recognized in their order."""
    return max(caches, key=lambda cache: cache.get("num_queries", -1))


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
            replace(word, start=word.start + offset, end=word.end + offset)
            for piece, offset in zip(pieces, offsets, strict=True)
            for word in piece.words
        ),
        am_score=sum(piece.am_score for piece in pieces),
        graph_score=sum(piece.graph_score for piece in pieces),
        lm_score=sum(piece.lm_score for piece in pieces),
        total=sum(piece.total for piece in pieces),
        is_complete=all(piece.is_complete for piece in pieces),
        times=times,
        cache=later_cache(*(piece.cache for piece in pieces)),
        lattices=tuple(
            replace(one, begin=one.begin + offset, end=one.end + offset)
            for piece, offset in zip(pieces, offsets, strict=True)
            for one in piece.lattices
        ),
    )
