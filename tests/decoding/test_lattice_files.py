"""Lattices through files and back, and Kaldi's own search over what we write for it."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding.k2_lattice import load_k2_lattice, read_k2_lattices
from asr.decoding.kaldi_lattice import read_kaldi_lattices, write_kaldi_lattice
from asr.decoding.lattice import Lattice
from asr.decoding.settings import DecodingOptions
from asr.decoding.slf import read_slf, slf_fields, write_slf
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.text.symbols import TokenTable, Vocabulary
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.harmful_pickle import HarmfulPickle
from tests.reference.lattice_paths import all_sentences
from tests.reference.table_lm import TableLM

OPTIONS = DecodingOptions(
    output_beam=6.0, am_scale=0.7, graph_scale=1.3, lm_scale=0.6, word_insertion_penalty=-0.4, max_active_states=10**6
)


def a_lattice(seed: int, with_lm: bool = True) -> tuple[Lattice, TokenPassingDecoder] | None:
    graph = random_graph(seed)
    first_pass = TokenPassingDecoder(graph, OPTIONS, keep_lattice=True)
    lm = TableLM(graph.vocabulary, seed) if with_lm else None
    result = first_pass.decode(random_log_prob(seed, 1, 5), torch.tensor([5]), lm)[0]
    return None if result.lattice is None else (result.lattice, first_pass)


def same_but_for_order(one: Lattice, other: Lattice) -> None:
    """All fields; states of a frame and arcs of a state may stand in another order."""
    assert one.num_arcs == other.num_arcs

    def rows(lattice: Lattice) -> list[tuple[object, ...]]:
        words = [part.tolist() for part in torch.split(lattice.word_id, lattice.num_words().tolist())]
        columns = [
            lattice.frame[lattice.src_state()],
            lattice.graph_arc,
            lattice.token_id,
            lattice.am_score,
            lattice.graph_score,
            lattice.lm_score,
            lattice.final_graph_score[lattice.dst_state],
            lattice.final_lm_score[lattice.dst_state],
        ]
        return sorted(zip(*(column.tolist() for column in columns), words, strict=True))

    assert rows(one) == rows(other)
    sentences = all_sentences(other, OPTIONS)
    assert all_sentences(one, OPTIONS) == pytest.approx(sentences, abs=1e-5)


@pytest.mark.slow
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_slf_keeps_everything(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    found = a_lattice(seed)
    if found is None:
        return
    lattice, first_pass = found
    path = tmp_path_factory.mktemp("slf") / "a.slf"
    graph = first_pass.graph
    with path.open("w") as file:
        write_slf(file, "a", lattice, graph.vocabulary, graph.tokens, OPTIONS, 0.04)
    same_but_for_order(read_slf(path, graph.vocabulary, graph.tokens), lattice)


def test_slf_keeps_words_with_quotes_and_backslashes(tmp_path) -> None:
    found = a_lattice(1)
    assert found is not None
    lattice, first_pass = found
    words = [f"{mark}W{number}'" for number, mark in enumerate(("'", '"', "\\", "=", "\\'"))]
    words += [f"w{number}" for number in range(len(words), len(first_pass.graph.vocabulary))]
    vocabulary = Vocabulary(words)
    text = io.StringIO()
    write_slf(text, "a", lattice, vocabulary, first_pass.graph.tokens, OPTIONS, 0.04)
    (tmp_path / "a.slf").write_text(text.getvalue())
    assert len(set(lattice.word_id.tolist())) > 3
    same_but_for_order(read_slf(tmp_path / "a.slf", vocabulary, first_pass.graph.tokens), lattice)


@pytest.mark.parametrize("token", [",", ":", "\\", "a,b:c", "'"])
def test_slf_keeps_tokens_of_any_characters(tmp_path, token: str) -> None:
    found = a_lattice(1)
    assert found is not None
    lattice, first_pass = found
    names = first_pass.graph.tokens.tokens
    tokens = TokenTable([names[0], token, *names[2:]])
    text = io.StringIO()
    write_slf(text, "a", lattice, first_pass.graph.vocabulary, tokens, OPTIONS, 0.04)
    (tmp_path / "a.slf").write_text(text.getvalue(), encoding="utf-8")
    assert bool((lattice.token_id == 1).any())
    same_but_for_order(read_slf(tmp_path / "a.slf", first_pass.graph.vocabulary, tokens), lattice)


@pytest.mark.slow
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_kaldi_keeps_totals_times_and_acoustic_scores(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    found = [one for one in (a_lattice(seed), a_lattice(seed + 1, with_lm=False)) if one is not None]
    path = tmp_path_factory.mktemp("kaldi") / "lat.txt"
    with path.open("w") as file:
        for number, (lattice, _) in enumerate(found):
            write_kaldi_lattice(file, f"utt{number}", lattice, OPTIONS)
    back = list(read_kaldi_lattices(path, 9))
    assert [utterance for utterance, _ in back] == [f"utt{number}" for number in range(len(found))]
    plain = DecodingOptions(am_scale=OPTIONS.am_scale)
    for (_, read), (lattice, _) in zip(back, found, strict=True):
        assert all_sentences(read, plain) == pytest.approx(all_sentences(lattice, OPTIONS), abs=1e-4)
        for name in ("am_score", "token_id", "word_id"):
            assert sorted(getattr(read, name).tolist()) == sorted(getattr(lattice, name).tolist())
        assert torch.equal(read.frame, lattice.frame)


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_kaldis_own_search_finds_the_same_sentences(seed: int) -> None:
    kaldifst = pytest.importorskip("kaldifst")
    found = a_lattice(seed)
    if found is None:
        return
    lattice, _ = found
    text = io.StringIO()
    write_kaldi_lattice(text, "utt", lattice, OPTIONS)
    lines = text.getvalue().splitlines()
    assert lines[0] == "utt " and lines[-1] == ""
    theirs = kaldifst.Lattice()
    for _ in range(1 + max(int(line.split()[0]) for line in lines[1:-1])):
        theirs.add_state()
    while theirs.num_states <= max(int(line.split()[1]) for line in lines[1:-1] if len(line.split()) == 4):
        theirs.add_state()
    theirs.start = int(lines[1].split()[0])
    for line in lines[1:-1]:
        fields = line.split()
        graph_cost, am_cost, transition = fields[-1].split(",")
        weight = kaldifst.LatticeWeight(float(graph_cost), float(am_cost))
        if len(fields) == 2:
            theirs.set_final(int(fields[0]), weight)
        else:
            arc = kaldifst.LatticeArc(int(transition or 0), int(fields[2]), weight, int(fields[1]))
            theirs.add_arc(int(fields[0]), arc)
    expected = all_sentences(lattice, OPTIONS)
    best = max(expected, key=lambda words: expected[words])
    (path,) = kaldifst.lattice_to_nbest(theirs, acoustic_scale=OPTIONS.am_scale, lm_scale=1.0, n=1)
    _, _, words, weight = kaldifst.get_linear_symbol_sequence(path)
    assert tuple(words) == best
    # The path comes back in the scaled costs.
    assert -(weight.value1 + weight.value2) == pytest.approx(expected[best], abs=1e-3)


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_k2_keeps_everything(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    k2 = pytest.importorskip("k2")
    from asr.decoding.k2_lattice import lattice_to_k2, save_k2_lattice

    found = a_lattice(seed)
    if found is None:
        return
    lattice, _ = found
    path = tmp_path_factory.mktemp("k2") / "a.pt"
    save_k2_lattice(path, lattice, OPTIONS)
    back = load_k2_lattice(path)
    for name, value in vars(lattice).items():
        assert torch.equal(getattr(back, name), value), name
    ends = lattice.num_words() == 0
    save_k2_lattice(path, lattice, OPTIONS, ends)
    assert torch.equal(load_k2_lattice(path).word_id, lattice.word_id)
    words = dict(enumerate(["", "", "", *map(str, range(3, 9))]))
    (read,) = read_k2_lattices(path, words, 0.04)
    assert sum(arc.word == "</s>" for arc in read.arcs) == int(ends.sum())
    fsa = k2.create_fsa_vec([lattice_to_k2(lattice, OPTIONS, ends)])
    best = max(all_sentences(lattice, OPTIONS).values())
    assert float(fsa.get_tot_scores(True, False)) == pytest.approx(best, abs=1e-3)
    path.write_bytes(b"nothing")
    with pytest.raises(AsrError, match=r"a\.pt: this is not a k2 lattice"):
        load_k2_lattice(path)


def k2_content(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `save_k2_lattice` writes, without k2: two ways to state 1, of which one may end in state 2 as well."""

    class RaggedTensor:
        def __getstate__(self) -> tuple[torch.Tensor, str, torch.Tensor]:
            return torch.tensor([0, 1, 1, 3, 3, 3]).int(), "row_ids1", torch.tensor([7, 5, 6]).int()

    RaggedTensor.__module__, RaggedTensor.__qualname__ = "_k2.ragged", "RaggedTensor"
    module = ModuleType("_k2.ragged")
    vars(module)["RaggedTensor"] = RaggedTensor
    monkeypatch.setitem(sys.modules, "_k2", ModuleType("_k2"))
    monkeypatch.setitem(sys.modules, "_k2.ragged", module)
    return {
        "arcs": torch.tensor([[0, 1, 3, 0], [0, 1, 0, 0], [1, 2, 2, 0], [1, 3, -1, 0], [2, 3, -1, 0]]).int(),
        "am_score": torch.tensor([-1.0, -2.0, -4.0, 0.0, 0.0]),
        "graph_score": torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5]),
        "lm_score": torch.tensor([-8.0, 0.0, -9.0, -10.0, -11.0]),
        "graph_arc": torch.tensor([4, 5, 6, -1, -1]).int(),
        "aux_labels": RaggedTensor(),
    }


