"""Archives of Kaldi's lattices: binary ones hold what their text says."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest

from asr.cli.main import main
from asr.decoding.kaldi_lattice import read_kaldi_archive, read_kaldi_lattices
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from tests.reference.lattice_paths import all_sentences

WORDS = {0: "", 1: "A", 2: "B"}
ARPA = "\\data\\\nngram 1=4\n\n\\1-grams:\n-9 <s>\n-1 </s>\n-1 A\n-1 B\n\n\\end\\\n"
# state, following state, word, graph cost, acoustic cost, transition ids; without a following state the end.
ARCS = [
    (0, 1, 1, 0.5, 10.25, (3, 3, 4)),
    (0, 1, 2, 0.75, 9.5, (5, 6)),
    (1, 2, 0, 0.0, 1.0, ()),
    (1, None, 0, 2.0, 3.5, (7,)),
    (2, None, 0, 0.25, 0.5, (8, 8)),
]


def binary(kind: str = "compactlattice44", arcs: list[tuple] = ARCS, fst: str = "vector") -> bytes:
    """As Kaldi writes it: OpenFst's header, then for each state its end and its arcs."""

    def text(value: str) -> bytes:
        return struct.pack("<i", len(value)) + value.encode()

    def weight(graph_cost: float, am_cost: float, ids: tuple[int, ...]) -> bytes:
        packed = struct.pack("<ff", graph_cost, am_cost)
        return packed + (struct.pack(f"<i{len(ids)}i", len(ids), *ids) if kind.startswith("compact") else b"")

    num_states = 1 + max(max(arc[0], arc[1] or 0) for arc in arcs)
    content = struct.pack("<i", 2125659606) + text(fst) + text(kind) + struct.pack("<iiQqqq", 2, 0, 3, 0, num_states, 0)
    for state in range(num_states):
        ends = [arc for arc in arcs if arc[0] == state and arc[1] is None]
        content += weight(*ends[0][3:]) if ends else weight(float("inf"), float("inf"), ())
        leaving = [arc for arc in arcs if arc[0] == state and arc[1] is not None]
        content += struct.pack("<q", len(leaving))
        for _, dst, word, graph_cost, am_cost, ids in leaving:
            label = word if kind.startswith("compact") else len(ids)
            content += struct.pack("<ii", label, word) + weight(graph_cost, am_cost, ids) + struct.pack("<i", dst)
    return content


def text(arcs: list[tuple] = ARCS) -> str:
    lines = []
    for src, dst, word, graph_cost, am_cost, ids in arcs:
        weight = f"{graph_cost},{am_cost},{'_'.join(map(str, ids))}"
        lines.append(f"{src} {weight}" if dst is None else f"{src} {dst} {word} {weight}")
    return "\n".join(lines) + "\n"


def read(path: Path, content: bytes) -> list:
    path.write_bytes(content)
    return list(read_kaldi_archive(path, WORDS, 0.03))


def test_binary_lattices_are_those_of_their_text(tmp_path: Path) -> None:
    archive = b"utt-1 " + binary() + b"utt-2 " + binary()
    found = read(tmp_path / "lat.1", archive)
    expected = read(tmp_path / "lat.txt", f"utt-1 \n{text()}\nutt-2 \n{text()}\n".encode())
    assert [vars(one) for one in found] == [vars(one) for one in expected]
    assert [one.name for one in found] == ["utt-1", "utt-2"]
    assert found[0].final == {1: (-3.5, -2.0), 2: (-0.5, -0.25)}
    assert [(arc.word, arc.am_score, arc.lm_score) for arc in found[0].arcs] == [
        ("A", -10.25, -0.5),
        ("B", -9.5, -0.75),
        ("", -1.0, 0.0),
    ]
    assert found[0].time == pytest.approx({0: 0.0, 1: 0.09, 2: 0.09})
    (tmp_path / "lat.1.gz").write_bytes(gzip.compress(archive))
    packed = list(read_kaldi_archive(tmp_path / "lat.1.gz", WORDS, 0.03))
    assert [vars(one) for one in packed] == [vars(one) for one in found]
    (alone,) = read(tmp_path / "utt-1.lat", binary())
    assert vars(alone) == vars(found[0])


def test_lattices_that_are_not_compact(tmp_path: Path) -> None:
    """An arc with a transition id is a frame."""
    (found,) = read(tmp_path / "lat.1", b"utt " + binary("lattice44"))
    assert [arc.word for arc in found.arcs] == ["A", "B", ""]
    assert found.time == pytest.approx({0: 0.0, 1: 0.03, 2: 0.03})


