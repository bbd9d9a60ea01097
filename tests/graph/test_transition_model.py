"""Kaldi's transition model, in its three forms, and graphs of transition ids."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from asr.cli.main import main
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.graph.imported import import_graph
from asr.graph.transition_model import read_transition_pdfs

# Phone 1 has two states, each with a self-loop and a way on; phone 2 has one. Destinations of each state:
ENTRIES = [[[0, 1], [1, 2], []], [[0, 1], []]]
STATES = [(1, 0, 4), (1, 1, 0), (2, 0, 2), (2, 0, 3)]  # phone, state, pdf
PDFS = [-1, 4, 4, 0, 0, 2, 2, 3, 3]
LOOP_PDFS = [5, 1, 6, 7]
CHAIN_PDFS = [-1, 5, 4, 1, 0, 6, 2, 7, 3]


def as_text(is_chain: bool) -> bytes:
    lines = ["<TransitionModel>", "<Topology>"]
    for phone, states in enumerate(ENTRIES, start=1):
        lines += ["<TopologyEntry>", "<ForPhones>", str(phone), "</ForPhones>"]
        for number, following in enumerate(states):
            classes = "<ForwardPdfClass> 0 <SelfLoopPdfClass> 1" if is_chain else f"<PdfClass> {number}"
            ways = " ".join(f"<Transition> {dst} 0.5" for dst in following)
            lines.append(f"<State> {number} {classes if following else ''} {ways} </State>")
        lines.append("</TopologyEntry>")
    kind = "Tuples" if is_chain else "Triples"
    lines += ["</Topology>", f"<{kind}> {len(STATES)}"]
    for state, loop in zip(STATES, LOOP_PDFS, strict=True):
        lines.append(" ".join(map(str, (*state, loop) if is_chain else state)))
    return "\n".join(
        [*lines, f"</{kind}>", "<LogProbs>", "[ 0 -0.7 ]", "</LogProbs>", "</TransitionModel>", ""]
    ).encode()


def as_binary(is_chain: bool) -> bytes:
    def number(value: int) -> bytes:
        return struct.pack("<bi", 4, value)

    def numbers(values: list[int]) -> bytes:
        return number(len(values)) + struct.pack(f"<{len(values)}i", *values)

    content = b"\0B<TransitionModel> <Topology> " + numbers([1, 2]) + numbers([-1, 0, 1])
    content += number(-1) * is_chain + number(len(ENTRIES))
    for states in ENTRIES:
        content += number(len(states))
        for following in states:
            content += number(0) * (1 + is_chain) + number(len(following))
            content += b"".join(number(dst) + struct.pack("<bf", 4, 0.5) for dst in following)
    kind = b"Tuples" if is_chain else b"Triples"
    content += b"</Topology> <" + kind + b"> " + number(len(STATES))
    for state, loop in zip(STATES, LOOP_PDFS, strict=True):
        content += b"".join(map(number, (*state, loop) if is_chain else state))
    return content + b"</" + kind + b"> <LogProbs> FV " + number(0) + b"</LogProbs> </TransitionModel> <DIMENSION> "


def as_shown(is_chain: bool) -> bytes:
    lines, transition = [], 0
    for number, ((phone, state, pdf), loop) in enumerate(zip(STATES, LOOP_PDFS, strict=True), start=1):
        outputs = f"forward-pdf = {pdf} self-loop-pdf = {loop}" if is_chain else f"pdf = {pdf}"
        lines.append(f"Transition-state {number}: phone = p{phone} hmm-state = {state} {outputs}")
        for dst in ENTRIES[phone - 1][state]:
            transition += 1
            way = "self-loop" if dst == state else f"{state} -> {dst}"
            lines.append(f" Transition-id = {transition} p = 0.5 count of pdf = 12 [{way}]")
    return "\n".join([*lines, ""]).encode()


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("form", [as_text, as_binary, as_shown])
def test_the_output_of_each_transition(form, is_chain: bool, tmp_path: Path) -> None:
    (tmp_path / "final.mdl").write_bytes(form(is_chain))
    found = read_transition_pdfs(tmp_path / "final.mdl")
    assert found.dtype == np.int32
    assert found.tolist() == (CHAIN_PDFS if is_chain else PDFS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (as_binary(False)[:120], "not a Kaldi transition model, or it is damaged; give final.mdl"),
        (as_text(True)[:-80], "not a Kaldi transition model, or it is damaged"),
        (as_text(False).replace(b"2 0 3\n", b"9 0 3\n"), "not a Kaldi transition model, or it is damaged"),
        (as_text(False).replace(b"2 0 3\n", b"2 0 -3\n"), "an output below 0"),
        (as_shown(False).replace(b"Transition-id = 2 ", b"Transition-id = 3 "), ":3: expected the transition id 2"),
        (as_shown(False) + b"more\n", "'more' is not what show-transitions prints"),
    ],
)
def test_damaged_files_are_told(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "final.mdl").write_bytes(content)
    with pytest.raises(AsrError, match=message):
        read_transition_pdfs(tmp_path / "final.mdl")


def hclg(path: Path) -> Path:
    """A reads the transitions 2 1* 4 3*, B 6 5*, with an epsilon between words; in OpenFst's binary format."""
    arcs = [
        [(2, 1, 0.5, 1), (6, 2, 0.25, 3)],
        [(1, 0, 0.125, 1), (4, 0, 0.0, 2)],
        [(3, 0, 0.125, 2), (0, 0, 1.0, 0)],
        [(5, 0, 0.125, 3), (0, 0, 1.0, 0)],
    ]
    final = [float("inf"), float("inf"), 0.5, 0.75]
    content = struct.pack("<i", 2125659606) + b"\6\0\0\0vector" + b"\x08\0\0\0standard"
    content += struct.pack("<iiQqqq", 2, 0, 3, 0, len(arcs), 0)
    for weight, leaving in zip(final, arcs, strict=True):
        content += struct.pack("<fq", weight, len(leaving)) + b"".join(struct.pack("<iifi", *arc) for arc in leaving)
    path.write_bytes(content)
    return path


