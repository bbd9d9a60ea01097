"""Word and character error rates with bootstrap intervals, alignments, confusions, and files of transcripts."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kaldialign
import numpy as np
from numpy.typing import NDArray

from asr.errors import AsrError
from asr.text.documents import parse_json, read_text
from asr.text.normalize import UNSPACED

IntArray = NDArray[np.int64]
Transcripts = dict[str, tuple[str, ...]]
"""Utterance id -> words."""

_SPACE_WITHIN = re.compile(f"(?<=[{UNSPACED}]) (?=[{UNSPACED}])")


@dataclass(frozen=True)
class ErrorCounts:
    """The minimum number of edits that turn a reference into a hypothesis."""

    num_ref: int
    num_substitutions: int
    num_insertions: int
    num_deletions: int

    @property
    def num_errors(self) -> int:
        return self.num_substitutions + self.num_insertions + self.num_deletions

    @property
    def rate(self) -> float:
        """Errors per reference symbol. For an empty reference, 0 without errors and infinite with errors."""
        if self.num_ref == 0:
            return float("inf") if self.num_errors else 0.0
        return self.num_errors / self.num_ref

    def __add__(self, other: ErrorCounts) -> ErrorCounts:
        return ErrorCounts(
            self.num_ref + other.num_ref,
            self.num_substitutions + other.num_substitutions,
            self.num_insertions + other.num_insertions,
            self.num_deletions + other.num_deletions,
        )


NO_ERRORS = ErrorCounts(0, 0, 0, 0)


def composed(words: Iterable[str]) -> list[str]:
    """Words in Unicode's form NFC, so that an accented letter is the same in one character and in two."""
    return [unicodedata.normalize("NFC", word) for word in words]


def count_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> ErrorCounts:
    """Counts the errors of the best alignment of two sequences of words, which are compared in the form NFC."""
    counts = kaldialign.edit_distance(composed(reference), composed(hypothesis))
    return ErrorCounts(len(reference), counts["sub"], counts["ins"], counts["del"])


def characters(words: Sequence[str]) -> list[str]:
    """The symbols that a character error rate counts: all characters of the form NFC, with one space between words.

    There is none between characters of scripts that have no spaces there, such as Chinese and Thai.
    """
    return list(_SPACE_WITHIN.sub("", " ".join(composed(words))))


@dataclass(frozen=True)
class ErrorReport:
    """The errors of a test set.

    Args:
        words: utterance id -> word errors.
        characters: utterance id -> character errors.
    """

    words: Mapping[str, ErrorCounts]
    characters: Mapping[str, ErrorCounts]

    @property
    def total_words(self) -> ErrorCounts:
        return sum(self.words.values(), NO_ERRORS)

    @property
    def total_characters(self) -> ErrorCounts:
        return sum(self.characters.values(), NO_ERRORS)

    @property
    def num_wrong_utterances(self) -> int:
        """Utterances with at least one word error."""
        return sum(counts.num_errors > 0 for counts in self.words.values())


def score_transcripts(
    references: Mapping[str, Sequence[str]],
    hypotheses: Mapping[str, Sequence[str]],
    missing_is_empty: bool = False,
    count: Callable[[Sequence[str], Sequence[str]], ErrorCounts] = count_errors,
) -> ErrorReport:
    """Scores every reference against the hypothesis of the same id.

    Args:
        references: utterance id -> words.
        hypotheses: utterance id -> words; ids without a reference are refused.
        missing_is_empty: count all words of an utterance without a hypothesis as deleted.
        count: counts the word errors of an utterance.

    Raises:
        AsrError: an id occurs on one side only, or there are no references.
    """
    if not references:
        raise AsrError("there are no reference transcripts to score against; the reference file is empty.")
    _require_same_ids(
        "hypothesis", references, [] if missing_is_empty else [i for i in references if i not in hypotheses]
    )
    _require_same_ids("reference", hypotheses, [i for i in hypotheses if i not in references])
    words, letters = {}, {}
    for utt_id, reference in references.items():
        hypothesis = hypotheses.get(utt_id, ())
        words[utt_id] = count(reference, hypothesis)
        letters[utt_id] = count_errors(characters(reference), characters(hypothesis))
    return ErrorReport(words, letters)


