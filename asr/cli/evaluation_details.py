"""What `asr evaluate --details NAME.json` stores for each utterance in addition to its words, for `asr report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asr.cli.output import maker_of
from asr.metrics import utterance_id
from asr.recognizer import Recognizer
from asr.reports.evaluation import SCLITE, SHORTEST, Clip, Evaluation, Utterance, finite, finite_values, heard_words
from asr.reports.word_graph import WordGraph, word_graph
from asr.results import PieceLattice, RecognitionResult, StageTimes
from asr.text.documents import parse_json, read_text
from asr.text.normalize import without_punctuation

_CACHE_COUNTS = ("num_queries", "num_edge_hits", "num_hidden_rows", "num_contexts", "bytes_held")
_MOST_LATTICES = 3
_LONGEST_DRAWN = 12.0  # seconds; the words of longer utterances cannot be read on a page


@dataclass
class Details:
    """Collects what a report shows.

    Attributes:
        records: utterance -> its line of JSON, see `RecognitionResult.as_dict`.
        clips: utterance -> its audio.
        system: the recognizer and its options.
        cache: counts of the language model's caches, each with `audio_seconds`, the audio recognized until then.
        lattices: of a few utterances, those with the most errors among short ones.
        graphs: the words of these lattices.
        is_resumed: whether an earlier run has recognized some of the utterances.
    """

    records: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    clips: dict[str, Clip] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    cache: list[dict[str, float]] = field(default_factory=list)
    lattices: dict[str, tuple[int, PieceLattice]] = field(default_factory=dict)
    graphs: dict[str, WordGraph] = field(default_factory=dict)
    is_resumed: bool = False
    _audio_seconds: float = 0.0

    def add(self, name: str, result: RecognitionResult, num_errors: int) -> None:
        """Records the counts of the caches and perhaps the lattice of a recording."""
        self._audio_seconds += result.duration
        counts = {count: float(result.cache[count]) for count in _CACHE_COUNTS if count in result.cache}
        if counts.get("num_queries"):
            if self.cache and counts["num_queries"] == self.cache[-1]["num_queries"]:
                self.cache.pop()  # the same batch
            self.cache.append({"audio_seconds": round(self._audio_seconds, 3), **counts})
        if len(result.lattices) == 1 and result.duration <= _LONGEST_DRAWN:
            self.lattices[name] = num_errors, result.lattices[0]
            if len(self.lattices) > _MOST_LATTICES:
                del self.lattices[min(self.lattices, key=lambda one: self.lattices[one][0])]

    def split_words(self) -> None:
        """Splits the words of the records where punctuation was between letters, each part with the word's times."""
        for name, record in self.records.items():
            words = record.get("words")
            if isinstance(words, list) and all(isinstance(word, dict) for word in words):
                parts = [
                    {**word, "word": part}
                    for word in words
                    for part in without_punctuation(str(word.get("word", ""))).split()
                ]
                self.records[name] = {**record, "words": parts}

    def describe(self, recognizer: Recognizer) -> None:
        """Records the recognizer and its options."""
        options = {name: value for part in recognizer.settings.parts().values() for name, value in asdict(part).items()}
        self.system = {
            "bundle": recognizer.bundle.name,
            "mode": recognizer.mode,
            "decoder": recognizer.decoder_name,
            "lm_fusion": recognizer.lm_fusion,
            "options": {name: value for name, value in options.items() if isinstance(value, (str, int, float, bool))},
            "made_by": maker_of(recognizer),
        }

    def draw_lattices(self, recognizer: Recognizer) -> None:
        """Makes `graphs` of the lattices that were kept."""
        vocabulary = recognizer.bundle.graph.vocabulary
        self.graphs = {
            name: word_graph(
                piece.lattice, vocabulary, recognizer.final_options, piece.frame_seconds, piece.original_frame
            )
            for name, (_, piece) in self.lattices.items()
        }


def details_of_file(path: str | Path) -> Details:
    """What a file of transcripts contains besides the words: nothing, unless it is JSON Lines of `asr transcribe`."""
    found = Details()
    for line in read_text(path, "transcript file").split("\n"):
        try:
            record = parse_json(line) if line.lstrip().startswith("{") else None
        except ValueError:
            return Details()  # scoring the file reports the error
        if not isinstance(record, dict):
            continue
        audio, name = record.get("audio"), utterance_id(record, str(path))
        if "error" in record and name in found.records:
            continue
        found.records[name] = record
        if isinstance(audio, str) and Path(audio).is_file():
            found.clips[name] = Clip(str(Path(audio).resolve()))
        if "made_by" in record:
            found.system["made_by"] = str(record["made_by"])
    return found


def evaluation_of(
    name: str,
    references: Mapping[str, Sequence[str]],
    hypotheses: Mapping[str, Sequence[str]],
    summary: Mapping[str, Any],
    details: Details,
    is_sclite: bool,
) -> Evaluation:
    """Collects what a report needs.

    Args:
        name: of the system.
        references, hypotheses: utterance -> words, as scored.
        summary: the figures of `asr evaluate --json`.
        details: further data.
        is_sclite: whether errors were counted like sclite.
    """
    utterances = []
    for one, reference in references.items():
        record = details.records.get(one, {})
        utterances.append(
            Utterance(
                one,
                tuple(reference),
                heard_words(record, hypotheses.get(one, ())),
                finite(record.get("duration")),
                finite_values(record.get("seconds")),
                details.clips.get(one),
                str(record.get("error", "")),
            )
        )
    times = _times(utterances)
    # A summary has the exact times, but of a resumed run only those of its last part.
    total = {**summary, **times} if details.is_resumed else {**times, **summary}
    scoring = SCLITE if is_sclite else SHORTEST
    return Evaluation(name, tuple(utterances), total, details.system, scoring, tuple(details.cache), details.graphs)


def _times(utterances: Sequence[Utterance]) -> dict[str, Any]:
    """Seconds by stage and the real-time factor, if every recognized utterance has its time."""
    heard = [one for one in utterances if not one.error]
    if not heard or any(not one.seconds or not one.duration for one in heard):
        return {}
    times = StageTimes()
    for one in heard:
        times.add(StageTimes(one.duration or 0.0, dict(one.seconds)))
    return times.as_dict()
