"""N-best lists that other recognizers wrote, in all their forms, against lists worked out by hand."""

from __future__ import annotations

import gzip
import json
import math
import struct
from pathlib import Path

import pytest

from asr.cli.main import main
from asr.decoding.nbest_io import read_n_best, read_n_best_folder
from asr.decoding.word_lattice import Candidate, rescore_list
from asr.errors import AsrError
from asr.testing.tones import TEXT

LOG_10 = math.log(10.0)
WORDS = {0: "", 1: "PAT", 2: "KIT", 3: "ZEBRA"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_lists_in_text_and_json(folder: Path) -> None:
    (folder / "a").write_text("u1\t-3.5\tPAT KIT\nu1\t-4\tPAT\nu2\t-1\t\n")
    assert read_n_best(folder / "a") == {
        "u1": [Candidate(("PAT", "KIT"), -3.5), Candidate(("PAT",), -4.0)],
        "u2": [Candidate((), -1.0)],
    }
    (folder / "b").write_text("u1\tPAT KIT\n")
    assert read_n_best(folder / "b") == {"u1": [Candidate(("PAT", "KIT"))]}
    entries = [{"text": "PAT", "score": -1}, {"text": "KIT", "scores": {"am": -2, "lm": -3, "graph": -4}}]
    entries.append({"text": "", "score": 0})
    (folder / "c").write_text(json.dumps({"audio": "x/u3.wav", "nbest": entries}) + "\n")
    expected = [Candidate(("PAT",), -1.0), Candidate(("KIT",), -2.0, -7.0), Candidate(())]
    assert read_n_best(folder / "c") == {"u3": expected}


def test_ends_of_sentences_in_json(folder: Path) -> None:
    entries = [{"text": "PAT KIT", "score": -1, "sentence_ends": [1]}, {"text": "KIT", "scores": {"am": -2}}]
    entries.append({"text": "KIT PAT", "scores": {"am": -3, "lm": -4}, "sentence_ends": [0, 1, 2]})
    (folder / "a").write_text(json.dumps({"id": "u", "nbest": [*entries[1:]]}) + "\n")
    (folder / "b").write_text(json.dumps({"id": "u", **entries[0]}) + "\n")
    last = Candidate(("KIT", "PAT"), -3.0, -4.0, sentence_ends=(0, 1, 2))
    assert read_n_best(folder / "a") == {"u": [Candidate(("KIT",), -2.0), last]}
    assert read_n_best(folder / "b") == {"u": [Candidate(("PAT", "KIT"), -1.0, sentence_ends=(1,))]}


@pytest.mark.parametrize("ends", ["1", "[2, 1]", "[1.0]", "[true]", "[-1]", "[3]", '["1"]', "null"])
def test_wrong_ends_of_sentences_are_one_sentence(folder: Path, ends: str) -> None:
    (folder / "a").write_text(f'{{"id": "u", "text": "PAT KIT", "sentence_ends": {ends}}}\n')
    with pytest.raises(AsrError, match=r"a:1: 'sentence_ends' (must be a list|is \[.*, but the sentence has 2 words)"):
        read_n_best(folder / "a")


def test_lines_of_transcribe_without_a_list_keep_their_words(folder: Path) -> None:
    scores = {"am": -2.0, "graph": -1.0, "lm": -3.0, "total": -5.0}
    records = [
        {"audio": "x/whole.wav", "text": "KIT", "scores": scores, "nbest": [{"text": "PAT", "scores": scores}]},
        {"audio": "x/best.wav", "text": "PAT KIT", "words": [], "scores": scores, "complete": False},
        {"audio": "x/failed.wav", "error": "the audio is damaged"},
    ]
    (folder / "a").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_n_best(folder / "a") == {
        "whole": [Candidate(("PAT",), -2.0, -4.0)],
        "best": [Candidate(("PAT", "KIT"), -2.0, -4.0)],
        "failed": [],
    }
    (folder / "b").write_text('{"id": "u"}\n')
    with pytest.raises(AsrError, match=r"b:1: expected an object with 'id' or 'audio' and 'nbest'"):
        read_n_best(folder / "b")


def test_only_line_feeds_end_lines(folder: Path) -> None:
    """JSON need not escape other characters that Python takes for ends of lines."""
    (folder / "a").write_text('{"id": "u\u20281", "nbest": [{"text": "PAT\u0085KIT"}]}\n{"id": "u2", "nbest": []}\r\n')
    assert read_n_best(folder / "a") == {"u\u20281": [Candidate(("PAT", "KIT"))], "u2": []}
    (folder / "b").write_bytes(b"u1\t-3.5\tPAT KIT\r\nu2\t-1\t\r\n")
    assert read_n_best(folder / "b") == {"u1": [Candidate(("PAT", "KIT"), -3.5)], "u2": [Candidate((), -1.0)]}
    (folder / "c").write_bytes(b"NBestList1.0\r\n(0) PAT\r\n")
    assert read_n_best(folder / "c") == {"c": [Candidate(("PAT",))]}


SRILM = "-120.5 -7.25 2 PAT KIT\n-121 -6 1 <s> PAT -pau- </s>\n-119 -9 0\n"


def test_lists_of_srilm(folder: Path) -> None:
    """Logarithms to the base of 10; an utterance is named like its file."""
    expected = [
        Candidate(("PAT", "KIT"), -120.5 * LOG_10, -7.25 * LOG_10),
        Candidate(("PAT",), -121 * LOG_10, -6 * LOG_10),
        Candidate((), -119 * LOG_10, -9 * LOG_10),
    ]
    (folder / "a.b.score").write_text(SRILM)
    (folder / "c.gz").write_bytes(gzip.compress(SRILM.encode()))
    assert read_n_best(folder / "a.b.score") == {"a.b": expected}
    assert read_n_best_folder(folder) == {"a.b": expected, "c": expected}
    (folder / "a.b.gz").write_bytes(gzip.compress(SRILM.encode()))
    with pytest.raises(AsrError, match=r"a\.b\.score: the utterance 'a\.b' occurs twice"):
        read_n_best_folder(folder)


def test_lists_of_decipher(folder: Path) -> None:
    """Its scores are logarithms to the base of 1.0001, divided by 1024: here those of 1 / 8 and of 1 / 16."""
    eighth = round(math.log(1 / 8) / math.log(1.0001) / 1024)
    (folder / "talk.nbest").write_text(f"NBestList1.0\n({eighth}) PAT -pau- KIT\n( -40 ) ZEBRA\n")
    (named,) = read_n_best(folder / "talk.nbest").items()
    assert named[0] == "talk" and [one.words for one in named[1]] == [("PAT", "KIT"), ("ZEBRA",)]
    assert named[1][0].am_score == pytest.approx(math.log(1 / 8), abs=0.06)  # rounded to an integer
    assert named[1][1].am_score == pytest.approx(-40 * 1024 * math.log(1.0001))


def test_times_and_scores_of_words_are_decipher_s(folder: Path) -> None:
    """Phones and states, which lie in the time of a word, are left out; so are pauses, but not their scores."""
    (folder / "talk").write_text(
        "NBestList2.0\n(-70) <s> ( st: 0.00 et: 0.09 g: 0 a: -5 ) PAT ( st: 0.10 et: 0.29 g: -10 a: -20 ) "
        "p[ae] ( st: 0.10 et: 0.19 g: 0 a: -11 ) p-1 ( st: 0.20 et: 0.29 g: 0 a: -9 ) "
        "-pau- ( st: 0.30 et: 0.39 g: -1 a: -4 ) KIT ( st: 0.40 et: 0.69 g: -8 a: -22 )\n(-80)\n"
    )
    one, empty = read_n_best(folder / "talk")["talk"]
    bytelog = 1024 * math.log(1.0001)
    assert one.words == ("PAT", "KIT") and one.times == ((0.1, pytest.approx(0.3)), (0.4, pytest.approx(0.7)))
    assert one.am_score == pytest.approx(-51 * bytelog) and one.lm_score == pytest.approx(-19 * bytelog)
    assert empty == Candidate(())


def integers(**entries: list[int]) -> bytes:
    """As Kaldi writes lists of integers."""
    return b"".join(
        f"{key.replace('_', '-')} ".encode() + struct.pack(f"<2sbi{len(ids)}i", b"\0B", 4, len(ids), *ids)
        for key, ids in entries.items()
    )


def floats(form: str = "f", **entries: float) -> bytes:
    return b"".join(
        f"{key.replace('_', '-')} ".encode() + struct.pack(f"<2sb{form}", b"\0B", struct.calcsize(form), cost)
        for key, cost in entries.items()
    )


EXPECTED = {
    "u-x": [Candidate(("PAT", "KIT"), -10.5, -3.0), Candidate(("ZEBRA",), -11.0, -4.5)],
    "v": [Candidate((), 2.0, -1.0)],
}
TEXTS = {
    "words": "u-x-2 3\nu-x-1 1 2\nv-1\n",
    "words_text": "u-x-2 ZEBRA\nu-x-1 PAT KIT\nv-1\n",
    "costs": "u-x-1 10.5 \nu-x-2 11\nv-1 -2\n",
    "graph": "u-x-1\t3\nu-x-2\t4.5\nv-1\t1\n",
}


@pytest.mark.parametrize("names", [("ac_cost", "lm_cost"), ("acwt", "lmwt.withlm"), ("acwt.gz", "lmwt.nolm")])
@pytest.mark.parametrize("spoken", ["words", "words_text", "text"])
def test_folders_of_kaldi(folder: Path, names: tuple[str, str], spoken: str) -> None:
    (folder / spoken).write_text(TEXTS["words" if spoken == "words" else "words_text"])
    costs = TEXTS["costs"].encode()
    (folder / names[0]).write_bytes(gzip.compress(costs) if names[0].endswith(".gz") else costs)
    (folder / names[1]).write_text(TEXTS["graph"])
    (folder / "ali.gz").write_bytes(b"not looked at")
    assert read_n_best_folder(folder, WORDS) == EXPECTED
    if spoken == "words":
        with pytest.raises(AsrError, match="words: its words are numbers; give --words"):
            read_n_best_folder(folder)
        (folder / "text").write_text("u-x THE REFERENCE\n")  # as it stands in such folders
        assert read_n_best_folder(folder, WORDS) == EXPECTED


def test_binary_archives_of_kaldi(folder: Path) -> None:
    (folder / "words").write_bytes(integers(u_x_2=[3], u_x_1=[1, 2], v_1=[]))
    (folder / "acwt").write_bytes(floats(u_x_1=10.5, u_x_2=11, v_1=-2))
    (folder / "lmwt.nolm").write_bytes(floats("d", u_x_1=1, u_x_2=4, v_1=0.75))
    (folder / "lmwt.lmonly").write_bytes(floats(u_x_1=2, u_x_2=0.5, v_1=0.25))
    assert read_n_best_folder(folder, WORDS) == EXPECTED
    (folder / "lmwt.withlm").write_text(TEXTS["graph"].replace("4.5", "5"))  # counts before the two parts of it
    assert read_n_best_folder(folder, WORDS)["u-x"][1].lm_score == -5.0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("words", b"u 1 2\n", r"words: u: the name of a sentence must end with its number"),
        ("words", b"u-x-1 1 9\n", r"words: u-x-1: there is no word 9 in the word list"),
        ("words", b"u-x-1 PAT\n", r"words: u-x-1: there is no word PAT in the word list"),
        ("words", b"u-x-3 1\n", r"words: u-x-3: this sentence has no cost; the files .* do not belong together"),
        ("words", integers(u_x_1=[1, 2])[:-3], r"words: u-x-1: the archive ends within an entry"),
        ("words", b"u-x-1 \0B\4\xff\xff\xff\xff", r"words: u-x-1: this is not a list of integers"),
        ("words", integers(u_x_1=[1]) + b"?", r"words: byte \d+: expected the name of a sentence"),
        ("acwt", b"u-x-1 10 11\n", r"acwt: u-x-1: expected one cost"),
        ("acwt", b"u-x-1 nan\n", r"acwt: u-x-1: 'nan' is not a finite number"),
        ("acwt", floats(u_x_1=math.inf), r"acwt: u-x-1: 'inf' is not a finite number"),
        ("acwt", b"u-x-1 \0B\3abc", r"acwt: u-x-1: this is not a number"),
    ],
)
def test_wrong_folders_are_one_sentence(folder: Path, name: str, content: bytes, message: str) -> None:
    for file, text in (("words", TEXTS["words"]), ("acwt", TEXTS["costs"])):
        (folder / file).write_text(text)
    (folder / name).write_bytes(content)
    with pytest.raises(AsrError, match=message):
        read_n_best_folder(folder, WORDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("-1 -2 1 PAT\nPAT KIT\n", "list:2: expected acoustic score, language model score, number of words"),
        ("-1 nan 1 PAT\n", "list:1: 'nan' is not a finite number"),
        ("-1 1e31 1 PAT\n", "list:1: '1e31' is not a finite number of at most"),
        ("u1\t-3\tPAT\nu2\tKIT\nu1\tKIT\n", "list:3: only some sentences of 'u1' have a score"),
        (
            '{"id": "u1", "nbest": [{"text": "PAT", "score": -3}, {"text": "KIT"}]}',
            "list:1: only some sentences of 'u1' have a score",
        ),
        ("NBestList1.0\n-3 PAT\n", "list:2: expected a score in parentheses, then words"),
        ("NBestList1.0\n(x) PAT\n", "list:2: 'x' is not a finite number"),
        ("NBestList2.0\n(-3) PAT\n", r"list:2: expected 'word \( st: 0\.1 et: 0\.3 g: -10 a: -900 \)'"),
        ("NBestList2.0\n(-3) PAT ( st: x et: 1 g: 1 a: 1 )\n", "list:2: 'x' is not a finite number"),
    ],
)
def test_wrong_lists_are_one_sentence(folder: Path, content: str, message: str) -> None:
    (folder / "list").write_text(content)
    with pytest.raises(AsrError, match=message):
        read_n_best(folder / "list")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('"nbest": {}', "'nbest' must be a list, not {}"),
        ('"scores": -3', "'scores' must be an object with 'am', not -3; add it, or give 'score'"),
        ('"scores": null, "score": -3', "'scores' must be an object with 'am', not None"),
        ('"scores": {"lm": -1}', "'scores' must be an object with 'am', not {'lm': -1}"),
        ('"scores": {"am": true}', "'am' must be a number of at most 1e.30, not True"),
        ('"scores": {"am": -1, "lm": NaN}', "'lm' must be a number of at most 1e.30, not nan"),
        ('"scores": {"am": -1, "graph": [2]}', r"'graph' must be a number of at most 1e.30, not \[2\]"),
        ('"score": false', "'score' must be a number of at most 1e.30, not False"),
        ('"nbest": [{"text": "PAT", "score": "-3"}]', "'score' must be a number of at most 1e.30, not '-3'"),
        (f'"score": -1, "lm_score": 1{"0" * 400}', "'lm_score' must be a number of at most 1e.30, not 10{39}[.]"),
    ],
)
def test_a_wrong_field_of_an_object_is_named(folder: Path, fields: str, message: str) -> None:
    (folder / "list").write_text(f'{{"id": "u1", "text": "PAT"}}\n{{"id": "u2", "text": "KIT", {fields}}}\n')
    with pytest.raises(AsrError, match=f"list:2: {message}"):
        read_n_best(folder / "list")