def _require_same_ids(kind: str, known: Iterable[str], missing: Sequence[str]) -> None:
    if missing:
        num_known = len(list(known))
        cure = "" if missing[0].isascii() else ", in the same Unicode form (NFC or NFD)"
        if kind == "hypothesis" and len(missing) < num_known:
            cure += ", or count all their words as deleted (--missing-is-empty)"
        raise AsrError(
            f"{len(missing)} of {num_known} utterances have no {kind}, first {missing[0]!r}; "
            f"check that both files use the same ids{cure}."
        )


def bootstrap_interval(
    counts: Iterable[ErrorCounts], confidence: float = 0.95, num_samples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Confidence interval of the error rate by the percentile bootstrap over utterances (Bisani and Ney, 2004).

    Args:
        counts: errors of each utterance.
        confidence: in (0, 1).
        num_samples: number of resampled test sets.
        seed: of the resampling; the same seed gives the same interval.

    Returns:
        lower and upper end.
    """
    errors, lengths = _arrays(counts)
    rates = _resample(errors, seed, num_samples) / np.maximum(_resample(lengths, seed, num_samples), 1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(rates, (tail, 1.0 - tail))
    return float(low), float(high)


def probability_of_improvement(
    better: Iterable[ErrorCounts], worse: Iterable[ErrorCounts], num_samples: int = 10_000, seed: int = 0
) -> float:
    """How often one system makes fewer errors than another on a resampled test set (paired bootstrap).

    Args:
        better, worse: errors of the two systems on the same utterances in the same order.
        num_samples: number of resampled test sets.
        seed: of the resampling.

    Raises:
        AsrError: the numbers of utterances differ.
    """
    errors_a, _ = _arrays(better)
    errors_b, _ = _arrays(worse)
    if errors_a.shape != errors_b.shape:
        raise AsrError(f"the two systems scored {errors_a.size} and {errors_b.size} utterances; score the same ones.")
    difference = _resample(errors_a - errors_b, seed, num_samples)
    return float(np.mean(difference < 0) + 0.5 * np.mean(difference == 0))


def _arrays(counts: Iterable[ErrorCounts]) -> tuple[IntArray, IntArray]:
    pairs = np.array([(count.num_errors, count.num_ref) for count in counts], dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _resample(values: IntArray, seed: int, num_samples: int) -> IntArray:
    """Sums over resampled values, (num_samples,); the same seed draws the same utterances."""
    generator = np.random.default_rng(seed)
    sums = np.empty(num_samples, dtype=np.int64)
    # Blocks of samples keep the memory small for large test sets.
    step = max(1, 4_000_000 // max(1, values.size))
    for begin in range(0, num_samples, step):
        end = min(begin + step, num_samples)
        sums[begin:end] = values[generator.integers(0, max(1, values.size), (end - begin, values.size))].sum(axis=1)
    return sums


# Stands for a missing word in alignments.
GAP = ""


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (reference word, hypothesis word) in the form NFC; `GAP` stands for an insertion or a deletion."""
    return [(str(a), str(b)) for a, b in kaldialign.align(composed(reference), composed(hypothesis), GAP)]


def alignment_errors(pairs: Sequence[tuple[str, str]]) -> ErrorCounts:
    """The errors of an alignment, as `align` returns it."""
    insertions = sum(ref_word == GAP for ref_word, _ in pairs)
    deletions = sum(hyp_word == GAP for _, hyp_word in pairs)
    errors = sum(ref_word != hyp_word for ref_word, hyp_word in pairs)
    return ErrorCounts(len(pairs) - insertions, errors - insertions - deletions, insertions, deletions)


Align = Callable[[Sequence[str], Sequence[str]], list[tuple[str, str]]]
"""`align`, or a function like it."""


def format_alignment(reference: Sequence[str], hypothesis: Sequence[str], align_words: Align = align) -> str:
    """Three aligned lines: REF, HYP, and S, I or D below each error; `*` stands for a missing word."""
    rows: tuple[list[str], list[str], list[str]] = (["REF:"], ["HYP:"], ["    "])
    for ref_word, hyp_word in align_words(reference, hypothesis):
        mark = "" if ref_word == hyp_word else "I" if ref_word == GAP else "D" if hyp_word == GAP else "S"
        shown = ref_word or "*", hyp_word or "*", mark
        width = max(map(len, shown))
        for row, text in zip(rows, shown, strict=True):
            row.append(text.ljust(width))
    return "\n".join(" ".join(row).rstrip() for row in rows)


def confusions(
    references: Mapping[str, Sequence[str]], hypotheses: Mapping[str, Sequence[str]], align_words: Align = align
) -> Counter[tuple[str, str]]:
    """Counts of all wrong pairs (reference word, hypothesis word); `GAP` as in `align`."""
    return Counter(
        pair
        for utt_id, reference in references.items()
        for pair in align_words(reference, hypotheses.get(utt_id, ()))
        if pair[0] != pair[1]
    )


def format_confusions(counts: Counter[tuple[str, str]], num_shown: int = 20) -> Iterable[str]:
    """The most frequent confusions, one on each line."""
    for (ref_word, hyp_word), count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:num_shown]:
        if ref_word == GAP:
            yield f"{count:6d}  inserted  {hyp_word}"
        elif hyp_word == GAP:
            yield f"{count:6d}  deleted   {ref_word}"
        else:
            yield f"{count:6d}  {ref_word} -> {hyp_word}"


