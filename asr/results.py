"""Results of recognition: words, scores, notes and stage times of recordings and streams."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asr.decoding.words import only_words, spoken

if TYPE_CHECKING:
    from asr.decoding.interface import DecodeResult, Hypothesis
    from asr.decoding.lattice import Lattice
    from asr.decoding.settings import DecodingOptions
    from asr.decoding.words import WordAligner


@dataclass
class StageTimes:
    """Wall-clock seconds of each stage, in order of first use.

    Args:
        audio_seconds: duration of the recognized audio.
        stages: stage -> seconds.
    """

    audio_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.stages.values())

    @property
    def real_time_factor(self) -> float:
        """Computing time divided by the duration of the audio; 0 without audio."""
        return self.total / self.audio_seconds if self.audio_seconds > 0 else 0.0

    @contextmanager
    def measure(self, stage: str, device: torch.device | None = None) -> Iterator[None]:
        """Adds the wall-clock time of the block to a stage; on a GPU, waits for the thread's stream at both ends."""
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
        """The stages multiplied by a factor, such as an utterance's share of its batch; `audio_seconds` is 0."""
        return StageTimes(0.0, {stage: seconds * factor for stage, seconds in self.stages.items()})

    def as_dict(self) -> dict[str, Any]:
        """The real-time factor, None without audio, and the seconds of each stage, as JSON values."""
        factor = round(self.real_time_factor, 4) if self.audio_seconds else None
        return {"real_time_factor": factor, "seconds": {name: round(value, 3) for name, value in self.stages.items()}}

    def format(self) -> str:
        """One line: each stage, the sum, and the real-time factor."""
        if not self.audio_seconds:
            return "nothing was recognized"
        parts = [f"{stage} {seconds:.2f} s" for stage, seconds in self.stages.items()]
        return f"{', '.join(parts)}; {self.audio_seconds:.1f} s of audio, real-time factor {self.real_time_factor:.3f}"


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        # Not the whole device: other CUDA streams may be busy with other batches.
        torch.cuda.current_stream(device).synchronize()


