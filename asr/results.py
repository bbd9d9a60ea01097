"""Where the time goes: seconds of each stage of recognition, against the seconds of audio.

What recognition answers for one recording.

What recognition answers for a stream while it goes on.

What the language model's caches saved, for a reader."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from asr.decoding.lattice import with_confidences

if TYPE_CHECKING:
    from asr.decoding.interface import DecodeResult, DecodingOptions, Hypothesis
    from asr.decoding.lattice import Lattice
    from asr.decoding.paths import WordAligner


@dataclass
class StageTimes:
    """Wall-clock seconds by stage, in the order in which the stages first ran.

    Args:
        audio_seconds: duration of what was recognized.
        stages: stage -> seconds.
    """

    audio_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.stages.values())

    @property
    def real_time_factor(self) -> float:
        """Seconds of work for a second of audio; 0 without audio."""
        return self.total / self.audio_seconds if self.audio_seconds > 0 else 0.0

    @contextmanager
    def measure(self, stage: str, device: torch.device | None = None) -> Iterator[None]:
        """Adds the time of the block to a stage; on a GPU waits for the work of this thread's stream."""
        _synchronize(device)
        begin = time.perf_counter()
        try:
            yield
        finally:
            _synchronize(device)
            self.stages[stage] = self.stages.get(stage, 0.0) + time.perf_counter() - begin

    def add(self, other: StageTimes) -> None:
        """Adds the times of another run."""
        self.audio_seconds += other.audio_seconds
        for stage, seconds in other.stages.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def scaled(self, factor: float) -> StageTimes:
        """A share of these stages, such as one utterance's of its batch; the audio stays to be set."""
        return StageTimes(0.0, {stage: seconds * factor for stage, seconds in self.stages.items()})

    def format(self) -> str:
        """One line: each stage, the sum, and the real-time factor."""
        parts = [f"{stage} {seconds:.2f} s" for stage, seconds in self.stages.items()]
        return f"{', '.join(parts)}; {self.audio_seconds:.1f} s of audio, real-time factor {self.real_time_factor:.3f}"


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        # Other streams may go on with other batches.
        torch.cuda.current_stream(device).synchronize()


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
        num_stable: so many of them cannot change any more.
        is_complete: of final results: False where no complete sentence survived the beam.
        am_score, graph_score, lm_score, total: of final results, as in `asr.results.RecognitionResult`.
    """

    stream: int
    is_final: bool
    reason: str
    begin: float
    end: float
    words: tuple[Word, ...]
    num_stable: int
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
            return {**record, "settled": self.num_stable}
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


def format_cache(counts: Mapping[str, int | float]) -> Iterator[str]:
    """A few lines from the counts of `asr.lm.cached.statistics.QueryStatistics`; none without a recurrent model."""
    if not counts.get("num_queries"):
        return
    queries, hits = counts["num_queries"], counts["edge_hit_ratio"]
    yield f"language model: {queries:,} word scores asked in {counts['num_calls']:,} calls"
    yield f"  {hits:.1%} answered from the cache of scores; {counts['num_outputs']:,} computed by the output layer"
    yield (
        f"  {counts['num_hidden_rows']:,} histories went through the hidden layer, "
        f"{counts['mean_hidden_batch']:.1f} at a time ({counts['largest_hidden_batch']:,} at most); "
        f"{counts['answered_without_hidden']:.1%} of the scores needed no work of it"
    )
    if counts["num_history_normalizers"] or counts["num_group_normalizers"]:
        yield (
            f"  {counts['num_history_normalizers']:,} normalizers of histories and "
            f"{counts['num_group_normalizers']:,} of classes computed"
        )
    if counts["num_tree_decisions"]:
        yield f"  {counts['num_tree_decisions']:,} decisions along the tree's paths computed"
    yield (
        f"  {counts['num_contexts']:,} histories held in {counts['bytes_held'] / 1e6:.1f} MB; "
        f"{counts['num_evicted_contexts']:,} forgotten for space"
    )
    yield (
        f"  seconds: {counts['seconds_total']:.2f}, of them {counts['seconds_find']:.2f} finding, "
        f"{counts['seconds_hidden']:.2f} in the hidden layer, {counts['seconds_output']:.2f} in the output layer, "
        f"{counts['seconds_evict']:.2f} forgetting; {counts['num_transfers']:,} blocks with "
        f"{counts['bytes_moved'] / 1e6:.1f} MB moved between devices in {counts['seconds_transfer']:.2f} s"
    )