def normalized_cross_entropy(marked: Sequence[tuple[bool, float | None]]) -> float | None:
    """NIST's measure of confidences (Siu et al., 1997): 1 is perfect, 0 is no better than the share of right words.

    Args:
        marked: for each recognized word whether it is right, and its confidence.

    Returns:
        None if all words are right, all are wrong, or a word has no confidence.
    """
    right = sum(is_right for is_right, _ in marked)
    if right in (0, len(marked)) or any(value is None for _, value in marked):
        return None
    share = right / len(marked)
    highest = -(right * math.log2(share) + (len(marked) - right) * math.log2(1 - share))
    # Without bounds, a confidence of 1 for a single wrong word would have infinite cost.
    bounded = [(is_right, min(max(float(value or 0.0), 1e-4), 1 - 1e-4)) for is_right, value in marked]
    cost = -sum(math.log2(value if is_right else 1 - value) for is_right, value in bounded)
    return round((highest - cost) / highest, 3)


@dataclass(frozen=True)
class ConfidenceBin:
    """Words with similar confidences: their number, their mean confidence, and the number of right ones."""

    num_words: int
    mean_confidence: float
    num_right: int


_NUM_CONFIDENCE_BINS = 10


def calibration(marked: Iterable[tuple[bool, float]]) -> list[ConfidenceBin]:
    """Words by confidence, in bins of equal width; empty bins are left out."""
    bins: list[list[tuple[bool, float]]] = [[] for _ in range(_NUM_CONFIDENCE_BINS)]
    for is_right, value in marked:
        number = int(value * _NUM_CONFIDENCE_BINS)
        bins[min(_NUM_CONFIDENCE_BINS - 1, max(0, number))].append((is_right, value))
    return [
        ConfidenceBin(len(each), sum(value for _, value in each) / len(each), sum(is_right for is_right, _ in each))
        for each in bins
        if each
    ]


_ID_FIELDS = ("id", "cut_id", "utterance", "audio")