def test_lattices_of_frames_are_those_of_their_text(tmp_path: Path) -> None:
    arcs = [(0, 1, 1, 0.5, 10.25, (3, 3, 4)), (0, 1, 2, 0.75, 9.5, (5, 6, 1)), (1, None, 0, 2.0, 3.5, ())]
    (tmp_path / "lat.1").write_bytes(b"utt " + binary(arcs=arcs))
    (tmp_path / "lat.txt").write_text(f"utt\n{text(arcs)}\n")
    ((name, found),) = read_kaldi_lattices(tmp_path / "lat.1", 3)
    ((_, expected),) = read_kaldi_lattices(tmp_path / "lat.txt", 3)
    assert name == "utt" and sorted(found.token_id.tolist()) == [0, 2, 2, 3, 4, 5]
    for field, value in vars(found).items():
        assert value.tolist() == getattr(expected, field).tolist(), field
    # Of lattices that are not compact, each arc with a transition id is a frame.
    (tmp_path / "plain.txt").write_text("utt\n0 1 7 2 0.5,1.5\n1 2 0 0 0.25,0\n2 1,2\n")
    ((_, plain),) = read_kaldi_lattices(tmp_path / "plain.txt", 3)
    assert plain.token_id.tolist() == [6] and all_sentences(plain, DecodingOptions()) == {(2,): -5.25}


def test_arcs_of_no_path_are_left_out(tmp_path: Path) -> None:
    (found,) = read(tmp_path / "lat.1", b"utt " + binary(arcs=[*ARCS, (0, 2, 2, float("inf"), 1.0, ())]))
    assert len(found.arcs) == 3


def test_a_binary_archive_is_rescored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lat.1.gz").write_bytes(gzip.compress(b"utt " + binary()))
    (tmp_path / "words.txt").write_text("<eps> 0\nA 1\nB 2\n")
    (tmp_path / "m.arpa").write_text(ARPA)
    given = [f"{tmp_path}/lat.1.gz", "--words", f"{tmp_path}/words.txt", "--ngram", f"{tmp_path}/m.arpa"]
    assert main(["rescore", *given]) == 0
    assert capsys.readouterr().out == "utt B\n"
    # A is worse by 0.75 in its acoustic score and better by 0.25 in its graph score.
    assert main(["rescore", *given, "--am-scale", "0.1", "--old-lm-scale", "1.0"]) == 0
    assert capsys.readouterr().out == "utt A\n"


@pytest.mark.parametrize("is_binary", [True, False])
def test_empty_lattices_have_no_sentence(tmp_path: Path, is_binary: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A recognizer that found nothing writes an empty lattice; the others of the archive are rescored."""
    empty = b"u1 " + binary(arcs=[(0, None, 0, float("inf"), 0.0, ())]) if is_binary else b"u1 \n\n"
    (tmp_path / "lat.1").write_bytes(empty + (b"u2 " + binary() if is_binary else f"u2 \n{text()}\n".encode()))
    (tmp_path / "words.txt").write_text("<eps> 0\nA 1\nB 2\n")
    (tmp_path / "2.arpa").write_text(ARPA)
    given = [str(tmp_path / "lat.1"), "--words", str(tmp_path / "words.txt"), "--ngram", str(tmp_path / "2.arpa")]
    assert main(["rescore", *given]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[0] == "u1" and output.out.splitlines()[1] in ("u2 A", "u2 B")
    assert "u1: there is no complete sentence in the input" in output.err
    with pytest.raises(AsrError, match="u1: the lattice is empty"):
        list(read_kaldi_lattices(tmp_path / "lat.1", 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"utt " + binary()[:-3], "cut short or damaged"),
        (b"utt " + binary() + b"second", "expected the name of an utterance"),
        (b"utt " + binary() + b"no second", "expected an OpenFst transducer"),
        (b"utt " + binary("standard"), "not a lattice but a transducer of type 'vector' with arcs of type 'standard'"),
        (b"utt " + binary(fst="const"), "not a lattice but a transducer of type 'const'"),
        (b"utt " + binary(arcs=[(0, None, 0, float("nan"), 0.0, ())]), "a weight is not a number"),
        (b"utt " + binary(arcs=[(0, 1, 7, 0.0, 0.0, ())]), "no word 7 in the word list"),
    ],
)
def test_what_is_no_lattice_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(AsrError, match=message):
        read(tmp_path / "lat.1", content)