@dataclass(frozen=True)
class Word:
    """A recognized word.

    Args:
        text: the word.
        start, end: in seconds from the beginning of the recording.
        confidence: calibrated probability that the word is right. If the bundle is not calibrated, the posterior
            probability in the lattice, or None if neither lattices nor several hypotheses are requested. Those
            of transducers are described in `asr.fusion.confidences`.
    """

    text: str
    start: float
    end: float
    confidence: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The word as JSON values."""
        record: dict[str, Any] = {"word": self.text, "start": round(self.start, 3), "end": round(self.end, 3)}
        return record if self.confidence is None else {**record, "confidence": round(self.confidence, 4)}


@dataclass(frozen=True)
class Alternative:
    """One of the best sentences of a recording.

    Args:
        words: in order.
        am_score, graph_score, lm_score, total: as in `RecognitionResult`.
        sentence_ends: the number of words before each end of a sentence within the recording; segments end there, too.
    """

    words: tuple[Word, ...]
    am_score: float
    graph_score: float
    lm_score: float
    total: float
    sentence_ends: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    def as_dict(self) -> dict[str, Any]:
        """The sentence as JSON values."""
        record: dict[str, Any] = {"text": self.text, "scores": _scores_as_dict(self)}
        return record if not self.sentence_ends else {**record, "sentence_ends": list(self.sentence_ends)}

    def plus(self, other: Alternative) -> Alternative:
        """The sums of the scores of this sentence and another one, without words."""
        return Alternative(
            (),
            self.am_score + other.am_score,
            self.graph_score + other.graph_score,
            self.lm_score + other.lm_score,
            self.total + other.total,
        )


NOTES = {
    "noise": "what the search made of noise has been left out",
    "unsure": "less than half of the words are probably right: noise, another language, or words that the list lacks",
}
"""Note that a result may have -> its text."""

_LEAST_SURE = 0.5


def notes_on(num_left_out: int, words: Sequence[Word]) -> tuple[str, ...]:
    """The keys of `NOTES` that apply to a result with these words.

    Args:
        num_left_out: number of words that were left out as noise.
        words: the remaining words.
    """
    sure = [word.confidence for word in words if word.confidence is not None]
    is_unsure = sum(sure) < _LEAST_SURE * len(sure)
    return ("noise",) * (num_left_out > 0) + ("unsure",) * is_unsure


@dataclass(frozen=True, eq=False)
class PieceLattice:
    """The lattice of a segment of a recording.

    Args:
        begin, end: of the segment, in seconds from the beginning of the recording.
        frame_seconds: time between two frames, in seconds.
        lattice: the lattice, with frames counted from the beginning of the segment. Frames that `blank_skip_threshold`
            skips are not counted.
        original_frame: (T,) int64, the original frame of each lattice frame; None if no frames were skipped.
    """

    begin: float
    end: float
    frame_seconds: float
    lattice: Lattice
    original_frame: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class RecognitionResult:
    """The words of a recording, with scores and times.

    Args:
        words: the best words, in order.
        am_score, graph_score, lm_score: scores of the words' path, natural logs, unscaled.
        total: their scaled sum plus word insertion penalties, which the search maximizes.
        is_complete: False if no complete sentence survived the beam in some segment; the words of that segment are then
            those of the best unfinished path.
        times: times of the stages.
        cache: counts of the recurrent model's caches since they were created, up to the batch of this recording; empty
            without a recurrent model. Each worker has its own counts.
        lattices: one for each segment, if lattices are kept; segments without a complete sentence have none.
        hypotheses: the best distinct sentences, best first, if more than one was requested. With `mbr_scale`, `words`
            may be those of another one than the first.
        notes: keys of `NOTES` that apply to some segment.
    """

    words: tuple[Word, ...]
    am_score: float
    graph_score: float
    lm_score: float
    total: float
    is_complete: bool
    times: StageTimes
    cache: dict[str, int | float] = field(default_factory=dict, repr=False)
    lattices: tuple[PieceLattice, ...] = ()
    hypotheses: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    @property
    def duration(self) -> float:
        """Seconds of audio."""
        return self.times.audio_seconds

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values, for a line of output."""
        record: dict[str, Any] = {
            "text": self.text,
            "duration": round(self.duration, 3),
            "words": [word.as_dict() for word in self.words],
            "scores": _scores_as_dict(self),
            "complete": self.is_complete,
            "seconds": {stage: round(seconds, 4) for stage, seconds in self.times.stages.items()},
        }
        if self.hypotheses:
            record["nbest"] = [hypothesis.as_dict() for hypothesis in self.hypotheses]
        return record if not self.notes else {**record, "notes": list(self.notes)}


def _scores_as_dict(scored: Alternative | RecognitionResult | StreamResult) -> dict[str, float]:
    scores = {"am": scored.am_score, "graph": scored.graph_score, "lm": scored.lm_score, "total": scored.total}
    return {name: round(score, 4) for name, score in scores.items()}


def words_in_time(
    hypothesis: Hypothesis, frame_seconds: float, duration: float, first_frame: int = 0
) -> tuple[Word, ...]:
    """The words of a hypothesis with times in seconds, and confidences if it has them.

    Args:
        hypothesis: the hypothesis.
        frame_seconds: time between two frames, in seconds.
        duration: of the recording so far, in seconds; no word ends after it.
        first_frame: the frame of the recording at which the hypothesis begins.
    """
    spans = zip(
        hypothesis.words,
        hypothesis.start_frames,
        hypothesis.end_frames,
        hypothesis.confidences or [None] * len(hypothesis.words),
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
    hypotheses: Sequence[Hypothesis] = (),
    is_calibrated: bool = False,
) -> RecognitionResult:
    """Converts a decoder's result for a segment.

    Args:
        decoded: the decoder's result, with confidences, if any (`asr.decoding.words.with_final_words`).
        frame_seconds: time between two frames, in seconds.
        times: stage times of the segment, with its duration.
        options: the decoder's options.
        aligner: gives words the times of their phones; without it, a word's times are where the graph outputs it.
        cache: counts of the recurrent model's caches.
        hypotheses: the n best sentences of the segment.
        is_calibrated: whether confidences are probabilities, or else lattice posteriors.
    """
    best = decoded.best
    if best is None:
        return RecognitionResult((), 0.0, 0.0, 0.0, 0.0, decoded.reached_final, times, cache)
    duration = times.audio_seconds
    lattices: tuple[PieceLattice, ...] = ()
    frame_of = None if decoded.original_frame is None else decoded.original_frame.cpu()
    lattice = None if decoded.lattice is None else decoded.lattice.to("cpu")
    if lattice is not None:
        lattices = (PieceLattice(0.0, duration, frame_seconds, lattice, frame_of),)

    def without_noise(one: Hypothesis) -> Hypothesis:
        one = one if aligner is None else aligner.aligned(one)
        limit = options.max_token_seconds
        return only_words(one, spoken(one if is_calibrated else replace(one, confidences=()), frame_seconds, limit))

    def alternative(one: Hypothesis) -> Alternative:
        kept = only_words(one, [False] * len(one.words)) if is_noise else without_noise(one)
        words = words_in_time(kept, frame_seconds, duration)
        return Alternative(words, one.am_score, one.graph_score, one.lm_score, one.total, kept.sentence_ends)

    words = words_in_time(without_noise(best), frame_seconds, duration)
    notes = notes_on(len(best.words) - len(words), words)
    # Where all words of the best path are noise, so are those of the others, which are even less probable.
    is_noise = bool(best.words) and not words
    alternatives = _distinct(map(alternative, hypotheses))
    scores = (best.am_score, best.graph_score, best.lm_score, best.total)
    return RecognitionResult(words, *scores, decoded.reached_final, times, cache, lattices, alternatives, notes)


