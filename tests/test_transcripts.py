"""Formats of transcripts: what other programs read is exactly what they expect."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from asr.errors import AsrError
from asr.nist import read_stm
from asr.results import RecognitionResult, StageTimes, Word
from asr.transcripts import FORMATS, Transcript, cues, format_transcript, parse_formats, unique_names

WORDS = (
    Word("SHE", 0.5, 0.7, 0.9),
    Word("SAID", 0.7, 1.0, 0.25),
    Word('"A<B"', 3.0, 3.25, 1.0),
    Word("OVERLAPS", 3.2, 3.2, 1.0),
)
TALK = Transcript("talk", WORDS, 4.0, {"audio": "talk.wav", "text": "SHE SAID"})

EXPECTED = {
    "txt": 'SHE SAID "A<B" OVERLAPS\n',
    "jsonl": '{"audio": "talk.wav", "text": "SHE SAID"}\n',
    "srt": ('1\n00:00:00,500 --> 00:00:01,000\nSHE SAID\n\n2\n00:00:03,000 --> 00:00:03,200\n"A<B" OVERLAPS\n\n'),
    "vtt": (
        'WEBVTT\n\n00:00:00.500 --> 00:00:01.000\nSHE SAID\n\n00:00:03.000 --> 00:00:03.200\n"A&lt;B" OVERLAPS\n\n'
    ),
    "tsv": 'start\tend\ttext\n500\t1000\tSHE SAID\n3000\t3200\t"A<B" OVERLAPS\n',
    "ctm": (
        "talk 1 0.500 0.200 SHE 0.9000\ntalk 1 0.700 0.300 SAID 0.2500\n"
        'talk 1 3.000 0.250 "A<B" 1.0000\ntalk 1 3.200 0.000 OVERLAPS 1.0000\n'
    ),
    "stm": 'talk 1 talk 0.500 1.000 SHE SAID\ntalk 1 talk 3.000 3.200 "A<B" OVERLAPS\n',
    "trn": 'SHE SAID "A<B" OVERLAPS (talk)\n',
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_document_is_as_specified(name: str) -> None:
    assert format_transcript(TALK, name) == EXPECTED[name]


def test_words_end_in_a_ctm_where_they_end_in_json() -> None:
    word = Word("CRITICISM", 142.4394, 143.0096)
    (line,) = format_transcript(Transcript("talk", (word,), 150.0, {}), "ctm").splitlines()
    begin, length = map(float, line.split()[2:4])
    assert (begin, begin + length) == pytest.approx((word.as_dict()["start"], word.as_dict()["end"]), abs=1e-9)


def test_json_is_one_object() -> None:
    assert json.loads(format_transcript(TALK, "json")) == TALK.record


def test_a_result_becomes_a_transcript() -> None:
    result = RecognitionResult(WORDS, -1.0, -2.0, 0.0, -3.0, True, StageTimes(4.0))
    transcript = Transcript.of(result, "a talk.wav")
    assert transcript == Transcript("a_talk.wav", WORDS, 4.0, {"audio": "a talk.wav", **result.as_dict()})
    assert format_transcript(transcript, "srt") == EXPECTED["srt"]


def test_a_recording_may_be_named_by_its_path_and_odd_arguments_are_told() -> None:
    result = RecognitionResult(WORDS[:1], 0.0, 0.0, 0.0, 0.0, True, StageTimes(1.0))
    transcript = Transcript.of(result, Path("a b/talk.wav"))
    assert (transcript.name, transcript.record["audio"]) == ("a_b_talk.wav", "a b/talk.wav")
    assert json.loads(format_transcript(transcript, "json"))["audio"] == "a b/talk.wav"
    with pytest.raises(AsrError, match=r"result is of type list; give the result of one recording, such as recog"):
        Transcript.of([result], "talk")  # type: ignore[arg-type]
    with pytest.raises(AsrError, match="name is of type NoneType; give the name or path of the recording"):
        Transcript.of(result, None)  # type: ignore[arg-type]
    for name in ("SubRip", None):
        with pytest.raises(AsrError, match=r"there is no format .* of transcripts; there are txt, json, jsonl, srt"):
            format_transcript(transcript, name)  # type: ignore[arg-type]


def test_intervals_of_a_textgrid_cover_the_recording_without_overlap() -> None:
    text = format_transcript(TALK, "textgrid")
    assert text.startswith('File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\nxmax = 4.0000\n')
    begins, ends = ([float(time) for time in re.findall(rf" {name} = ([\d.]+)", text)] for name in ("xmin", "xmax"))
    begins, ends = begins[1:], ends[1:]  # of the tier
    assert begins[0] == 0.0 and ends[-1] == 4.0 and begins[1:] == ends[:-1]
    assert all(end > begin for begin, end in zip(begins, ends, strict=True))
    assert re.findall(r'text = "(.*)"', text) == ["", "SHE", "SAID", "", '""A<B""', "OVERLAPS", ""]
    assert "intervals: size = 7" in text


def test_times_that_differ_in_the_last_digits_give_no_empty_interval() -> None:
    """Where segments meet, and at the end of the last one, times are different sums of the same numbers."""
    words = (Word("A", 0.0, 0.1 + 0.7), Word("B", 0.8000000000000003, 0.1 + 0.7 + 0.4))
    text = format_transcript(Transcript("talk", words, 1.2000000000000004, {}), "textgrid")
    assert re.findall(r'text = "(.*)"', text) == ["A", "B"]


def test_a_first_word_in_angle_brackets_is_no_label(tmp_path: Path) -> None:
    path = tmp_path / "talk.stm"
    path.write_text(
        format_transcript(Transcript("talk", (Word("<unk>", 0.0, 0.2), Word("A", 0.2, 0.4)), 1.0, {}), "stm")
    )
    assert [segment.words for segment in read_stm(path)] == [("<unk>", "A")]


@pytest.mark.parametrize("name", FORMATS)
def test_a_recording_without_words(name: str) -> None:
    text = format_transcript(Transcript("quiet", (), 0.0, {"audio": "quiet.wav"}), name)
    expected = {"txt": "\n", "srt": "", "vtt": "WEBVTT\n\n", "ctm": "", "stm": "", "trn": "(quiet)\n"}
    assert text == expected.get(name, text)


def test_a_clock_rounds_over_minutes_and_hours() -> None:
    late = Transcript("late", (Word("A", 59.9996, 3599.9999),), 3600.0, {})
    assert "00:01:00,000 --> 01:00:00,000" in format_transcript(late, "srt")


@pytest.mark.parametrize("seed", range(20))
def test_subtitles_are_short_enough_to_read(seed: int) -> None:
    """Two lines of 42 characters and 7 seconds; characters that WebVTT writes longer do not count more."""
    chooser = random.Random(seed)
    texts = ["WORDS", "A", "UNDERSTANDING", "OF", "INTERNATIONAL", "R&B"]
    words = [Word(chooser.choice(texts), 0.3 * place, 0.3 * place + 0.3) for place in range(100)]
    found = list(cues(words))
    assert [word for cue in found for word in cue.words] == words
    assert max(cue.end - cue.begin for cue in found) <= 7.0 + 1e-9
    talk = Transcript("long", tuple(words), 30.0, {})
    shown = [part.split("\n")[2:] for part in format_transcript(talk, "srt").strip().split("\n\n")]
    assert [" ".join(lines) for lines in shown] == [cue.text for cue in found]
    assert all(len(lines) <= 2 and max(map(len, lines)) <= 42 for lines in shown)
    # Where there are two lines, no other break would make the longer one shorter.
    for lines in shown:
        if len(lines) == 2:
            all_words = " ".join(lines).split()
            halves = [(all_words[:place], all_words[place:]) for place in range(1, len(all_words))]
            longest = [max(len(" ".join(one)), len(" ".join(other))) for one, other in halves]
            assert max(map(len, lines)) == min(longest)
    vtt = [part.split("\n")[1:] for part in format_transcript(talk, "vtt").strip().split("\n\n")[1:]]
    assert [[line.replace("&amp;", "&") for line in lines] for lines in vtt] == shown


def test_a_word_longer_than_a_line_has_a_subtitle_of_its_own() -> None:
    words = (Word("A", 0.0, 0.1), Word("B" * 90, 0.1, 1.0), Word("C", 1.0, 1.1))
    assert [cue.text for cue in cues(words)] == ["A", "B" * 90, "C"]


def test_names_are_unique_and_hold_no_white_space() -> None:
    assert unique_names(["a", "b c", "a", "a.2", "a", "d/(e)"]) == ["a", "b_c", "a.2", "a.2.2", "a.3", "d_e_"]


def test_formats_by_name() -> None:
    assert parse_formats("SRT, json,srt") == ("srt", "json")
    for wrong in ("docx", "", ","):
        with pytest.raises(AsrError, match="there is no such format; there are txt, json"):
            parse_formats(wrong)
