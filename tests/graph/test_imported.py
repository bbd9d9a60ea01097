"""Graphs that OpenFst and k2 wrote, in their own formats: their decoders and ours find the same."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asr.cli.main import main
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.graph.imported import import_graph
from asr.graph.openfst import read_openfst
from tests.graph.test_exactness import random_frames
from tests.reference.graph_search import word_sequence_scores
from tests.reference.harmful_pickle import HarmfulPickle

TOKENS = ["<blk>", "a", "b", "c"]
WORDS = {"<eps>": 0, "X": 1, "Y": 2, "Z": 3, "#0": 4, "<s>": 5, "</s>": 6}
LEXICON = {"X": "ab", "Y": "b", "Z": "ca"}
# Source, destination, word, cost: bigrams of X and Y, and an epsilon that backs off to the unigrams.
GRAMMAR = [(0, 1, "X", 0.5), (1, 0, "Y", 0.25), (1, 2, "", 0.75), (2, 1, "X", 1.0), (2, 2, "Y", 2.0), (2, 2, "Z", 1.5)]
GRAMMAR_ENDS = {0: 0.125, 2: 0.5}


@pytest.fixture
def symbols(tmp_path: Path) -> tuple[Path, Path]:
    """words.txt and tokens.txt as icefall writes them, disambiguation symbols included."""
    words, tokens = tmp_path / "words.txt", tmp_path / "tokens.txt"
    words.write_text("".join(f"{word} {number}\n" for word, number in WORDS.items()))
    listed = [*TOKENS, "#0", "#1"]
    tokens.write_text("".join(f"{token} {number}\n" for number, token in enumerate(listed)))
    return words, tokens


def ctc_topology() -> list[tuple[int, int, int, int]]:
    """Source, destination, column that is read, token that is written; state t has read token t last."""
    size = len(TOKENS)
    return [(s, t, t, t if t not in (0, s) else 0) for s in range(size) for t in range(size)]


def lexicon_arcs() -> list[tuple[int, int, int, int]]:
    arcs, states = [], 1
    for word, spelling in LEXICON.items():
        at = 0
        for place, token in enumerate(spelling):
            after = 0 if place == len(spelling) - 1 else states
            states += after > 0
            arcs.append((at, after, TOKENS.index(token), WORDS[word] if place == 0 else 0))
            at = after
    return arcs


def text_of(arcs: list[Any], ends: dict[int, float]) -> str:
    lines = [" ".join(map(str, arc)) for arc in arcs]
    return "\n".join([*lines, *(f"{state} {cost}" for state, cost in ends.items())]) + "\n"


def openfst_hlg() -> Any:
    """H composed with L and G by OpenFst; its labels are columns plus 1, and it has epsilons."""
    kaldifst = pytest.importorskip("kaldifst", reason="kaldifst is not installed", exc_type=ImportError)
    topology = kaldifst.compile(
        text_of([(s, t, c + 1, o) for s, t, c, o in ctc_topology()], dict.fromkeys(range(len(TOKENS)), 0.0))
    )
    lexicon = kaldifst.compile(text_of(lexicon_arcs(), {0: 0.0}))
    grammar = kaldifst.compile(
        text_of([(s, d, WORDS.get(w, 0), WORDS.get(w, 0), c) for s, d, w, c in GRAMMAR], GRAMMAR_ENDS)
    )
    for part, by in ((lexicon, "olabel"), (grammar, "ilabel")):
        kaldifst.arcsort(part, by)
    words = kaldifst.compose(lexicon, grammar)
    kaldifst.arcsort(words, "ilabel")
    kaldifst.arcsort(topology, "olabel")
    return kaldifst.compose(topology, words)


def written(hlg: Any, kind: str, path: Path) -> Path:
    import kaldifst

    (hlg if kind == "vector" else kaldifst.StdConstFst(hlg)).write(str(path))
    return path


@pytest.mark.parametrize("kind", ["vector", "const"])
def test_kaldi_decoder_and_our_search_find_the_same_in_its_graph(
    tmp_path: Path, symbols: tuple[Path, Path], kind: str
) -> None:
    hlg = openfst_hlg()
    kaldi_decoder = pytest.importorskip("kaldi_decoder", reason="kaldi-decoder is not installed", exc_type=ImportError)
    import kaldifst

    graph = import_graph(written(hlg, kind, tmp_path / "HLG.fst"), *symbols)
    assert graph.tokens.tokens == tuple(TOKENS) and graph.vocabulary.words[4:] == ("X", "Y", "Z")
    assert not graph.has_epsilons
    for num_frames in (1, 3, 5, 6):
        log_prob = random_frames(num_frames, len(TOKENS))
        decodable = kaldi_decoder.DecodableCtc(log_prob.numpy())
        decoder = kaldi_decoder.FasterDecoder(hlg, kaldi_decoder.FasterDecoderOptions(beam=1e9))
        decoder.decode(decodable)
        found, path = decoder.get_best_path()
        scores = word_sequence_scores(graph, log_prob)
        assert found and scores
        _, _, words, weight = kaldifst.get_linear_symbol_sequence(path)
        best = max(scores, key=scores.__getitem__)
        assert [graph.vocabulary.words[word] for word in best] == [list(WORDS)[word] for word in words]
        assert scores[best] == pytest.approx(-(weight.value1 + weight.value2), abs=1e-4)


def test_k2_and_our_search_find_the_same_in_its_graph(tmp_path: Path, symbols: tuple[Path, Path]) -> None:
    """As icefall's compile_hlg.py makes it: epsilons removed, the words of an arc a ragged list."""
    k2 = pytest.importorskip("k2", reason="k2 is not installed", exc_type=ImportError)

    def fsa(arcs: list[Any], ends: dict[int, float]) -> Any:
        last = max(max(arc[:2]) for arc in arcs) + 1
        rows = sorted([*arcs, *((state, last, -1, -1, cost) for state, cost in ends.items())])
        return k2.Fsa.from_str(
            "\n".join(" ".join(map(str, row)) for row in rows) + f"\n{last}\n", aux_label_names=["aux_labels"]
        )

    lexicon = k2.arc_sort(fsa([(*arc, 0.0) for arc in lexicon_arcs()], {0: 0.0}))
    grammar = fsa(
        [(s, d, WORDS.get(w, 0), WORDS.get(w, 0), -c) for s, d, w, c in GRAMMAR],
        {s: -c for s, c in GRAMMAR_ENDS.items()},
    )
    words = k2.connect(k2.compose(lexicon, k2.arc_sort(k2.connect(grammar))))
    words.aux_labels = k2.RaggedTensor([[label] if label > 0 else [] for label in words.aux_labels.tolist()])
    words = k2.arc_sort(k2.connect(k2.remove_epsilon(words)))
    hlg = k2.arc_sort(k2.connect(k2.compose(k2.ctc_topo(len(TOKENS) - 1), words, inner_labels="tokens")))
    torch.save(hlg.as_dict(), tmp_path / "HLG.pt")
    graph = import_graph(tmp_path / "HLG.pt", *symbols)
    for num_frames in (1, 3, 5, 6):
        log_prob = random_frames(num_frames, len(TOKENS))
        dense = k2.DenseFsaVec(log_prob[None], torch.tensor([[0, 0, num_frames]], dtype=torch.int32))
        best = k2.shortest_path(k2.intersect_dense_pruned(hlg, dense, 1e9, 1e9, 1, 100_000), use_double_scores=True)
        scores = word_sequence_scores(graph, log_prob)
        assert float(best.get_tot_scores(True, False)) == pytest.approx(max(scores.values()), abs=1e-4)
        spoken = [word for arc in best.aux_labels.tolist() for word in arc if word > 0]
        found = max(scores, key=scores.__getitem__)
        assert [graph.vocabulary.words[word] for word in found] == [list(WORDS)[word] for word in spoken]


