"""CTM, STM and TRN, and sclite's way of counting; the expected numbers are sclite's own (SCTK 2.4.10)."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from asr.cli.main import main
from asr.errors import AsrError
from asr.metrics import alignment_errors, score_transcripts
from asr.nist import align, format_trn, match_segments, read_ctm, read_stm, read_trn, resolve

SCLITE = shutil.which("sclite") or "/usr/lib/sctk/bin/sclite"

# Reference, hypothesis, and sclite's correct words, substitutions, deletions and insertions.
SCORED = [
    ("the cat sat on the mat", "cat sat in the the mat", (4, 1, 1, 1)),
    ("{ gonna / going to } do it", "going to do it now", (4, 0, 0, 1)),
    ("(uh) hello there", "hello their", (1, 1, 1, 0)),
    ("a b c d e", "b c x d f e", (4, 0, 1, 2)),
    ("THE Cat", "the cat", (2, 0, 0, 0)),
    ("{ x / @ } y z", "y z", (2, 0, 0, 0)),
    ("%hesitation well- yes", "well yes", (1, 1, 1, 0)),
    # The fewest errors would be 13 and 6 here: two substitutions cost more than what sclite takes instead.
    ("e f a b f f c a f c f f e d", "a c c c e c b a e b d a d d", (4, 8, 2, 2)),
    ("d c d d e b", "f d f c a", (1, 4, 1, 0)),
]


def counts(reference: str, hypothesis: str) -> tuple[int, int, int, int]:
    found = alignment_errors(align(reference.split(), hypothesis.split()))
    correct = found.num_ref - found.num_substitutions - found.num_deletions
    return correct, found.num_substitutions, found.num_deletions, found.num_insertions


@pytest.mark.parametrize(("reference", "hypothesis", "expected"), SCORED)
def test_errors_are_sclite_s(reference: str, hypothesis: str, expected: tuple[int, int, int, int]) -> None:
    assert counts(reference, hypothesis) == expected


def test_of_equally_cheap_alignments_an_insertion_comes_before_a_deletion() -> None:
    assert align(["a", "b"], ["b", "a"]) == [("a", ""), ("b", "b"), ("", "a")]


def test_a_long_recording_is_aligned_in_little_memory() -> None:
    words = [str(number % 97) for number in range(150)]
    tracemalloc.start()
    pairs = align(words, words[1:])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pairs == [("0", ""), *zip(words[1:], words[1:], strict=True)]
    assert peak < 20 * len(words) ** 2


def test_errors_of_random_sentences_are_sclite_s(tmp_path: Path) -> None:
    if not Path(SCLITE).is_file():
        pytest.skip("sclite (Debian's package sctk) is not installed")
    generator = random.Random(0)
    sentences = [[generator.choice("abcdE") for _ in range(generator.randint(1, 15))] for _ in range(600)]
    references, hypotheses = ({f"s_{i}": sentences[2 * i + k] for i in range(300)} for k in range(2))
    (tmp_path / "ref.trn").write_text(format_trn(references))
    (tmp_path / "hyp.trn").write_text(format_trn(hypotheses))
    command = [SCLITE, "-r", "ref.trn", "trn", "-h", "hyp.trn", "trn", "-i", "rm", "-o", "pra", "stdout"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    scores = re.findall(r"id: \((s_\d+)\)\nScores: \(#C #S #D #I\) (.*)\n", shown)
    assert len(scores) == 300
    for name, numbers in scores:
        assert counts(" ".join(references[name]), " ".join(hypotheses[name])) == tuple(map(int, numbers.split())), name


STM = """\
;; comment
f1 1 spk 0.0 2.0 <o,f0> a b c
f1 1 spk 3.0 5.0 <o,f0> d e f
f1 1 excl 5.0 6.0 IGNORE_TIME_SEGMENT_IN_SCORING
f1 1 spk2 6.0 8.0 <o,f0> g { h / i j } k
f2 A spk 0.0 2.0 l m
"""
CTM = """\
;; comment
f1 1 0.5 0.2 b 0.9
f1 1 0.1 0.2 a 0.9
f1 1 1.9 0.5 x 0.9
f1 1 2.4 0.2 gap
f1 1 2.8 0.3 gap2 0.9
f1 1 3.0 0.2 d 0.9
f1 1 4.0 0.2 e 0.9
f1 1 5.2 0.2 ign 0.9
f1 1 6.1 0.2 G 0.9
f1 1 6.4 0.2 i 0.9
f1 1 6.6 0.2 j 0.9
f1 1 7.4 0.2 k 0.9
f1 1 8.4 0.2 late 0.9
f2 A 0.4 0.2 l 0.9
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "ref.stm").write_text(STM)
    (tmp_path / "hyp.ctm").write_text(CTM)
    return tmp_path