def test_the_command_takes_folders_and_gives_times(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "text").write_text("\n".join(TEXT) + "\n")
    assert main(["lm", "ngram", "--text", str(folder / "text"), "--order", "2", "--arpa", str(folder / "2.arpa")]) == 0
    kaldi, timed, empty = folder / "archives.1", folder / "timed", folder / "empty"
    for each in (kaldi, timed, empty):
        each.mkdir()
    (kaldi / "words").write_text(TEXTS["words"])
    (kaldi / "ac_cost").write_text(TEXTS["costs"])
    (folder / "words.txt").write_text("<eps> 0\nPAT 1\nKIT 2\nZEBRA 3\n")
    (timed / "talk").write_text("NBestList2.0\n(-9) PAT ( st: 0.10 et: 0.29 g: -1 a: -2 )\n")
    capsys.readouterr()
    model, words = ["--ngram", str(folder / "2.arpa")], ["--words", str(folder / "words.txt")]
    assert (
        main(["rescore", str(kaldi), str(timed), *model, *words, "--am-scale", "0.1", "--jsonl", "--nbest", "2"]) == 0
    )
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["id"] for record in records] == ["u-x", "v", "talk"]
    assert {one["scores"]["am"] for one in records[0]["nbest"]} == {-10.5, -11.0}
    assert records[2]["words"] == [{"word": "PAT", "start": 0.1, "end": 0.3}]
    assert main(["rescore", str(timed), *model, "--output-format", "ctm"]) == 0
    assert capsys.readouterr().out == "talk 1 0.100 0.200 PAT\n"
    assert main(["rescore", str(kaldi), *model, *words, "--output-format", "ctm"]) == 2
    assert "u-x: ctm needs times, which this input does not have" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr("asr.cli.rescore.language_model", lambda *_: pytest.fail("rescoring begins"))
        assert main(["rescore", str(timed), str(kaldi), *model, *words, "--output-format", "stm"]) == 2
    assert "u-x: stm needs times, which this input does not have" in capsys.readouterr().err
    (kaldi / "words").rename(kaldi / "words_text")
    for inputs in (kaldi, timed):
        assert main(["rescore", str(inputs), *model, *words]) == 2
        assert "--words has no effect here: it is for lattices and lists with numbers" in capsys.readouterr().err
    assert main(["rescore", str(empty), *model]) == 2
    assert "there are no n-best lists in this folder" in capsys.readouterr().err
    nothing = folder / "nothing.txt"
    nothing.touch()
    assert main(["rescore", str(nothing), *model]) == 2
    assert f"{nothing}: there are no lattices or n-best lists" in capsys.readouterr().err
    assert main(["rescore", str(nothing), str(timed), *model]) == 0