def test_a_graph_of_transition_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Frames that say A A B: pdfs 4 5 0 1 by the chain topology, 4 0, then 2 6."""
    (tmp_path / "final.mdl").write_bytes(as_binary(True))
    (tmp_path / "words.txt").write_text("<eps> 0\nA 1\nB 2\n#0 3\n")
    hclg(tmp_path / "HCLG.fst")
    given = ["--words", f"{tmp_path}/words.txt", "--tokens", f"{tmp_path}/final.mdl"]
    assert main(["graph", "--from", f"{tmp_path}/HCLG.fst", *given, "--output", f"{tmp_path}/g.safetensors"]) == 0
    assert json.loads(capsys.readouterr().out)["words"] == 2
    graph = DecodingGraph.load(tmp_path / "g.safetensors")
    assert graph.tokens.tokens == ("<blk>", *(f"pdf_{column}" for column in range(1, 8)))
    columns = torch.tensor([4, 5, 0, 1, 4, 0, 2, 6])
    likelihood = torch.full((1, 8, 8), -30.0).scatter(2, columns[None, :, None], 2.0)
    best = TokenPassingDecoder(graph, inputs="scores").decode(likelihood)[0].best
    assert best is not None
    assert best.words == ("A", "A", "B")
    assert best.am_score == pytest.approx(16.0)
    ways = 0.5 + 0.125 + 0.125 + 1.0 + 0.5 + 1.0 + 0.25 + 0.125
    assert best.graph_score == pytest.approx(-ways - 0.75, abs=1e-3)


def test_a_graph_of_transition_ids_without_its_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("<eps> 0\nA 1\nB 2\n")
    (tmp_path / "tokens.txt").write_text("<blk> 0\na 1\nb 2\n")
    with pytest.raises(AsrError, match=r"Kaldi's transition ids \(HCLG\.fst\) needs its final\.mdl instead"):
        import_graph(hclg(tmp_path / "HCLG.fst"), tmp_path / "words.txt", tmp_path / "tokens.txt")
