"""Recognized words in the formats of other programs: subtitles, tables, NIST's CTM, STM and TRN, Praat's TextGrid.

Times are seconds from the beginning of a recording.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple

from asr.errors import AsrError
from asr.options import require_type
from asr.results import RecognitionResult, Word

# A subtitle ends at a pause this long, or before it exceeds the maximum duration.
_PAUSE_SECONDS = 0.8
_MAX_CUE_SECONDS = 7.0
_MAX_LINE_CHARACTERS = 42
# The minimum length of an interval.
_LEAST_SECONDS = 0.001
_CHANNEL = "1"
_TEXTGRID_DIGITS = 4


@dataclass(frozen=True)
class Transcript:
    """The words of one recording.

    Args:
        name: of the recording, without white space.
        words: in order, with times.
        duration: of the recording, in seconds.
        record: the content of the JSON formats.
    """

    name: str
    words: tuple[Word, ...]
    duration: float
    record: Mapping[str, Any]

    @classmethod
    def of(cls, result: RecognitionResult, name: str | PathLike[str]) -> Transcript:
        """The transcript of a recognizer's result; white space in the name is replaced.

        Raises:
            AsrError: an argument is of another type.
        """
        require_type(result, RecognitionResult, "result", "the result of one recording, such as recognizer(files)[0]")
        require_type(name, str | PathLike, "name", "the name or path of the recording")
        name = str(name)
        return cls(plain_name(name), result.words, result.duration, {"audio": name, **result.as_dict()})

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)


class Cue(NamedTuple):
    """Words that are shown together, from `begin` to `end` seconds."""

    begin: float
    end: float
    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)


def cues(words: Sequence[Word]) -> Iterator[Cue]:
    """Splits words into subtitles at pauses, and where a subtitle would get too long to read."""
    held: list[Word] = []
    for word in words:
        if held:
            lines = _lines(" ".join(one.text for one in (*held, word))).split("\n")
            is_long = max(map(len, lines)) > _MAX_LINE_CHARACTERS or word.end - held[0].start > _MAX_CUE_SECONDS
            if is_long or word.start - held[-1].end >= _PAUSE_SECONDS:
                yield _cue(held)
                held = []
        held.append(word)
    if held:
        yield _cue(held)


def _cue(words: Sequence[Word]) -> Cue:
    begin = words[0].start
    return Cue(begin, max(words[-1].end, begin + _LEAST_SECONDS), tuple(words))


def _lines(text: str) -> str:
    """The text of a subtitle as one line, or as two of about equal length."""
    breaks = [place for place, character in enumerate(text) if character == " "]
    if len(text) <= _MAX_LINE_CHARACTERS or not breaks:
        return text
    middle = min(breaks, key=lambda place: max(place, len(text) - 1 - place))
    return f"{text[:middle]}\n{text[middle + 1 :]}"


def _clock(seconds: float, mark: str) -> str:
    total = round(1000 * seconds)
    minutes, milliseconds = divmod(total, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{milliseconds // 1000:02d}{mark}{milliseconds % 1000:03d}"


def _srt(transcript: Transcript) -> Iterator[str]:
    for number, cue in enumerate(cues(transcript.words), start=1):
        yield f"{number}\n{_clock(cue.begin, ',')} --> {_clock(cue.end, ',')}\n{_lines(cue.text)}\n"


def _vtt(transcript: Transcript) -> Iterator[str]:
    yield "WEBVTT\n"
    for cue in cues(transcript.words):
        text = _lines(cue.text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        yield f"{_clock(cue.begin, '.')} --> {_clock(cue.end, '.')}\n{text}\n"


def _tsv(transcript: Transcript) -> Iterator[str]:
    yield "start\tend\ttext"
    for cue in cues(transcript.words):
        yield f"{round(1000 * cue.begin)}\t{round(1000 * cue.end)}\t{cue.text}"


def _ctm(transcript: Transcript) -> Iterator[str]:
    for word in transcript.words:
        confidence = "" if word.confidence is None else f" {word.confidence:.4f}"
        length = max(round(word.end, 3) - round(word.start, 3), 0.0)  # so that both add up to the end as rounded
        yield f"{transcript.name} {_CHANNEL} {word.start:.3f} {length:.3f} {_one_token(word.text)}{confidence}"


def _stm(transcript: Transcript) -> Iterator[str]:
    for cue in cues(transcript.words):
        text = " ".join(_one_token(word.text) for word in cue.words)
        # A first word such as <unk> would be read as the segment's labels.
        labels = "<O> " if text.startswith("<") else ""
        yield f"{transcript.name} {_CHANNEL} {transcript.name} {cue.begin:.3f} {cue.end:.3f} {labels}{text}"


def _trn(transcript: Transcript) -> Iterator[str]:
    yield f"{' '.join(_one_token(word.text) for word in transcript.words)} ({transcript.name})".lstrip()


def _one_token(word: str) -> str:
    """The word with white space replaced, as NIST's formats require."""
    return "_".join(word.split())