def k2_file(path: Path, words: Any) -> Path:
    """One token a, written as X, in k2's layout; what a k2 is not needed for."""
    arcs = torch.tensor([[0, 1, 1, 0], [1, 2, -1, 0]], dtype=torch.int32)
    arcs[:, 3] = torch.tensor([-0.5, -0.25]).view(torch.int32)
    torch.save({"arcs": arcs, "aux_labels": words}, path)
    return path


def test_final_arcs_of_k2_are_final_scores(tmp_path: Path, symbols: tuple[Path, Path]) -> None:
    graph = import_graph(k2_file(tmp_path / "HLG.pt", torch.tensor([1, -1], dtype=torch.int32)), *symbols)
    assert graph.score.tolist() == [-0.5] and graph.final_score.tolist() == [-torch.inf, -0.25]
    assert graph.token_id.tolist() == [1] and graph.word_id.tolist() == [4]


def test_epsilon_before_the_blank_is_no_output(tmp_path: Path, symbols: tuple[Path, Path]) -> None:
    """WeNet's tokens: ids are the labels of the transducer, so that the network has one column less."""
    words, tokens = symbols
    tokens.write_text("<eps> 0\n<blank> 1\na 2\nb 3\nc 4\n#0 5\n")
    graph = import_graph(k2_file(tmp_path / "HLG.pt", torch.tensor([1, -1])), words, tokens)
    assert graph.tokens.tokens[1:] == ("a", "b", "c")


