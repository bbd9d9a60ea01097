"""Transcripts in NIST's formats CTM, STM and TRN, aligned and scored as by NIST's sclite.

sclite compares words in lower case; here, equivalent Unicode (NFC) is equal, too. It finds the cheapest alignment with
costs of 4 for a substitution and 3 for an insertion or a deletion, and breaks ties in favor of a substitution, then an
insertion. References may have alternatives: `{ GONNA / GOING TO }`, where `@` is the empty word. A word of a CTM
belongs to the first segment of the STM that ends after the word's middle, or else to the last segment. Words in ignored
segments are left out.
"""

from __future__ import annotations

import bisect
import itertools
import re
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from asr.errors import AsrError
from asr.metrics import GAP, Transcripts
from asr.text.documents import number_or_none, read_text

SUFFIXES = (".ctm", ".stm", ".trn")
_SUBSTITUTION, _GAP_COST, _NOTHING_COST = 4.0, 3.0, 0.001
_REPLACED, _DELETED, _INSERTED = range(3)
_NOTHING = "@"
_ALIGNED = {"{", "}", _NOTHING}  # marks in references that only an alignment resolves
_IGNORED = "ignore_time_segment_in_scoring"
_MAX_DEPTH = 20


class TimedWord(NamedTuple):
    """A word of a CTM; times are in seconds."""

    text: str
    begin: float
    duration: float

    @property
    def middle(self) -> float:
        return self.begin + self.duration / 2


@dataclass(frozen=True)
class Segment:
    """A line of an STM.

    Args:
        recording, channel: where the segment is.
        speaker: who speaks.
        begin, end: in seconds.
        words: as written, including the marks of alternatives.
    """

    recording: str
    channel: str
    speaker: str
    begin: float
    end: float
    words: tuple[str, ...]

    @property
    def is_ignored(self) -> bool:
        return len(self.words) == 1 and self.words[0].lower() == _IGNORED


Recording = tuple[str, str]
"""Name and channel."""


def read_trn(path: str | Path) -> Transcripts:
    """Reads lines `words ... (id)`.

    Raises:
        AsrError: the file cannot be read, a line has no id, or an id occurs twice.
    """
    found: Transcripts = {}
    for where, line in _lines(path, "TRN file"):
        match = re.fullmatch(r"(.*)\(([^()\s]+)\)", line)
        if match is None:
            raise AsrError(f"{where}: a line of a TRN file ends with its id in parentheses: 'words (id)'.")
        if match[2] in found:
            raise AsrError(f"{where}: the utterance {match[2]!r} occurs twice; keep one of the two lines.")
        found[match[2]] = tuple(match[1].split())
    return found


def read_ctm(path: str | Path) -> dict[Recording, list[TimedWord]]:
    """Reads lines `recording channel begin duration word [confidence]`; words are sorted by their begin.

    Raises:
        AsrError: the file cannot be read, or a line is not of this format.
    """
    found: dict[Recording, list[TimedWord]] = defaultdict(list)
    for where, line in _lines(path, "CTM file"):
        fields = line.split()
        if len(fields) >= 5 and fields[4].startswith("<ALT"):
            raise AsrError(f"{where}: alternatives in a CTM are not supported; keep one of them.")
        begin, duration = (number_or_none(field) for field in (*fields[2:4], "", "")[:2])
        if len(fields) < 5 or begin is None or duration is None or duration < 0:
            raise AsrError(f"{where}: a line of a CTM file is 'recording channel begin duration word [confidence]'.")
        found[fields[0], fields[1]].append(TimedWord(fields[4], begin, duration))
    return {recording: sorted(words, key=lambda word: word.begin) for recording, words in found.items()}


def read_stm(path: str | Path) -> list[Segment]:
    """Reads lines `recording channel speaker begin end [<labels>] words ...`, sorted by recording, channel and begin.

    Raises:
        AsrError: the file cannot be read, or a line is not of this format.
    """
    found = []
    for where, line in _lines(path, "STM file"):
        fields = line.split()
        begin, end = (number_or_none(field) for field in (*fields[3:5], "", "")[:2])
        if len(fields) < 5 or begin is None or end is None or end < begin:
            raise AsrError(f"{where}: a line of an STM file is 'recording channel speaker begin end [<labels>] words'.")
        words = fields[5:]
        if words and words[0].startswith("<") and words[0].endswith(">"):
            words = words[1:]
        found.append(Segment(fields[0], fields[1], fields[2], begin, end, tuple(words)))
    return sorted(found, key=lambda segment: (segment.recording, segment.channel, segment.begin))