def _textgrid(transcript: Transcript) -> Iterator[str]:
    intervals: list[tuple[float, float, str]] = []
    position = 0.0
    for word in transcript.words:
        # Sums of the times of segments differ in the last digits; as written, no interval may be empty.
        begin = round(max(word.start, position), _TEXTGRID_DIGITS)
        end = round(max(word.end, begin + _LEAST_SECONDS), _TEXTGRID_DIGITS)
        if begin > position:
            intervals.append((position, begin, ""))
        intervals.append((begin, end, word.text))
        position = end
    total = round(max(transcript.duration, position, _LEAST_SECONDS), _TEXTGRID_DIGITS)
    if total > position:
        intervals.append((position, total, ""))
    yield 'File type = "ooTextFile"\nObject class = "TextGrid"\n'
    yield f"xmin = 0\nxmax = {total:.4f}\ntiers? <exists>\nsize = 1\nitem []:\n    item [1]:"
    yield f'        class = "IntervalTier"\n        name = "words"\n        xmin = 0\n        xmax = {total:.4f}'
    yield f"        intervals: size = {len(intervals)}"
    for number, (begin, end, text) in enumerate(intervals, start=1):
        quoted = text.replace('"', '""')
        yield f"        intervals [{number}]:\n            xmin = {begin:.4f}\n            xmax = {end:.4f}"
        yield f'            text = "{quoted}"'


def _txt(transcript: Transcript) -> Iterator[str]:
    yield transcript.text


def _json(transcript: Transcript) -> Iterator[str]:
    yield json.dumps(transcript.record, indent=2, ensure_ascii=False)


def _jsonl(transcript: Transcript) -> Iterator[str]:
    yield json.dumps(transcript.record, ensure_ascii=False)


class Format(NamedTuple):
    """A format of transcripts.

    Args:
        help: description for users.
        write: yields the parts of a document, each without its last line break.
        is_joinable: whether the documents of several recordings may follow each other in one file.
    """

    help: str
    write: Callable[[Transcript], Iterator[str]]
    is_joinable: bool


FORMATS: dict[str, Format] = {
    "txt": Format("the words", _txt, True),
    "json": Format("everything, as one JSON object", _json, False),
    "jsonl": Format("everything, as a line of JSON", _jsonl, True),
    "srt": Format("SubRip subtitles", _srt, False),
    "vtt": Format("WebVTT subtitles", _vtt, False),
    "tsv": Format("a table of the subtitles, in ms", _tsv, False),
    "ctm": Format("NIST: a word with its times on each line", _ctm, True),
    "stm": Format("NIST: an utterance with its times on each line", _stm, True),
    "trn": Format("NIST: words (name)", _trn, True),
    "textgrid": Format("Praat, a tier of words", _textgrid, False),
}
SUFFIXES = {name: ".TextGrid" if name == "textgrid" else f".{name}" for name in FORMATS}


def format_transcript(transcript: Transcript, name: str) -> str:
    """The transcript in a format of `FORMATS`; ends with a line break unless it is empty.

    Raises:
        AsrError: there is no such format.
    """
    if name not in FORMATS:
        raise AsrError(f"there is no format {name!r} of transcripts; there are {', '.join(FORMATS)}.")
    return "".join(f"{part}\n" for part in FORMATS[name].write(transcript))


def plain_name(stem: str) -> str:
    """A recording's name with characters replaced that some format does not allow."""
    return re.sub(r"[\s()/]+", "_", stem) or "_"


def unique_names(stems: Sequence[str], taken_before: Iterable[str] = ()) -> list[str]:
    """Distinct names for recordings, in order; of equal names, the second gets the suffix `.2`, the third `.3`.

    Args:
        stems: short names, which need not be unique.
        taken_before: names that other recordings have.
    """
    taken = set(taken_before)
    last: dict[str, int] = {}
    names = []
    for stem in map(plain_name, stems):
        name, number = stem, last.get(stem, 1)
        while name in taken:
            number += 1
            name = f"{stem}.{number}"
        last[stem] = number
        taken.add(name)
        names.append(name)
    return names


def parse_formats(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of format names; duplicates are dropped.

    Raises:
        AsrError: there is no such format.
    """
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise AsrError(f"--output-format {text}: there is no such format; there are {', '.join(FORMATS)}.")
    return names
