"""`asr graph`: a graph from files, and every kind of bad input in one clear sentence."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from asr.bundle import Bundle
from asr.cli.main import main
from asr.graph.decoding_graph import DecodingGraph
from asr.text.symbols import TokenTable

ARPA = """\\data\\
ngram 1=5
ngram 2=2

\\1-grams:
-99 <s> -0.3
-0.7 </s>
-1.0 <unk>
-0.6 ONE -0.2
-0.8 TWO -0.1

\\2-grams:
-0.3 <s> ONE
-0.4 ONE TWO

\\end\\
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "lexicon.txt").write_text("ONE W AH1 N\nTWO T UW1\nTHREE TH R IY1\n")
    (tmp_path / "tokens.txt").write_text("<blk>\nAH\nIY\nN\nR\nT\nTH\nUW\nW\n")
    (tmp_path / "lm.arpa").write_text(ARPA.replace("99 ", "99\t").replace(" -0.", "\t-0."))
    return tmp_path


def run(files: Path, *options: str) -> int:
    arguments = ["graph"]
    for option, name in (
        ("--lexicon", "lexicon.txt"),
        ("--arpa", "lm.arpa"),
        ("--tokens", "tokens.txt"),
        ("--output", "graph.safetensors"),
    ):
        if option not in options:
            arguments += [option, str(files / name)]
    return main([*arguments, *options])


def test_a_lexicon_and_a_model_in_lower_case(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lexicon.txt", "lm.arpa"):
        text = (files / name).read_text()
        words = {word: word.lower() for word in ("ONE", "TWO", "THREE")}
        (files / name).write_text("".join(words.get(word, word) for word in re.split(r"(\s)", text)))
    assert run(files) == 0
    assert json.loads(capsys.readouterr().out)["words_without_pronunciation"] == 0
    assert {"one", "two"} <= set(DecodingGraph.load(files / "graph.safetensors").vocabulary.words)


def test_tokens_of_a_bundle(files: Path, tiny_bundle_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "lexicon.txt").write_text("ONE P T\nTWO K S\n")
    assert run(files, "--tokens", str(tiny_bundle_folder)) == 0
    tokens = Bundle.load(tiny_bundle_folder).graph.tokens
    DecodingGraph.load(files / "graph.safetensors", tokens)
    assert run(files, "--tokens", str(files)) == 2
    assert "bundle.json is missing" in capsys.readouterr().err


def test_graph_and_summary(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["words"] == 2 and summary["words_without_pronunciation"] == 0
    assert summary["lexicon_words_outside_model"] == 1
    graph = DecodingGraph.load(files / "graph.safetensors", TokenTable.from_file(files / "tokens.txt"))
    assert summary["sizes"]["decoding graph"] == {"states": graph.num_states, "arcs": graph.num_arcs}
    assert graph.vocabulary.words[4:] == ("ONE", "TWO")
    assert graph.meta["topology"] == "ctc" and graph.meta["language_model_order"] == 2
    assert run(files, "--finished", "--output", str(files / "finished.safetensors")) == 0
    assert DecodingGraph.load(files / "finished.safetensors").num_arcs == graph.num_arcs


def test_words_without_pronunciation_are_listed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "lexicon.txt").write_text("ONE W AH1 N\n")
    assert run(files) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["words_without_pronunciation"] == 1
    assert "1 words of the model are not in the lexicon and cannot be recognized (TWO)" in output.err
    assert (files / "graph.safetensors.unpronounced.txt").read_text() == "TWO\n"


def test_a_second_lexicon_fills_in(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "first.txt").write_text("ONE W AH N\n")
    assert run(files, "--lexicon", str(files / "first.txt"), str(files / "lexicon.txt")) == 0
    assert json.loads(capsys.readouterr().out)["words"] == 2


def test_a_full_disk_is_one_sentence(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("asr.graph.decoding_graph.save", fail)
    assert run(files) == 2
    sentence = f"asr: error: {files / 'graph.safetensors'}: the file cannot be written (No space left on device); "
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "tokens.txt",
            "<blk>\nAH\nN\nW\n",
            "needs are missing (T UW); give the acoustic model's tokens (--tokens)",
        ),
        ("lexicon.txt", "one W AH N\nthree TH R IY\n", None),
        ("lexicon.txt", "FOUR N\n", "none of its words is in the language model"),
        ("lexicon.txt", "ONE\n", "the word 'ONE' has no pronunciation"),
        ("lm.arpa", ARPA.replace("ngram 2=2", "ngram 2=3"), "the header declares 3 2-grams"),
        ("lm.arpa", ARPA.replace("ONE TWO", "ONE SIX"), "the word 'SIX' has no unigram"),
        ("lm.arpa", "hello\n", "not an ARPA file"),
    ],
)
def test_bad_files(
    files: Path, name: str, content: str, message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / name).write_text(content)
    code = run(files)
    error = capsys.readouterr().err
    if message is None:  # lower-case words are read as upper-case ones
        assert code == 0 and "TWO" in error
    else:
        assert code == 2 and message in error and not (files / "graph.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "/nowhere/graph.safetensors"], "the folder /nowhere is not there"),
        (["--silence", "SIL"], "tokens that the lexicon or the topology needs are missing (SIL)"),
        (["--silence", "N", "--silence-probability", "1.5"], "give a number between 0 and 1"),
        (["--topology", "hmm-3"], "needs are missing (AH_1 AH_2 AH_3 N_1 N_2 and 10 more)"),
        (["--score-bits", "40"], "give a number from 1 to 14"),
        (["--lexicon", "/nowhere/lexicon.txt"], "/nowhere/lexicon.txt"),
    ],
)
def test_bad_options(files: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, *options) == 2
    assert message in capsys.readouterr().err