def test_a_k2_lattice_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(k2_content(monkeypatch), tmp_path / "a.pt")
    lattice = load_k2_lattice(tmp_path / "a.pt")
    assert lattice.frame.tolist() == [0, 1, 2] and lattice.arc_begin.tolist() == [0, 2, 3, 3]
    assert lattice.dst_state.tolist() == [1, 1, 2] and lattice.token_id.tolist() == [3, 0, 2]
    assert lattice.graph_arc.tolist() == [4, 5, 6] and lattice.word_begin.tolist() == [0, 1, 1, 3]
    assert all_sentences(lattice, DecodingOptions()) == pytest.approx(
        {(7,): -19.5, (): -12.6, (7, 5, 6): -33.9, (5, 6): -27.0}, abs=1e-5
    )


def test_a_k2_lattice_ends_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one state it may; without the last arc as well, no state is final."""
    content = k2_content(monkeypatch)
    splits, kind, words = content["aux_labels"].__getstate__()
    for num_arcs, fits in ((4, True), (3, False)):
        kept = {name: part[:num_arcs] for name, part in content.items() if name != "aux_labels"}
        state = splits[: num_arcs + 1], kind, words
        monkeypatch.setattr(type(content["aux_labels"]), "__getstate__", lambda _, state=state: state)
        torch.save({**kept, "aux_labels": content["aux_labels"]}, tmp_path / "a.pt")
        if fits:
            # The way to state 2 leads nowhere now.
            assert set(all_sentences(load_k2_lattice(tmp_path / "a.pt"), DecodingOptions())) == {(7,), ()}
        else:
            with pytest.raises(AsrError, match="the arcs are not those of a lattice"):
                load_k2_lattice(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("arcs", (0, 0), -1),
        ("arcs", (1, 0), 2),  # the sources of arcs rise
        ("arcs", (2, 1), 1),  # an arc to its own state
        ("arcs", (2, 1), 3),  # reads a token on the way to the end
        ("arcs", (3, 1), 2),  # ends elsewhere
        ("arcs", (0, 2), -2),
        ("graph_arc", (0,), -2),
        ("am_score", (1,), math.nan),
        ("lm_score", (4,), -math.inf),
    ],
)
def test_arcs_that_are_no_k2_lattice_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: tuple[int, ...], value: float
) -> None:
    content = k2_content(monkeypatch)
    content[name][place] = value
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(AsrError, match=r"a\.pt: the arcs are not those of a lattice"):
        load_k2_lattice(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("graph_score", None, "'graph_score' must have one torch.float32 for each arc"),
        ("arcs", torch.zeros(5, 3).int(), "its arcs are not four integers each"),
        ("arcs", torch.zeros(0, 4).int(), "its arcs are not four integers each"),
        ("arcs", torch.zeros(5, 4), "its arcs are not 32-bit integers"),
        ("lm_score", torch.zeros(4), "'lm_score' must have one torch.float32 for each arc"),
        ("graph_arc", torch.zeros(5), "'graph_arc' must have one torch.int32 for each arc"),
        ("aux_labels", torch.zeros(4).int(), "must be one number or one list for each arc"),
    ],
)
def test_parts_that_are_no_k2_lattice_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: torch.Tensor | None, message: str
) -> None:
    content = k2_content(monkeypatch)
    content[name] = value
    torch.save({key: part for key, part in content.items() if part is not None}, tmp_path / "a.pt")
    with pytest.raises(AsrError, match=message):
        load_k2_lattice(tmp_path / "a.pt")


def test_code_in_a_k2_lattice_does_not_run(tmp_path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"arcs": HarmfulPickle(tmp_path / "made")}, path)
    with pytest.raises(AsrError, match=r"a\.pt: this is not a k2 lattice.*posix mkdir has no place"):
        load_k2_lattice(path)
    assert not (tmp_path / "made").exists()


def test_kaldis_words_of_several_frames(tmp_path) -> None:
    path = tmp_path / "lat.txt"
    path.write_text("utt\n7 3 5 1.5,20,2_2_1\n7 4 6 1,21,2_1\n4 3 0 0,3,1\n3 9 0 0.25,0,\n9 0.5,0,\n\n")
    ((_, lattice),) = read_kaldi_lattices(path, 9)
    assert lattice.num_frames == 3 and sorted(lattice.word_id.tolist()) == [5, 6]
    sentences = all_sentences(lattice, DecodingOptions())
    assert sentences == pytest.approx({(5,): -1.5 - 20 - 0.75, (6,): -1 - 21 - 3 - 0.75})


def test_slf_with_a_second_language_model(tmp_path) -> None:
    graph, path = random_graph(0), tmp_path / "a.slf"
    path.write_text("N=2 L=1\nI=0\nI=1 t=0.01\nJ=0 S=0 E=1 a=-1 r=-2 l=-3 n=-4\n")
    lattice = read_slf(path, graph.vocabulary, graph.tokens)
    assert [float(score) for score in (lattice.am_score, lattice.graph_score, lattice.lm_score)] == [-1.0, -2.0, -7.0]


def test_slf_with_times_alone(tmp_path) -> None:
    graph = random_graph(0)
    path = tmp_path / "a.slf"
    path.write_text(
        "# by hand\n\nVERSION=1.0\nN=4 L=3\n#I=9\n \nI=0 t=0\nI=1 t=0.02 W=w1\nI=2 t=0.03 W=!NULL\nI=3 t=0.03\n"
        "J=0 S=0 E=1 a=-5 l=-1\nJ=1 S=1 E=2 a=-2\nJ=2 S=2 E=3 l=-0.5\n"
    )
    lattice = read_slf(path, graph.vocabulary, graph.tokens)
    assert lattice.num_frames == 3 and lattice.token_id.tolist() == [0, 0, 0]
    assert all_sentences(lattice, DecodingOptions()) == pytest.approx({(5,): -8.5})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0 1 5 1,1,1\n", "lat.txt:1: expected the name of an utterance"),
        ("utt\n\n", "lat.txt: utt: the lattice is empty"),
        ("utt\n0 1 5 1,1,x\n1 0,0,\n", "lat.txt:2: '0 1 5 1,1,x' is neither an arc"),
        ("utt\n0 ² 5 1,1,1\n1 0,0,\n", "lat.txt:2: '0 ² 5 1,1,1' is neither an arc"),
        ("utt\n0 1 five 1,1,1\n1 0,0,\n", "lat.txt:2: there is no word five in the word list"),
        ("utt\n0 1 99 1,1,1\n1 0,0,\n", "lat.txt:2: there is no word 99 in a vocabulary of 9"),
        ("utt\n0 1 5 1,1,1\n", "no final state can be reached"),
        ("utt\n0 1 5 1,1,1\n1 0 5 1,1,1\n1 0,0,\n", "has a cycle"),
        ("utt\n0 1 5 1,1,1\n0 2 0 1,1,1\n2 1 0 1,1,1\n1 0,0,\n", "state 1 is reached after"),
        ("utt\n0 1 0 1,1,1\n1 2 5 1,1,\n2 0,0,\n", "a word after the last frame"),
        ("utt\n0 1 0 1,1,1\n1 0,0,1_2\n", "a final state has frames"),
    ],
)
def test_bad_kaldi_lattices_are_one_sentence(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "lat.txt"
    path.write_text(content)
    with pytest.raises(AsrError, match=message):
        list(read_kaldi_lattices(path, 9))
    with pytest.raises(AsrError, match="cannot be read"):
        list(read_kaldi_lattices(tmp_path / "none", 9))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("words\n", "a.slf:1: 'words' is not a field"),
        ("VERSION=1.0\n", "this is not an HTK lattice"),
        ("N=2 L=2\nI=0\nI=1 t=0.01\nJ=0 S=0 E=1\n", "the header announces L=2, but there are 1; the file is cut short"),
        ("N=2 L=1\nI=0\nI=1 t=0.01\nJ=0 S=0 E=7\n", "a.slf:4: a link must lead from a node"),
        ("N=2 L=1\nI=0\nI=1 t=0.01\nJ=0 S=0 E=1 W=xyz\n", "the word 'xyz' is not in the vocabulary"),
        ("N=2 L=1\nI=0\nI=1 t=0.01\nJ=0 S=0 E=1 a=much\n", "'much' is not a finite number"),
        ("N=2 L=1\nI=0\nI=1 t=0.01\nJ=0 S=0 E=1 d=:q,0.01:\n", "'q,0.01' is not a token"),
        ("N=2 L=1\nI=0\nI=1 L=digits\nJ=0 S=0 E=1\n", "I=1 L=digits: sub-lattices are not supported"),
        ("N=3 L=1\nI=0\nI=1 t=0.01\nI=2\nJ=0 S=0 E=1\n", "the lattice must have one first node, not 2"),
    ],
)
def test_bad_slf_is_one_sentence(tmp_path, content: str, message: str) -> None:
    graph = random_graph(0)
    path = tmp_path / "a.slf"
    path.write_text(content)
    with pytest.raises(AsrError, match=message):
        read_slf(path, graph.vocabulary, graph.tokens)


def test_the_totals_header_of_slf() -> None:
    found = a_lattice(1)
    assert found is not None
    text = io.StringIO()
    graph = found[1].graph
    write_slf(text, "a", found[0], graph.vocabulary, graph.tokens, OPTIONS, 0.04)
    for line in ("acscale=0.7", "prscale=1.3", "lmscale=0.6", "wdpenalty=-0.4"):
        assert line in text.getvalue().splitlines()
    assert not math.isnan(OPTIONS.am_scale)


def test_fields_are_quoted_and_escaped_as_in_htk() -> None:
    found = slf_fields(r"""J=0 WORD="two words" v='a\'b' l=\303\244x d= a="\"" n="x"y""")
    assert found == {"J": "0", "W": "two words", "v": "a'b", "l": "äx", "d": "", "a": '"', "n": '"x"y'}
    assert slf_fields("W='") == {"W": "'"} and slf_fields("no field") == {}
    assert slf_fields(r"W=\\303 V=\'a") == {"W": "\\303", "V": "'a"}


@pytest.fixture
def slf(tmp_path: Path) -> Callable[..., Lattice]:
    """Reads a text as an SLF file, with the words w0 .. w4 and the tokens <blk>, t1, t2, t3."""
    graph = random_graph(0)

    def read(text: str, **options: Any) -> Lattice:
        (tmp_path / "a.slf").write_text(text)
        return read_slf(tmp_path / "a.slf", graph.vocabulary, graph.tokens, **options)

    return read


def test_bases_of_logarithms(slf: Callable[..., Lattice]) -> None:
    text = "base={} N=2 L=1\nI=0\nI=1 t=0.01\nJ=0 S=0 E=1 a=-1 r=-2 l=-3 n=-4\n"
    for base in (10, 1.0001, 0.5):
        lattice = slf(text.format(base))
        found = [float(score) for score in (lattice.am_score, lattice.graph_score, lattice.lm_score)]
        assert found == pytest.approx([-math.log(base), -2 * math.log(base), -7 * math.log(base)])
    for base in (0, 1, -2):
        with pytest.raises(AsrError, match=f"the base of logarithms in the header is {base}; it must be above 0"):
            slf(text.format(base))


def test_frames_last_as_long_as_the_file_or_the_caller_says(slf: Callable[..., Lattice]) -> None:
    text = "N=2 L=1\nI=0 t=0.5\nI=1 t=0.98\nJ=0 S=0 E=1 W=w1\n"
    assert slf(text).num_frames == 48
    assert slf("# frame_seconds=0.04\n" + text).num_frames == 12
    assert slf("# frame_seconds=0.04\n" + text, frame_seconds=0.06).num_frames == 8
    # Rounded, and at least one frame for each token.
    assert slf(text.replace("E=1", "E=1 d=:t1,0.014:t2,0.016:t3,0:")).token_id.tolist() == [1, 2, 2, 3]


def test_scores_and_the_word_of_a_link_go_to_its_first_frame(slf: Callable[..., Lattice]) -> None:
    lattice = slf("N=2 L=1\nI=0\nI=1 W=w2\nJ=0 S=0 E=1 W=w1 a=-1 r=-2 l=-3 v=7 d=:t1,0.02:<blk>,0.01:\n")
    assert lattice.token_id.tolist() == [1, 1, 0] and lattice.graph_arc.tolist() == [7, -1, -1]
    assert lattice.am_score.tolist() == [-1, 0, 0] and lattice.lm_score.tolist() == [-3, 0, 0]
    assert lattice.word_id.tolist() == [5] and lattice.word_begin.tolist() == [0, 1, 1, 1]
    of_node = slf("N=2 L=1\nI=0 W=w4\nI=1 W=w2\nJ=0 S=0 E=1 v=7 t=1 d=:t1,0.01:\n")
    assert of_node.word_id.tolist() == [6] and of_node.graph_arc.tolist() == [7]
    without_arc = slf("N=2 L=1\nI=0\nI=1 t=0.01\nJ=0 S=0 E=1 v=7\n")
    assert without_arc.graph_arc.tolist() == [-1] and len(without_arc.word_id) == 0


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("v=-2 d=:t1,0.01:", "a.slf:4: -2 .v=. is not an arc of a decoding graph"),
        (f"v={2**62} d=:t1,0.01:", "is not an arc of a decoding graph"),
        ("d=:t1:", "'t1' is not a token of the acoustic model with its seconds"),
        ("d=:t1,0.06:", "a.slf:4: the link is 0.06 s long; the file is damaged"),
        ("d=:t1,0.03:t2,0.03:", "a.slf:4: the link is longer than 5 frames; the file is damaged"),
    ],
)
def test_links_that_no_lattice_has(slf: Callable[..., Lattice], link: str, message: str) -> None:
    text = "N=2 L=1\nI=0\nI=1\nJ=0 S=0 E=1 "
    assert slf(text + "d=:t1,0.05:\n", max_links=5).num_frames == 5
    with pytest.raises(AsrError, match=message):
        slf(f"{text}{link}\n", max_links=5)


def test_no_more_links_and_paths_than_memory_allows(slf: Callable[..., Lattice]) -> None:
    """Two links of 3 frames each; and three links that read nothing, each before two that do."""
    frames = "N=3 L=2\nI=0\nI=1\nI=2\nJ=0 S=0 E=1 d=:t1,0.03:\nJ=1 S=1 E=2 d=:t1,0.03:\n"
    empty = "".join(f"J={number} S=0 E=1\n" for number in range(3))
    ways = f"N=3 L=5\nI=0\nI=1\nI=2 t=0.01\n{empty}J=3 S=1 E=2\nJ=4 S=1 E=2\n"
    for text, message in (
        (frames, "the lattice has more than 5 frames on its links; prune it"),
        (ways, "links that read no frame form more than 5 paths; prune the lattice"),
    ):
        assert slf(text, max_links=6).num_arcs == 6
        with pytest.raises(AsrError, match=message):
            slf(text, max_links=5)


def test_sub_lattices_in_the_header(slf: Callable[..., Lattice]) -> None:
    with pytest.raises(AsrError, match="SUBLAT=digits: sub-lattices are not supported"):
        slf("SUBLAT=digits N=2 L=1\nI=0\nI=1 t=0.01\nJ=0 S=0 E=1\n")


def kaldi(folder: Path, text: str) -> list[tuple[str, Lattice]]:
    (folder / "lat.txt").write_text(text)
    return list(read_kaldi_lattices(folder / "lat.txt", 9))


def test_kaldis_missing_weights_are_zero(tmp_path: Path) -> None:
    """Final states without a weight, and an arc without one that reads nothing."""
    ((name, lattice),) = kaldi(tmp_path, "utt\n0 1 5 1,2,3\n1 2 0\n2\n")
    assert name == "utt" and lattice.token_id.tolist() == [2]
    assert all_sentences(lattice, DecodingOptions()) == pytest.approx({(5,): -3.0})


def test_the_better_of_two_ends_counts(tmp_path: Path) -> None:
    """State 1 ends with a cost of 4, or over arcs without frames with 1 + 2 or 3 + 0.5."""
    text = "utt\n0 1 5 0,0,1\n1 2 0 0.5,0.5,\n1 3 0 3,0,\n1 {},0,\n2 2,0,\n3 0.5,0,\n"
    for cost, best in ((4, -3.0), (2, -2.0)):
        ((_, lattice),) = kaldi(tmp_path, text.format(cost))
        assert all_sentences(lattice, DecodingOptions()) == pytest.approx({(5,): best})


@pytest.mark.parametrize(
    ("arc", "message"),
    [
        ("0 1 -1 1,1,1", "lat.txt:6: there is no word -1 in the word list"),
        ("0 1 9 1,1,1", "lat.txt:6: there is no word 9 in a vocabulary of 9"),
        ("0 1 5 1,1,0", "lat.txt:6: a transition id is not a number from 1"),
        (f"0 1 5 1,1,{2**31 + 1}", "lat.txt:6: a transition id is not a number from 1"),
        ("0 1 5 1,1,1 2", "lat.txt:6: there is no word 1,1,1"),
        ("0 x 5 1,1,1", "lat.txt:6: '0 x 5 1,1,1' is neither an arc"),
        ("0 1 5 nan,1,1", "lat.txt:6: 'nan' is not a finite number"),
        ("0 1 5 -6e30,-6e30,1", "lat.txt:6: '-6e30' is not a finite number"),
        ("0 1 5 1,1,1,1", "lat.txt:6: '0 1 5 1,1,1,1' is neither an arc"),
    ],
)
def test_bad_arcs_of_a_second_utterance(tmp_path: Path, arc: str, message: str) -> None:
    first = "one\n0 1 8 1,1,2147483648\n1 0,0,\n\n"
    assert kaldi(tmp_path, first)[0][1].token_id.tolist() == [2**31 - 1]
    with pytest.raises(AsrError, match=message):
        kaldi(tmp_path, f"{first}two \n{arc}\n1 0,0,\n")


def test_words_and_states_that_no_k2_lattice_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = k2_content(monkeypatch)
    words = content["aux_labels"].__getstate__()
    for place, value in ((0, 1), (3, 4), (5, 2)):
        splits = words[0].clone()
        splits[place] = value
        monkeypatch.setattr(type(content["aux_labels"]), "__getstate__", lambda _, it=splits: (it, *words[1:]))
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(AsrError, match="must be one number or one list for each arc"):
            load_k2_lattice(tmp_path / "a.pt")
    negative = words[2].clone()
    negative[1] = -1
    monkeypatch.setattr(type(content["aux_labels"]), "__getstate__", lambda _: (*words[:2], negative))
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(AsrError, match="the arcs are not those of a lattice"):
        load_k2_lattice(tmp_path / "a.pt")
