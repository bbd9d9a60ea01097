from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from asr.results import Alternative, RecognitionResult, StageTimes, StreamResult, Word, joined, later_cache


def test_stages_add_up():
    times = StageTimes(audio_seconds=2.0)
    with times.measure("features"):
        time.sleep(0.02)
    with times.measure("search"):
        pass
    with times.measure("features"):
        time.sleep(0.02)
    assert list(times.stages) == ["features", "search"]
    assert 0.04 <= times.stages["features"] < 1.0
    assert times.real_time_factor == pytest.approx(times.total / 2.0)
    total = StageTimes()
    total.add(times)
    total.add(times.scaled(0.5))
    assert total.audio_seconds == 2.0
    assert total.total == pytest.approx(1.5 * times.total)
    assert "real-time factor" in total.format()
    assert StageTimes().format() == "nothing was recognized"


def test_a_failing_stage_is_still_timed():
    times = StageTimes()
    with pytest.raises(ValueError, match="no"), times.measure("search"):
        raise ValueError("no")
    assert "search" in times.stages
    assert times.real_time_factor == 0.0


def test_sentences_of_segments_are_combined_and_their_words_copied_once():
    totals = [[-1.0, -1.125, -1.5], [-2.0, -9.0], [0.0, -0.25, -8.0]]
    pieces, offsets = [], [0.0, 10.0, 25.0]
    for segment, own in enumerate(totals):
        alternatives = tuple(
            Alternative((Word(f"{segment}{number}", 1.0, 2.0),), total - 1.0, 0.25, 0.75, total)
            for number, total in enumerate(own)
        )
        pieces.append(
            RecognitionResult((), 0.0, 0.0, 0.0, 0.0, True, StageTimes(10.0), hypotheses=alternatives),
        )
    found = joined(pieces, offsets).hypotheses
    combined = sorted(
        itertools.product(*(piece.hypotheses for piece in pieces)), key=lambda one: -sum(a.total for a in one)
    )
    assert [one.text for one in found] == [" ".join(part.text for part in parts) for parts in combined[:3]]
    for one, parts in zip(found, combined, strict=False):
        assert one.total == sum(part.total for part in parts) and one.am_score == one.total - 3.0
        assert (one.graph_score, one.lm_score) == (0.75, 2.25)
        assert [(word.start, word.end) for word in one.words] == [(1.0, 2.0), (11.0, 12.0), (26.0, 27.0)]
    words = [word for one in found for word in one.words]
    assert len({id(word) for word in words}) == len(set(words)) < len(words)


def test_sentences_end_where_segments_do():
    words = tuple(Word(text, 0.0, 1.0) for text in "ABC")
    lists = [(words[:2], ()), ((), ()), (words, (1, 2))]
    pieces = [
        RecognitionResult((), 0, 0, 0, 0, True, StageTimes(1.0), hypotheses=(Alternative(own, 0, 0, 0, 0, ends),))
        for own, ends in lists
    ]
    (found,) = joined(pieces, [0.0, 1.0, 2.0]).hypotheses
    assert found.text == "A B A B C" and found.as_dict()["sentence_ends"] == [2, 2, 3, 4]
    (alone,) = joined(pieces[:1], [0.0]).hypotheses
    assert "sentence_ends" not in alone.as_dict()


def test_counts_that_have_grown_most_are_the_latest():
    assert later_cache({"num_queries": 3}, {}, {"num_queries": 7}, {"num_queries": 5}) == {"num_queries": 7}
    assert later_cache({}, {"num_queries": 0}) == {"num_queries": 0}


def test_json_has_all_values_in_times_of_a_millisecond_and_scores_of_four_digits():
    exact = (-1.23456, -2.34567, -3.45678, -7.03701)
    scores = {"am": -1.2346, "graph": -2.3457, "lm": -3.4568, "total": -7.037}
    words = Word("A", 0.12349, 0.5), Word("B", 0.75, 1.00051, 0.98765)
    listed = [
        {"word": "A", "start": 0.123, "end": 0.5},
        {"word": "B", "start": 0.75, "end": 1.001, "confidence": 0.9877},
    ]
    times = StageTimes(2.00049, {"search": 0.123456, "features": 0.5})
    assert times.as_dict() == {"real_time_factor": 0.3117, "seconds": {"search": 0.123, "features": 0.5}}
    assert StageTimes(0.0, {"search": 1.0}).as_dict()["real_time_factor"] is None
    result = RecognitionResult(words, *exact, False, times)
    plain = {"text": "A B", "duration": 2.0, "words": listed, "scores": scores, "complete": False}
    plain["seconds"] = {"search": 0.1235, "features": 0.5}
    assert result.as_dict() == plain
    more = replace(result, hypotheses=(Alternative(words[1:], *exact),), notes=("unsure",))
    assert more.as_dict() == {**plain, "nbest": [{"text": "B", "scores": scores}], "notes": ["unsure"]}
    partial = StreamResult(3, False, "", 1.23456, 2.34567, words, 1)
    heard = {"begin": 1.235, "end": 2.346, "text": "A B", "words": listed}
    assert partial.as_dict() == {"type": "partial", **heard, "settled": 1}
    final = replace(partial, is_final=True, reason="pause", is_complete=False)
    final = replace(final, **dict(zip(("am_score", "graph_score", "lm_score", "total"), exact, strict=True)))
    expected = {"type": "final", **heard, "reason": "pause", "complete": False, "scores": scores}
    assert final.as_dict() == expected
    assert replace(final, notes=("noise",)).as_dict() == {**expected, "notes": ["noise"]}