def _lines(path: str | Path, what: str) -> Iterator[tuple[str, str]]:
    """Place and content of each line that is neither blank nor a comment."""
    for number, line in enumerate(read_text(path, what).split("\n"), start=1):
        if line.strip() and not line.startswith(";;"):
            yield f"{path}:{number}", line.strip()


def match_segments(
    segments: Sequence[Segment], words: Mapping[Recording, Sequence[TimedWord]]
) -> tuple[Transcripts, Transcripts]:
    """Assigns each word of a CTM to a segment of an STM.

    Args:
        segments: as `read_stm` returns them.
        words: as `read_ctm` returns them.

    Returns:
        References and hypotheses by the segment's name, `speaker-number`; ignored segments are left out.

    Raises:
        AsrError: the CTM has a recording that is not in the STM.
    """
    by_recording: dict[Recording, list[int]] = defaultdict(list)
    for place, segment in enumerate(segments):
        by_recording[segment.recording.lower(), segment.channel.lower()].append(place)
    unknown = [key for key in words if (key[0].lower(), key[1].lower()) not in by_recording]
    if unknown:
        raise AsrError(f"the recording {unknown[0][0]!r}, channel {unknown[0][1]}, is not in the reference (STM).")
    heard: list[list[str]] = [[] for _ in segments]
    for (recording, channel), timed in words.items():
        own = by_recording[recording.lower(), channel.lower()]
        # Where speakers overlap, a segment may end before an earlier one.
        ends = list(itertools.accumulate((segments[place].end for place in own), max))
        for word in timed:
            heard[own[min(bisect.bisect_right(ends, word.middle), len(own) - 1)]].append(word.text)
    references, hypotheses = {}, {}
    number: dict[str, int] = defaultdict(int)
    for segment, own_words in zip(segments, heard, strict=True):
        if not segment.is_ignored:
            name = f"{segment.speaker}-{number[segment.speaker]:03d}"
            number[segment.speaker] += 1
            references[name], hypotheses[name] = segment.words, tuple(own_words)
    return references, hypotheses


def _folded(word: str) -> str:
    """A word as words are compared: in lower case and in Unicode's form NFC."""
    return unicodedata.normalize("NFC", word).lower()


class _Arc(NamedTuple):
    """A word of a reference, and the indices of the arcs that may precede it; arc 0 is the start."""

    word: str
    before: list[int]


def _network(words: Sequence[str], where: str) -> tuple[list[_Arc], list[int]]:
    """The reference as arcs in topological order, and the indices of the arcs that may end it."""
    arcs = [_Arc("", [])]

    def sequence(position: int, before: list[int], depth: int) -> tuple[int, list[int]]:
        while position < len(words) and words[position] not in ("/", "}"):
            if words[position] == "{":
                position, before = alternatives(position + 1, before, depth + 1)
            else:
                arcs.append(_Arc(_folded(words[position]), before))
                before = [len(arcs) - 1]
                position += 1
        return position, before

    def alternatives(position: int, before: list[int], depth: int) -> tuple[int, list[int]]:
        if depth > _MAX_DEPTH:
            raise AsrError(f"{where}: alternatives are nested more than {_MAX_DEPTH} deep.")
        last: list[int] = []
        while True:
            begin = position
            position, ends = sequence(position, before, depth)
            if position == begin or position == len(words):
                raise AsrError(f"{where}: alternatives are written '{{ one / other }}', with '@' for nothing.")
            last += ends
            position += 1
            if words[position - 1] == "}":
                return position, last

    position, last = sequence(0, [0], 0)
    if position < len(words):
        raise AsrError(f"{where}: {words[position]!r} is outside alternatives, '{{ one / other }}'.")
    return arcs, last