def test_the_command_and_a_network_beside_it(
    tmp_path: Path, symbols: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words, tokens = map(str, symbols)
    source = k2_file(tmp_path / "HLG.pt", torch.tensor([1, -1]))
    output = tmp_path / "graph.safetensors"
    code = main(["graph", "--from", str(source), "--words", words, "--tokens", tokens, "--output", str(output)])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["sizes"]["decoding graph"] == {"states": 2, "arcs": 1} and report["words"] == 3
    graph = DecodingGraph.load(output)
    assert graph.meta["topology"] == "imported"
    for wrong, message in (
        (["--words", words], "--from needs --words and --tokens"),
        (["--words", words, "--tokens", tokens, "--arpa", "x"], "--arpa has no effect with --from"),
        (["--words", words, "--tokens", tokens, "--keep-stress"], "--keep-stress has no effect with --from"),
        (["--words", words, "--tokens", tokens, "--score-bits", "11"], "--score-bits has no effect with --from"),
    ):
        assert main(["graph", "--from", str(source), *wrong, "--output", str(output)]) == 2
        assert message in capsys.readouterr().err


def test_what_does_not_fit_is_said(tmp_path: Path, symbols: tuple[Path, Path]) -> None:
    words, _ = symbols
    far = k2_file(tmp_path / "far.pt", torch.tensor([9, -1]))
    with pytest.raises(AsrError, match="there is no word 9"):
        import_graph(far, *symbols)
    with pytest.raises(AsrError, match="final arcs have words"):
        import_graph(k2_file(tmp_path / "end.pt", torch.tensor([1, 1])), *symbols)
    few = tmp_path / "few.txt"
    few.write_text("<blk> 0\n#0 1\n")
    with pytest.raises(AsrError, match=r"few\.txt|tokens"):
        import_graph(k2_file(tmp_path / "HLG.pt", torch.tensor([1, -1])), words, few)
    few.write_text("<blk> 0\nz 2\n")
    with pytest.raises(AsrError, match="without gaps"):
        import_graph(tmp_path / "HLG.pt", words, few)
    (tmp_path / "text.fst").write_text("0 1 1 1\n")
    with pytest.raises(AsrError, match=r"neither an HLG\.pt file of k2 nor a binary OpenFst file; compile text with"):
        import_graph(tmp_path / "text.fst", *symbols)
    (tmp_path / "endless.fst").write_bytes(const_fst([(1, 0, 0.5, 0)], [(np.inf, 0, 1)]))
    with pytest.raises(AsrError, match="is empty: no path leads from its start to a final state"):
        import_graph(tmp_path / "endless.fst", *symbols)


def test_no_code_runs_from_a_graph(tmp_path: Path, symbols: tuple[Path, Path]) -> None:
    path = k2_file(tmp_path / "HLG.pt", HarmfulPickle(tmp_path / "ran"))
    with pytest.raises(AsrError, match="not a k2 graph"):
        import_graph(path, *symbols)
    assert not (tmp_path / "ran").exists()


def const_fst(
    arcs: list[tuple[int, int, float, int]], states: list[tuple[float, int, int]], num_arcs: int | None = None
) -> bytes:
    """A const transducer by hand: arcs (input, output, weight, destination), states (weight, first arc, arcs)."""
    name = struct.pack("<i", 5) + b"const" + struct.pack("<i", 8) + b"standard"
    total = len(arcs) if num_arcs is None else num_arcs
    header = struct.pack("<i", 2125659606) + name + struct.pack("<iiQqqq", 2, 0, 0, 0, len(states), total)
    rows = [struct.pack("<fIIII", weight, begin, count, 0, 0) for weight, begin, count in states]
    return b"".join([header, *rows, *(struct.pack("<iifi", *arc) for arc in arcs)])


def test_parts_of_a_const_transducer_that_do_not_fit_are_told(tmp_path: Path) -> None:
    arcs = [(1, 0, 0.5, 1), (2, 1, np.inf, 0), (3, 1, 0.25, 0)]
    states = [(np.inf, 0, 1), (0.125, 1, 2)]
    path = tmp_path / "it.fst"
    path.write_bytes(const_fst(arcs, states))
    fst = read_openfst(path)  # without the impossible arc
    assert (fst.arc_begin.tolist(), fst.dst_state.tolist(), fst.score.tolist()) == ([0, 1, 2], [1, 0], [-0.5, -0.25])
    assert fst.final_score.tolist() == [-np.inf, -0.125]
    for position, part, message in (
        (0, (1, 0, 0.5, 2), "leads to a state that does not exist"),
        (0, (1, 0, 0.5, -1), "leads to a state that does not exist"),
        (2, (1, 0, 0.5, -1), "leads to a state that does not exist"),
        (0, (1, 0, np.nan, 1), "is not a number"),
        (0, (1, 0, -np.inf, 1), "is not a number"),
    ):
        path.write_bytes(const_fst([*arcs[:position], part, *arcs[position + 1 :]], states))
        with pytest.raises(AsrError, match=message):
            read_openfst(path)
    for weight in (np.nan, -np.inf):
        path.write_bytes(const_fst(arcs, [states[0], (weight, 1, 2)]))
        with pytest.raises(AsrError, match="is not a number"):
            read_openfst(path)
    for wrong in ([states[0], (0.125, 0, 2)], [states[0], (0.125, 1, 1)]):
        path.write_bytes(const_fst(arcs, wrong))
        with pytest.raises(AsrError, match="do not fit the arcs"):
            read_openfst(path)


@pytest.mark.slow
def test_every_cut_and_every_flipped_byte_is_a_graph_or_a_message(tmp_path: Path) -> None:
    """By hand: a vector transducer of two states, with a symbol table."""
    name = struct.pack("<i", 6) + b"vector" + struct.pack("<i", 8) + b"standard"
    header = struct.pack("<i", 2125659606) + name + struct.pack("<iiQqqq", 2, 1, 0, 1, 2, 1)
    table = struct.pack("<ii", 2125658996, 1) + b"t" + struct.pack("<qqi", 1, 1, 1) + b"a" + struct.pack("<q", 1)
    states = struct.pack("<fq", 0.5, 0) + struct.pack("<fq", np.inf, 1) + struct.pack("<iifi", 2, 1, 0.25, 0)
    content = header + table + states
    path = tmp_path / "it.fst"
    path.write_bytes(content)
    fst = read_openfst(path)
    assert (fst.start, fst.score.tolist(), fst.final_score.tolist()) == (1, [-0.25], [-0.5, -np.inf])
    assert (fst.input_label.tolist(), fst.output_label.tolist(), fst.dst_state.tolist()) == ([2], [1], [0])
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(AsrError):
            read_openfst(path)
    for place in range(len(content)):
        for bit in (1, 0x80):
            path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            try:
                read_openfst(path)
            except AsrError as error:
                assert str(path) in str(error)