def test_words_belong_to_segments_as_for_sclite(files: Path) -> None:
    references, hypotheses = match_segments(read_stm(files / "ref.stm"), read_ctm(files / "hyp.ctm"))
    assert hypotheses == {
        "spk-000": ("a", "b"),
        "spk-001": ("x", "gap", "gap2", "d", "e"),
        "spk2-000": ("G", "i", "j", "k", "late"),
        "spk-002": ("l",),
    }
    chosen, _ = resolve(references, hypotheses)
    assert chosen["spk2-000"] == ("g", "i", "j", "k")


def test_the_mark_for_nothing_is_no_characters_either() -> None:
    references, hypotheses = resolve({"a": ("GOOD", "@", "BYE")}, {"a": ("good", "bye")})
    assert references == {"a": ("good", "bye")}
    report = score_transcripts(references, hypotheses)
    assert report.total_characters.num_errors == 0 and report.total_characters.num_ref == len("good bye")


def test_segments_that_overlap_or_are_equal_are_filled_in_their_order(files: Path) -> None:
    """sclite takes the words before a segment's end for it, then goes on with the next segment."""
    (files / "ref.stm").write_text(
        "f 1 a 0 10 one two\nf 1 b 1 3 yes\nf 1 a 12 14 three\nf 1 c 20 22 x\nf 1 c 20 22 x\n"
    )
    (files / "hyp.ctm").write_text("f 1 1.5 0.2 one\nf 1 4 0.2 two\nf 1 9.75 0.5 end\nf 1 13 0.2 three\nf 1 21 0.2 x\n")
    hypotheses = match_segments(read_stm(files / "ref.stm"), read_ctm(files / "hyp.ctm"))[1]
    assert hypotheses == {
        "a-000": ("one", "two"),
        "b-000": (),
        "a-001": ("end", "three"),
        "c-000": ("x",),
        "c-001": (),
    }


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, float]:
    assert main(["evaluate", *map(str, arguments), "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_scores_ctm_stm_and_trn(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {"words": 12, "substitutions": 0, "deletions": 3, "insertions": 4, "utterances": 4}
    arguments = (files / "hyp.ctm", "--reference", files / "ref.stm", "--export", files / "sclite")
    assert evaluate(capsys, *arguments).items() >= expected.items()
    trn = (files / "sclite" / "hyp.trn", "--reference", files / "sclite" / "ref.trn")
    assert evaluate(capsys, *trn).items() >= expected.items()
    assert evaluate(capsys, *trn, "--compare", files / "sclite" / "hyp.trn")["other_wer"] == pytest.approx(7 / 12)
    records = []
    for name in ("f1", "f2"):
        rows = [line.split() for line in CTM.splitlines() if line.startswith(name)]
        words = [{"word": row[4], "start": float(row[2]), "end": float(row[2]) + float(row[3])} for row in rows]
        records.append(json.dumps({"audio": f"audio/{name}.wav", "text": "", "words": words}) + "\n")
    (files / "hyp.jsonl").write_text("".join(records))
    assert evaluate(capsys, files / "hyp.jsonl", "--reference", files / "ref.stm").items() >= expected.items()


def test_a_ctm_is_scored_against_whole_recordings(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "ref.txt").write_text("f1 A B x GAP gap2 d e ign g i j k late\nf2 L M\n")
    found = evaluate(capsys, files / "hyp.ctm", "--reference", files / "ref.txt")
    assert (found["substitutions"], found["deletions"], found["insertions"], found["words"]) == (0, 1, 0, 15)


@pytest.mark.parametrize(
    ("suffix", "line", "message"),
    [
        ("trn", "words without an id", "ends with its id in parentheses"),
        ("trn", "a (x)\nb (x)", "'x' occurs twice"),
        ("trn", "{ a / b (x)", r"x: alternatives are written '\{ one / other \}'"),
        ("trn", "a } b (x)", "'}' is outside alternatives"),
        ("trn", "{ / b } (x)", "alternatives are written"),
        ("ctm", "f1 1 0.0 word", "a line of a CTM file is"),
        ("ctm", "f1 1 0.0 -1 word", "a line of a CTM file is"),
        ("ctm", "f1 1 * * <ALT_BEGIN>", "alternatives in a CTM are not supported"),
        ("stm", "f1 1 spk 2 1 words", "a line of an STM file is"),
        ("stm", "f1 1 spk nan 1 words", "a line of an STM file is"),
    ],
)
def test_wrong_lines_are_one_sentence(suffix: str, line: str, message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / f"a.{suffix}").write_text(f"{line}\n")
    (tmp_path / "hyp").write_text("x a\n")
    assert main(["evaluate", str(tmp_path / "hyp"), "--reference", str(tmp_path / f"a.{suffix}")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_a_recording_that_the_reference_has_not(files: Path) -> None:
    (files / "hyp.ctm").write_text("f3 1 0 1 word\n")
    with pytest.raises(AsrError, match="the recording 'f3', channel 1, is not in the reference"):
        match_segments(read_stm(files / "ref.stm"), read_ctm(files / "hyp.ctm"))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    words = {"a": ("x", "y"), "b": ()}
    (tmp_path / "a.trn").write_text(format_trn(words))
    assert read_trn(tmp_path / "a.trn") == words