def align(reference: Sequence[str], hypothesis: Sequence[str], where: str = "reference") -> list[tuple[str, str]]:
    """Aligns a reference and a hypothesis as sclite does.

    Args:
        reference: words and marks of alternatives.
        hypothesis: words.
        where: name of the reference in error messages.

    Returns:
        Pairs (reference word, hypothesis word) in lower case; `GAP` stands for an insertion or a deletion.

    Raises:
        AsrError: alternatives are malformed.
    """
    arcs, last = _network(reference, where)
    heard = [_folded(word) for word in hypothesis]
    # Nine bytes for each pair of words: recordings of an hour are aligned as a whole.
    cost = [array("d", (_GAP_COST * place for place in range(len(heard) + 1)))]
    back = [bytearray([_INSERTED]) * (len(heard) + 1)]
    for arc in arcs[1:]:
        is_nothing = arc.word == _NOTHING
        own, steps = array("d", bytes(8 * (len(heard) + 1))), bytearray(len(heard) + 1)
        deletion = _NOTHING_COST if is_nothing else _GAP_COST
        for place in range(len(heard) + 1):
            before = min(arc.before, key=lambda one: cost[one][place])
            deleted = cost[before][place] + deletion
            if place == 0:
                own[0], steps[0] = deleted, _DELETED
                continue
            source = min(arc.before, key=lambda one: cost[one][place - 1])
            replaced = cost[source][place - 1] + (0.0 if arc.word == heard[place - 1] else _SUBSTITUTION)
            inserted = own[place - 1] + _GAP_COST
            if not is_nothing and replaced <= deleted and replaced <= inserted:
                own[place], steps[place] = replaced, _REPLACED
            elif deleted < inserted:
                own[place], steps[place] = deleted, _DELETED
            else:
                own[place], steps[place] = inserted, _INSERTED
        cost.append(own)
        back.append(steps)
    number, place = min(last, key=lambda one: cost[one][-1]), len(heard)
    pairs: list[tuple[str, str]] = []
    while number > 0 or place > 0:
        step = back[number][place]
        earlier = place if step == _DELETED else place - 1
        source = number if step == _INSERTED else min(arcs[number].before, key=lambda one: cost[one][earlier])
        word = GAP if step == _INSERTED else arcs[number].word
        if word != _NOTHING:
            pairs.append((word, GAP if earlier == place else heard[place - 1]))
        number, place = source, earlier
    return pairs[::-1]


def is_nist(path: str | Path) -> bool:
    """Whether a file is CTM, STM or TRN, by its suffix."""
    return str(path).lower().endswith(SUFFIXES)


def read_words(path: str | Path) -> Transcripts:
    """The words of a TRN by utterance, or of a CTM or STM by recording.

    Raises:
        AsrError: the file cannot be read, or a line is malformed.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".trn":
        return read_trn(path)
    found: dict[str, list[str]] = defaultdict(list)
    if suffix == ".ctm":
        for (recording, _), timed in read_ctm(path).items():
            found[recording] += [word.text for word in timed]
    else:
        for segment in read_stm(path):
            found[segment.recording] += () if segment.is_ignored else segment.words
    return {name: tuple(words) for name, words in found.items()}


MARKS = ("{", "/", "}", _NOTHING)
"""What writes alternatives in references."""


def resolve(
    references: Mapping[str, Sequence[str]], hypotheses: Mapping[str, Sequence[str]]
) -> tuple[Transcripts, Transcripts]:
    """Replaces alternatives by those that match the hypothesis best, and converts all words to lower case.

    Raises:
        AsrError: alternatives of a reference are malformed.
    """
    heard = {name: tuple(map(_folded, words)) for name, words in hypotheses.items()}
    chosen = {}
    for name, words in references.items():
        if not _ALIGNED.isdisjoint(words):
            pairs = align(words, heard.get(name, ()), name)
            chosen[name] = tuple(word for word, _ in pairs if word != GAP)
        else:
            chosen[name] = tuple(map(_folded, words))
    return chosen, heard


def format_trn(transcripts: Mapping[str, Sequence[str]]) -> str:
    """Lines `words ... (id)`, for a TRN file."""
    names = {name: re.sub(r"[()\s]+", "_", name) for name in transcripts}
    return "".join(f"{' '.join(words)} ({names[name]})\n" for name, words in transcripts.items())