def _distinct(alternatives: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """The first sentence of each text; sentences may differ only in words that are left out as noise."""
    found: dict[str, Alternative] = {}
    for one in alternatives:
        found.setdefault(one.text, one)
    return tuple(found.values())


def later_cache(*caches: dict[str, int | float]) -> dict[str, int | float]:
    """The latest of several counts, which only grow; segments are not recognized in the order of the recording."""
    return max(caches, key=lambda cache: cache.get("num_queries", -1))


def joined(pieces: Sequence[RecognitionResult], offsets: Sequence[float]) -> RecognitionResult:
    """Joins the results of a recording's segments.

    Args:
        pieces: the results, in order; at least one.
        offsets: where each segment begins in the recording, in seconds.
    """
    times = StageTimes()
    for piece in pieces:
        times.add(piece.times)
    return RecognitionResult(
        words=tuple(
            word for piece, offset in zip(pieces, offsets, strict=True) for word in _later(piece.words, offset)
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
        hypotheses=_joined_alternatives(pieces, offsets),
        notes=tuple(note for note in NOTES if any(note in piece.notes for piece in pieces)),
    )


def joined_recordings(parts: Iterable[Mapping[int, RecognitionResult]], sampling_rate: int) -> list[RecognitionResult]:
    """Joins the results of the segments of several recordings.

    Args:
        parts: for each recording, the results by the sample at which the segment begins, in any order.
        sampling_rate: in Hz.
    """
    in_order = [dict(sorted(part.items())) for part in parts]
    return [joined([*part.values()], [begin / sampling_rate for begin in part]) for part in in_order]


def _joined_alternatives(pieces: Sequence[RecognitionResult], offsets: Sequence[float]) -> tuple[Alternative, ...]:
    """The best combinations of one sentence per segment, as many as the longest list has."""
    num = max(len(piece.hypotheses) for piece in pieces)
    if num == 0:
        return ()
    # A segment without a complete sentence has no list; its best path takes the place.
    lists = [
        piece.hypotheses or (Alternative(piece.words, piece.am_score, piece.graph_score, piece.lm_score, piece.total),)
        for piece in pieces
    ]
    best, steps = [Alternative((), 0.0, 0.0, 0.0, 0.0)], list[list[tuple[int, int]]]()
    for own in lists:
        # The pair of sentences i and j (from 0) cannot rank above (i + 1)(j + 1), so most pairs need not be formed.
        pairs = [(i, j) for i in range(len(best)) for j in range(min(len(own), max(1, num // (i + 1))))]
        total = {(i, j): best[i].total + own[j].total for i, j in pairs}
        steps.append(sorted(pairs, key=lambda pair: -total[pair])[:num])
        best = [best[i].plus(own[j]) for i, j in steps[-1]]

    @functools.cache
    def words_of(segment: int, sentence: int) -> tuple[Word, ...]:
        return tuple(_later(lists[segment][sentence].words, offsets[segment]))

    # The words are joined once for each sentence, as there may be many segments.
    found = []
    for place, one in enumerate(best):
        chosen = list[tuple[int, int]]()
        for segment in range(len(steps) - 1, -1, -1):
            place, sentence = steps[segment][place]
            chosen.append((segment, sentence))
        words, ends = list[Word](), list[int]()
        for segment, sentence in reversed(chosen):
            ends += [len(words) + end for end in lists[segment][sentence].sentence_ends]
            words += words_of(segment, sentence)
            ends += [len(words)] * (segment < len(lists) - 1)
        found.append(replace(one, words=tuple(words), sentence_ends=tuple(ends)))
    return _distinct(found)


def _later(words: Iterable[Word], offset: float) -> Iterator[Word]:
    """Words with times that are shifted by `offset` seconds."""
    return (replace(word, start=word.start + offset, end=word.end + offset) for word in words)


@dataclass(frozen=True)
class StreamResult:
    """A partial or final result for an utterance of a stream.

    Args:
        stream: number of the stream.
        is_final: whether the utterance has ended; its words are final then.
        reason: why the utterance has ended: `pause`, or `end` of the stream; empty for partial results. The last result
            of each closed stream, and no other, has the reason `end`; it may have no words.
        begin, end: of the utterance, in seconds from the beginning of the stream; `end` is how far it was decoded.
        words: in order, with times from the beginning of the stream.
        num_stable: the number of leading words that can no longer change.
        is_complete: False for a final result if no complete sentence survived the beam.
        am_score, graph_score, lm_score, total: for final results, as in `RecognitionResult`.
        notes: for final results, as in `RecognitionResult`.
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
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values, for a line of output."""
        record: dict[str, Any] = {
            "type": "final" if self.is_final else "partial",
            "begin": round(self.begin, 3),
            "end": round(self.end, 3),
            "text": self.text,
            "words": [word.as_dict() for word in self.words],
        }
        if not self.is_final:
            return {**record, "settled": self.num_stable}
        record = {**record, "reason": self.reason, "complete": self.is_complete, "scores": _scores_as_dict(self)}
        return record if not self.notes else {**record, "notes": list(self.notes)}


def num_equal(one: Sequence[object], other: Sequence[object]) -> int:
    """The length of the longest common prefix."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))


def num_shown(policy: str, before: Sequence[object], now: Sequence[object], num_stable: int) -> int:
    """How many words of the best path are shown, by a policy of `asr.streaming.PARTIAL_POLICIES`.

    `before` and `now` are the words at the last chunk and at this one, of which `num_stable` can no longer change.
    """
    if policy == "best":
        return len(now)
    return num_stable if policy == "stable" else max(num_stable, num_equal(before, now))


def format_cache(counts: Mapping[str, int | float]) -> Iterator[str]:
    """Lines for users, made of counts of `asr.lm.cached.states.QueryStatistics`; none without a recurrent model."""
    if not counts.get("num_queries"):
        return
    queries, hits = counts["num_queries"], counts["edge_hit_ratio"]
    yield f"language model: {queries:,} word scores requested in {counts['num_calls']:,} calls"
    yield f"  {hits:.1%} answered from the cache of scores; {counts['num_outputs']:,} computed by the output layer"
    yield (
        f"  {counts['num_hidden_rows']:,} histories went through the hidden layer, "
        f"{counts['mean_hidden_batch']:.1f} at a time ({counts['largest_hidden_batch']:,} at most); "
        f"{counts['answered_without_hidden']:.1%} of the scores did not need it"
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
        f"{counts['num_evicted_contexts']:,} evicted"
    )
    yield (
        f"  seconds: {counts['seconds_total']:.2f}, of which {counts['seconds_find']:.2f} for lookup, "
        f"{counts['seconds_hidden']:.2f} in the hidden layer, {counts['seconds_output']:.2f} in the output layer, "
        f"{counts['seconds_evict']:.2f} for eviction; {counts['num_transfers']:,} blocks with "
        f"{counts['bytes_moved'] / 1e6:.1f} MB moved between devices in {counts['seconds_transfer']:.2f} s"
    )
