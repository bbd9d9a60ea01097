"""Evaluations as files, and lattices as graphs of words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asr.decoding.lattice_links import Link, lattice_from_links
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.reports.evaluation import SCLITE, Clip, Evaluation, HeardWord, Utterance
from asr.reports.word_graph import END, START, word_graph
from asr.text.symbols import Vocabulary


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    utterances = (
        Utterance("a", ("one",), (HeardWord("one", 0.0, 0.5, 0.75),), 0.5, {"search": 0.25}, Clip("a.wav", 1.0, 2.0)),
        Utterance("b", (), (HeardWord("x"),), error="gone"),
    )
    cache = ({"audio_seconds": 1.0, "num_queries": 4.0},)
    one = Evaluation("name", utterances, {"wer": None}, {"mode": "rnn"}, SCLITE, cache)
    one.save(tmp_path / "name.json")
    assert Evaluation.load(tmp_path / "name.json") == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[]", "is not an evaluation"),
        ("{", "is not an evaluation"),
        ({"version": 9}, "has version 9, not 1"),
        ({"utterances": [{"id": "a"}]}, "a field that is missing or wrong .KeyError: 'words'"),
        ({"utterances": 3}, "a field that is missing or wrong"),
        ({"utterances": {}}, "'utterances' must be a list of objects"),
        ({"utterances": [3]}, "'utterances' must be a list of objects"),
        ({"utterances": [{"id": 3, "reference": [], "words": []}]}, "'id' must be a string"),
        ({"utterances": [{"id": "a", "reference": "one", "words": []}]}, "'reference' must be a list of strings"),
        ({"utterances": [{"id": "a", "reference": [], "words": {}}]}, "'words' must be a list of objects"),
        ({"utterances": [{"id": "a", "reference": [], "words": [{"text": 1}]}]}, "'text' must be a string"),
        ({"utterances": [{"id": "a", "reference": [], "words": [], "audio": "a.wav"}]}, "'audio' must be an object"),
        ({"summary": [["wer", 1]]}, "'summary' must be an object"),
        ({"system": None}, "'system' must be an object"),
        ({"scoring": 3}, "'scoring' must be 'shortest' or 'sclite'"),
        ({"scoring": "SCLITE"}, "'scoring' must be 'shortest' or 'sclite'"),
        ({"cache": {}}, "'cache' must be a list of objects"),
        ({"cache": [3]}, "'cache' must be a list of objects"),
        ({"lattices": []}, "'lattices' must be an object"),
        ({"lattices": {"a": {"words": [], "links": [[0, 7, 1.0]]}}}, "a word follows one that does not exist"),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "it.json"
    Evaluation("it", (), {}).save(path)
    path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))  # type: ignore[dict-item]
    with pytest.raises(AsrError, match=message) as caught:
        Evaluation.load(path)
    assert "asr evaluate" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_equal_words_at_about_the_same_time_are_one() -> None:
    """A of probability 3/4 at two times, or B; then C."""
    score = [float(torch.tensor(share).log()) for share in (0.5, 0.25, 0.25)]
    links = [
        Link(0, 1, 4, 1, am_score=score[0]),  # A at once, then a frame without a word
        Link(1, 3, 0, 1),
        Link(0, 2, 0, 1, am_score=score[1]),  # A a frame later
        Link(2, 3, 4, 1),
        Link(0, 4, 5, 1, am_score=score[2]),  # B
        Link(4, 5, 0, 1),
        Link(3, 6, 6, 1),
        Link(5, 6, 6, 1),
    ]
    lattice = lattice_from_links(7, 0, links, {6: (0.0, 0.0)}, "toy")
    graph = word_graph(lattice, Vocabulary(["A", "B", "C"]), DecodingOptions(), frame_seconds=0.1)
    found = {word.text: (word.start, round(word.probability, 3)) for word in graph.words}
    assert found == {"A": (0.0, 0.75), "B": (0.0, 0.25), "C": (0.2, 1.0)}
    names = {START: "<", END: ">", **{number: word.text for number, word in enumerate(graph.words)}}
    follows = {(names[link.src], names[link.dst]): round(link.probability, 3) for link in graph.links}
    assert follows == {("<", "A"): 0.75, ("<", "B"): 0.25, ("A", "C"): 0.75, ("B", "C"): 0.25, ("C", ">"): 1.0}
    few = word_graph(lattice, Vocabulary(["A", "B", "C"]), DecodingOptions(), 0.1, least_probability=0.5)
    assert [word.text for word in few.words] == ["A", "C"]