def read_transcripts(path: str | Path) -> Transcripts:
    """Reads transcripts, one per line: Kaldi's `id words ...` or JSON Lines; plain, `.gz` or `.xz`.

    JSON Lines are lhotse cuts, or have `text` (a string, or a list of words) and one of `id`, `cut_id`, `utterance`,
    `audio`; for an `audio` path, the id is the file name without its suffix. A line with an `error` field and without
    `text` counts as an empty transcript, and is ignored if another line has the words of the same utterance. The final
    results of a stream are joined; partial ones are ignored, and so are those of an interrupted run before another one.

    Raises:
        AsrError: the file is missing, a table or not UTF-8, a line cannot be read, or an id occurs twice.
    """
    if ".csv" in Path(path).suffixes:
        raise AsrError(
            f"{path}: transcripts are not read from tables; give lines 'id words ...', or JSON Lines with 'id' and "
            "'text'. 'asr prepare csv' reads tables that name audio files."
        )
    transcripts: Transcripts = {}
    failed: Transcripts = {}
    complete = set[str]()
    begins: dict[str, float] = {}
    for line_number, line in enumerate(read_text(path, "transcript file").split("\n"), start=1):
        if not line.strip():
            continue
        is_json = line.lstrip()[0] == "{"
        record = _json_object(line, f"{path}:{line_number}") if is_json else None
        utt_id, words = _from_kaldi(line) if record is None else _from_json(record, f"{path}:{line_number}")
        if words is None:
            failed[utt_id] = ()
            continue
        if utt_id in complete:
            raise AsrError(f"{path}:{line_number}: the utterance {utt_id!r} occurs twice; keep one of the two lines.")
        if record is not None and stream_begins_again(record, utt_id, begins):
            transcripts[utt_id] = ()
        transcripts[utt_id] = transcripts.get(utt_id, ()) + words
        if record is None or not stream_goes_on(record):
            complete.add(utt_id)
    return failed | transcripts


def utterance_id(record: Mapping[str, Any], where: str) -> str:
    """The id in a line of JSON; for an `audio` path, the file name without its suffix.

    Args:
        record: the line.
        where: file and line, for error messages.

    Raises:
        AsrError: there is no id, or it is not a string.
    """
    field = next((name for name in _ID_FIELDS if name in record), None)
    if field is None:
        raise AsrError(f"{where}: the object has no id; give it one of the fields {', '.join(_ID_FIELDS)}.")
    if not isinstance(record[field], (str, int)):
        raise AsrError(f"{where}: the field '{field}' is {json.dumps(record[field])}; it must be a string.")
    return Path(str(record[field])).stem if field == "audio" else str(record[field])


def is_partial(record: Mapping[str, Any]) -> bool:
    """Whether a line of JSON is a partial result of a stream, whose words come again in a final one."""
    return record.get("type") == "partial"


def stream_goes_on(record: Mapping[str, Any]) -> bool:
    """Whether a line of JSON is a result of a stream, but not its last one."""
    return is_partial(record) or (record.get("type") == "final" and record.get("reason") == "pause")


def stream_begins_again(record: Mapping[str, Any], name: str, begins: dict[str, float]) -> bool:
    """Whether a line of JSON begins a stream that an interrupted run has already written results of.

    Args:
        record: the line.
        name: of the stream.
        begins: where the last utterance of each stream begins, in seconds; that of `record` is entered.
    """
    begin = record.get("begin")
    if record.get("type") != "final" or not isinstance(begin, (int, float)):
        return False
    has_begun = name in begins and begin <= begins[name]
    begins[name] = begin
    return has_begun


def _from_kaldi(line: str) -> tuple[str, tuple[str, ...]]:
    utt_id, *words = line.split()
    return utt_id, tuple(words)


def _cut_text(record: Mapping[str, Any]) -> str | None:
    """The transcript of a lhotse cut; None if it has none."""
    parts = record["supervisions"]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return None
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return " ".join(texts) if texts else None


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = parse_json(line)
    except ValueError as error:
        raise AsrError(f"{where}: the line is not a JSON object ({error}).") from error
    return record


def _from_json(record: Mapping[str, Any], where: str) -> tuple[str, tuple[str, ...] | None]:
    """The id and the words, which are None where recognition failed and () for a partial result."""
    utt_id = utterance_id(record, where)
    words = _cut_text(record) if "supervisions" in record else record.get("text")
    if words is None and "text" not in record:
        if record.get("error"):
            return utt_id, None
        raise AsrError(f"{where}: the object has no field 'text'.")
    if is_partial(record):
        return utt_id, ()
    if isinstance(words, str):
        return utt_id, tuple(words.split())
    if not isinstance(words, list):
        raise AsrError(f"{where}: the field 'text' is {json.dumps(words)}; it must be a string or a list of words.")
    return utt_id, tuple(map(str, words))