def test_words_are_printed_as_soon_as_they_are_known(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption or an error after hours leaves what was rescored before it."""
    (folder / "text").write_text("\n".join(TEXT) + "\n")
    assert main(["lm", "ngram", "--text", str(folder / "text"), "--order", "2", "--arpa", str(folder / "2.arpa")]) == 0
    (folder / "list").write_text("u1\tPAT\nu2\tKIT\n")
    command = ["rescore", str(folder / "list"), "--ngram", str(folder / "2.arpa")]
    calls = []

    def fails_later(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise AsrError("it cannot go on.")
        return rescore_list(*arguments)

    monkeypatch.setattr("asr.cli.rescore.rescore_list", fails_later)
    capsys.readouterr()
    assert main(command) == 2
    assert capsys.readouterr().out == "u1 PAT\n"
    calls.clear()
    assert main([*command, "--output", str(folder / "out")]) == 2
    assert not (folder / "out").exists()  # a file is whole, or not there


def test_json_without_spaces_is_no_lattice_of_kaldi(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ngram = folder / "words.arpa"
    ngram.write_text("\\data\\\nngram 1=3\n\n\\1-grams:\n-99 <s>\n-1 </s>\n-1 yes\n\n\\end\\\n")
    path = folder / "list.jsonl"
    path.write_text('{"id":"u1","nbest":[{"text":"yes","score":-1}]}\n')
    assert main(["rescore", str(path), "--ngram", str(ngram)]) == 0
    assert capsys.readouterr().out == "u1 yes\n"
