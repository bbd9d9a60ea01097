"""Evaluations as files, which `asr evaluate --details NAME.json` writes and `asr report` reads.

A file is one JSON object:
  format, version   identify the file format
  system            the recognizer: bundle, mode, decoder, lm_fusion, options; empty if words came from a file
  summary           the figures of `asr evaluate --json`
  scoring           `shortest` or `sclite`: the alignment rules
  utterances        each with id, reference, words, duration, seconds, audio, error; see `Utterance`
  cache             counts of the language model's caches after each batch, with the seconds of audio until then
  lattices          for a few utterances, the words of their lattices; see `asr.reports.word_graph`
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asr import nist
from asr.errors import AsrError, in_one_line
from asr.metrics import align
from asr.reports.word_graph import WordGraph
from asr.serialization import write_whole_text
from asr.text.documents import parse_json, read_text

FORMAT, VERSION = "asr evaluation", 1
SHORTEST, SCLITE = "shortest", "sclite"


@dataclass(frozen=True)
class HeardWord:
    """A recognized word; times are in seconds. Times and confidence are None if unknown."""

    text: str
    start: float | None = None
    end: float | None = None
    confidence: float | None = None


@dataclass(frozen=True)
class Clip:
    """The audio of an utterance: `begin` to `end` seconds of a file, or to its end if `end` is None."""

    path: str
    begin: float = 0.0
    end: float | None = None


@dataclass(frozen=True)
class Utterance:
    """An utterance of a test set.

    Args:
        id: its name.
        reference: what was said.
        words: what was recognized.
        duration: in seconds; None where it is not known.
        seconds: of computing, by stage.
        audio: where it can be heard.
        error: why it was not recognized.
    """

    id: str
    reference: tuple[str, ...]
    words: tuple[HeardWord, ...]
    duration: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    audio: Clip | None = None
    error: str = ""

    @property
    def hypothesis(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.words)


@dataclass(frozen=True)
class Evaluation:
    """A test set, recognized and scored; the fields are those of the file.

    Args:
        name: what the system is called; the name of the file without its suffix.
    """

    name: str
    utterances: tuple[Utterance, ...]
    summary: Mapping[str, Any]
    system: Mapping[str, Any] = field(default_factory=dict)
    scoring: str = SHORTEST
    cache: tuple[Mapping[str, float], ...] = ()
    lattices: Mapping[str, WordGraph] = field(default_factory=dict)

    def pairs(self, utterance: Utterance) -> list[tuple[str, str]]:
        """The alignment of an utterance as (reference word, hypothesis word), `GAP` for a missing word."""
        align_words = nist.align if self.scoring == SCLITE else align
        return align_words(utterance.reference, utterance.hypothesis)

    @property
    def real_time_factor(self) -> float | None:
        """Computing time divided by the duration of the audio; None if unknown."""
        return finite(self.summary.get("real_time_factor")) or None

    def save(self, path: str | Path) -> None:
        """Writes the file.

        Raises:
            AsrError: it cannot be written.
        """
        content = {
            "format": FORMAT,
            "version": VERSION,
            "system": dict(self.system),
            "summary": dict(self.summary),
            "scoring": self.scoring,
            "utterances": [_record(one) for one in self.utterances],
            "cache": [dict(counts) for counts in self.cache],
            "lattices": {name: asdict(graph) for name, graph in self.lattices.items()},
        }
        write_whole_text(path, json.dumps(content, ensure_ascii=False))

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Reads a file written by `save`.

        Raises:
            AsrError: it is missing, is something else, is of another version, or a field is missing or of another type.
        """
        advice = "write it with 'asr evaluate ... --details NAME.json'"
        try:
            content = parse_json(read_text(path, "evaluation"))
        except ValueError as error:
            raise AsrError(f"{path}: this is not an evaluation; {advice}.") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise AsrError(f"{path}: this is not an evaluation; {advice}.")
        if content.get("version") != VERSION:
            raise AsrError(f"{path}: it has version {content.get('version')}, not {VERSION}; {advice} again.")
        try:
            return cls(
                Path(path).stem,
                tuple(map(_utterance, _list(content, "utterances", dict))),
                _typed(content, "summary", dict),
                _typed(content, "system", dict),
                _scoring(content),
                tuple(filter(None, map(_counts, _list(content, "cache", dict)))),
                {name: WordGraph.from_json(graph) for name, graph in _typed(content, "lattices", dict).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AsrError(
                f"{path}: the evaluation has a field that is missing or wrong ({in_one_line(error)}); {advice}."
            ) from error


def finite(value: Any) -> float | None:
    """The JSON value if it is a finite number, else None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None


def finite_values(record: Any) -> dict[str, float]:
    """The finite numbers of a JSON object, by name; none of anything else."""
    values = {str(name): finite(value) for name, value in record.items()} if isinstance(record, dict) else {}
    return {name: value for name, value in values.items() if value is not None}


def heard_words(record: Mapping[str, Any], hypothesis: Sequence[str]) -> tuple[HeardWord, ...]:
    """The words of a hypothesis, with times and confidences if a record of `asr transcribe` has them.

    Args:
        record: a line of JSON; may lack everything.
        hypothesis: the words as they were scored.
    """
    listed = record.get("words")
    if not isinstance(listed, list) or len(listed) != len(hypothesis):
        return tuple(map(HeardWord, hypothesis))
    return tuple(
        HeardWord(text, *_timing(one)) if isinstance(one, dict) else HeardWord(text)
        for one, text in zip(listed, hypothesis, strict=True)
    )


def _timing(word: Mapping[str, Any]) -> Iterator[float | None]:
    """Start, end and confidence."""
    return (finite(word.get(name)) for name in ("start", "end", "confidence"))


_TYPES: Mapping[type, tuple[str, str]] = {dict: ("an object", "objects"), str: ("a string", "strings")}


def _typed(record: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(record[name], kind):
        raise TypeError(f"{name!r} must be {_TYPES[kind][0]}")
    return record[name]


def _list(record: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    if not isinstance(record[name], list) or not all(isinstance(one, kind) for one in record[name]):
        raise TypeError(f"{name!r} must be a list of {_TYPES[kind][1]}")
    return list(record[name])


def _scoring(record: Mapping[str, Any]) -> str:
    if record["scoring"] not in (SHORTEST, SCLITE):
        raise ValueError(f"'scoring' must be {SHORTEST!r} or {SCLITE!r}")
    return str(record["scoring"])


def _utterance(record: Mapping[str, Any]) -> Utterance:
    words = [HeardWord(_typed(word, "text", str), *_timing(word)) for word in _list(record, "words", dict)]
    clip = _typed(record, "audio", dict) if record.get("audio") is not None else None
    audio = Clip(_typed(clip, "path", str), finite(clip.get("begin")) or 0.0, finite(clip.get("end"))) if clip else None
    return Utterance(
        _typed(record, "id", str),
        tuple(_list(record, "reference", str)),
        tuple(words),
        finite(record.get("duration")),
        finite_values(record.get("seconds")),
        audio,
        str(record.get("error", "")),
    )


def _counts(record: Mapping[str, Any]) -> dict[str, float]:
    """Counts of a cache; none where nothing was asked."""
    counts = finite_values(record)
    return counts if counts.get("num_queries", 0.0) > 0 and "audio_seconds" in counts else {}


def _record(utterance: Utterance) -> dict[str, Any]:
    """An utterance as JSON values without unknown ones, which makes the file a third smaller."""
    record = asdict(utterance) | {"words": [_given(asdict(word)) for word in utterance.words]}
    return {key: value for key, value in _given(record).items() if value not in ("", {})}


def _given(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}
