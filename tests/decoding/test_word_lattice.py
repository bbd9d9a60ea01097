"""Lattices and n-best lists of other recognizers, against scoring every path word by word."""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asr.bundle import Bundle, read_rnn_lm
from asr.cli import rescore
from asr.cli.main import main
from asr.decoding.k2_lattice import read_k2_lattices
from asr.decoding.kaldi_lattice import read_kaldi_archive
from asr.decoding.nbest_io import read_n_best
from asr.decoding.slf import read_slf_lattice
from asr.decoding.word_lattice import (
    Candidate,
    RescoringScales,
    WordArc,
    WordLattice,
    rescore_lattice,
    rescore_list,
    word_ids,
    word_or_end,
)
from asr.errors import AsrError
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.corpus import read_word_stream
from asr.lm.interface import LanguageModel
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.metrics import read_transcripts
from asr.serialization import ModelSpec
from asr.testing.tones import TEXT
from asr.text.symbols import SPECIAL_WORDS, UNK_ID, Vocabulary
from tests.reference.table_lm import TableLM

WORDS = ["PAT", "KIT", "SICK", "SKIP", "TO", "TWO", "ZEBRA"]  # the last one is unknown
SCALES = RescoringScales(0.7, 0.3, 1.1, -0.4)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> NgramLM:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("\n".join(TEXT) + "\n")
    return NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), 3).trie)


def lm_score(lm: LanguageModel, words: list[str]) -> float:
    context, total = lm.start(1), 0.0
    for word_id in word_ids(words, lm.vocabulary):
        score, context = lm.score(context, torch.tensor([word_id]))
        total += float(score)
    return total + float(lm.final(context))


def random_lattice(seed: int, num_states: int = 7, others: tuple[str, ...] = ("", "pat")) -> WordLattice:
    generator = random.Random(seed)
    arcs = []
    for src in range(num_states - 1):
        for _ in range(generator.randint(1, 3)):
            word = generator.choice([*WORDS, *others])
            scores = generator.uniform(-5, 0), generator.uniform(-3, 0)
            arcs.append(WordArc(src, generator.randint(src + 1, num_states - 1), word, *scores))
    final = {num_states - 1: (-0.5, -0.25), num_states - 2: (-1.0, 0.0)}
    return WordLattice("utt", num_states, 0, arcs, final, {state: 0.1 * state for state in range(num_states)})


def all_paths(lattice: WordLattice, state: int = 0) -> Iterator[list[WordArc]]:
    if state in lattice.final:
        yield []
    for arc in lattice.arcs:
        if arc.src == state:
            for rest in all_paths(lattice, arc.dst):
                yield [arc, *rest]


@pytest.mark.parametrize("seed", range(12))
def test_the_best_path_is_the_best_of_all(lm: NgramLM, seed: int) -> None:
    lattice = random_lattice(seed)
    expected = -math.inf
    for path in all_paths(lattice):
        end_am, end_lm = lattice.final[path[-1].dst if path else 0]
        words = [arc.word for arc in path if arc.word]
        total = SCALES.am_scale * (sum(arc.am_score for arc in path) + end_am)
        total += SCALES.old_lm_scale * (sum(arc.lm_score for arc in path) + end_lm)
        total += SCALES.lm_scale * lm_score(lm, words) + SCALES.word_insertion_penalty * len(words)
        if total > expected:
            expected, best = total, path
    found = rescore_lattice(lattice, lm, SCALES)
    assert found is not None
    assert found.total == pytest.approx(expected, abs=1e-4)
    spoken = [arc for arc in best if arc.word]
    assert [word.text for word in found.words] == [arc.word for arc in spoken]
    assert [(word.start, word.end) for word in found.words] == [(0.1 * arc.src, 0.1 * arc.dst) for arc in spoken]
    assert found.lm_score == pytest.approx(lm_score(lm, [arc.word for arc in spoken]), abs=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_the_words_after_the_end_of_a_sentence_are_another_sentence(lm: NgramLM, seed: int) -> None:
    lattice = random_lattice(seed, others=("", *["</s>"] * 6))
    followed = {state for state in range(7) if any(arc.is_word for path in all_paths(lattice, state) for arc in path)}
    expected: tuple[float, list[list[str]]] = (-math.inf, [])
    for path in all_paths(lattice):
        end_am, end_lm = lattice.final[path[-1].dst if path else 0]
        found: list[list[str]] = [[]]
        for arc in path:
            if arc.is_word:
                found[-1].append(arc.word)
            elif arc.word and arc.dst in followed:
                found.append([])
        total = SCALES.am_scale * (sum(arc.am_score for arc in path) + end_am)
        total += SCALES.old_lm_scale * (sum(arc.lm_score for arc in path) + end_lm)
        for words in found:
            total += SCALES.lm_scale * lm_score(lm, words) + SCALES.word_insertion_penalty * len(words)
        expected = max(expected, (total, found))
    best = rescore_lattice(lattice, lm, SCALES)
    assert best is not None and best.total == pytest.approx(expected[0], abs=1e-4)
    bounds = list(itertools.accumulate(map(len, expected[1])))
    assert best.sentence_ends == tuple(bounds[:-1])
    assert [word.text for word in best.words] == [word for words in expected[1] for word in words]


@pytest.mark.parametrize("mark", ["</s>", "!SENT_END"])
def test_an_end_of_a_sentence_that_no_word_follows_is_the_end_of_the_path(lm: NgramLM, mark: str) -> None:
    """Most recognizers write it there; the language model scores it once."""
    assert word_or_end(mark) == "</s>"
    arcs = [WordArc(0, 1, "PAT", -1.0), WordArc(1, 2, word_or_end(mark), -2.0), WordArc(2, 3, "", 0.0)]
    found = rescore_lattice(WordLattice("u", 4, 0, arcs, {3: (0.0, 0.0)}), lm, RescoringScales())
    assert found is not None and found.lm_score == pytest.approx(lm_score(lm, ["PAT"]), abs=1e-5)
    assert (found.text, found.am_score, found.sentence_ends) == ("PAT", -3.0, ())
    arcs.append(WordArc(2, 3, "KIT", 0.0))
    found = rescore_lattice(WordLattice("u", 4, 0, arcs[:2] + arcs[3:], {3: (0.0, 0.0)}), lm, RescoringScales())
    assert found is not None and found.sentence_ends == (1,) and found.text == "PAT KIT"
    assert found.lm_score == pytest.approx(lm_score(lm, ["PAT"]) + lm_score(lm, ["KIT"]), abs=1e-5)


def test_the_sentences_of_a_candidate_are_scored_by_themselves(lm: NgramLM) -> None:
    candidates = [Candidate(("PAT", "KIT", "TO"), sentence_ends=ends) for ends in [(), (1,), (1, 2), (0, 3)]]
    expected = [[["PAT", "KIT", "TO"]], [["PAT"], ["KIT", "TO"]], [["PAT"], ["KIT"], ["TO"]]]
    expected.append([[], ["PAT", "KIT", "TO"], []])
    found = {one.sentence_ends: one.lm_score for one in rescore_list(candidates, lm, RescoringScales())}
    for candidate, parts in zip(candidates, expected, strict=True):
        score = sum(lm_score(lm, words) for words in parts)
        assert found[candidate.sentence_ends] == pytest.approx(score, abs=1e-4)


def test_one_history_a_state_is_a_way_that_exists(lm: NgramLM) -> None:
    for seed in range(5):
        exact, bounded = (rescore_lattice(random_lattice(seed), lm, SCALES, most) for most in (64, 1))
        assert exact is not None and bounded is not None and bounded.total <= exact.total + 1e-6


def test_lists_are_sorted_by_their_totals(lm: NgramLM) -> None:
    sentences = [words for length in (0, 1, 2) for words in itertools.product(WORDS, repeat=length)]
    candidates = [Candidate(words, -0.1 * place, -0.01 * place) for place, words in enumerate(sentences)]
    found = rescore_list(candidates, lm, SCALES)
    assert [one.total for one in found] == sorted((one.total for one in found), reverse=True)
    assert sorted(one.text for one in found) == sorted(" ".join(words) for words in sentences)
    for one in found[:: len(found) // 5]:
        words = [word.text for word in one.words]
        place = sentences.index(tuple(words))
        total = 0.7 * -0.1 * place + 0.3 * -0.01 * place + 1.1 * lm_score(lm, words) - 0.4 * len(words)
        assert one.total == pytest.approx(total, abs=1e-4)


def test_a_model_without_weight_rules_nothing_out() -> None:
    lm, scales = TableLM(Vocabulary(WORDS)), RescoringScales(lm_scale=0.0)
    lm.log_prob_of = lambda *_: -math.inf  # type: ignore[method-assign]
    found = rescore_list(
        [Candidate((word,), score) for word, score in zip(WORDS, (-3.0, -1.0), strict=False)], lm, scales
    )
    assert [one.total for one in found] == [-1.0, -3.0]
    arcs = [WordArc(0, 1, word, score) for word, score in zip(WORDS, (-3.0, -1.0), strict=False)]
    best = rescore_lattice(WordLattice("u", 2, 0, arcs, {1: (0.0, 0.0)}), lm, scales)
    assert best is not None and best.total == -1.0


def test_a_cycle_is_refused_and_no_end_is_none(lm: NgramLM) -> None:
    arcs = [WordArc(0, 1, "PAT", 0.0), WordArc(1, 0, "KIT", 0.0)]
    with pytest.raises(AsrError, match="utt: the lattice has a cycle"):
        rescore_lattice(WordLattice("utt", 3, 0, arcs, {1: (0.0, 0.0)}), lm, SCALES)
    assert rescore_lattice(WordLattice("utt", 3, 0, arcs[:1], {2: (0.0, 0.0)}), lm, SCALES) is None


SLF = """\
VERSION=1.0
UTTERANCE=talk
base=10 lmscale=12.0 acscale=0.5 wdpenalty=-1
N=4 L=4
I=0 t=0.00 W=!NULL
I=1 t=0.25 W=PAT
I=2 t=0.25 W=KIT
I=3 t=0.80 W=ZEBRA
J=0 S=0 E=1 a=-1.0 l=-2.0
J=1 S=0 E=2 a=-1.5 l=-1.0
J=2 S=1 E=3 a=-3.0 l=-0.5 r=-0.25
J=3 S=2 E=3 a=-3.0 l=-0.5
"""

KALDI = """\
utt-1
0\t1\t1\t1.5,10.0,3_3_4
0\t2\t2\t1.0,11.0,3_3_4
1\t3\t3\t2.0,20.0,5_6
2\t3\t0\t2.5,20.5,5_6
3\t0.5,0.25,

utt-2
0\t1\t7\t2\t0.5,1.0
1\t2\t8\t0\t0.5,1.0
2\t3\t0\t3
3

"""
NUMBERED = {0: "", 1: "PAT", 2: "KIT", 3: "ZEBRA"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "talk.slf").write_text(SLF)
    (tmp_path / "lat.txt").write_text(KALDI)
    (tmp_path / "words.txt").write_text("<eps> 0\nPAT 1\nKIT 2\nZEBRA 3\n")
    (tmp_path / "text").write_text("\n".join(TEXT) + "\n")
    return tmp_path


def test_a_lattice_of_htk(folder: Path) -> None:
    lattice = read_slf_lattice(folder / "talk.slf")
    log10 = math.log(10)
    assert (lattice.name, lattice.start, lattice.final) == ("talk", 0, {3: (0.0, 0.0)})
    assert lattice.scales == (0.5, 12.0, -log10)
    # 12 * -0.5 for the language model, 1 * -0.25 for the pronunciation
    assert lattice.arcs[2] == WordArc(1, 3, "ZEBRA", -3 * log10, pytest.approx((-0.5 - 0.25 / 12) * log10))
    assert lattice.time == {0: 0.0, 1: 0.25, 2: 0.25, 3: 0.8}


def test_scores_of_srilm_count_as_the_header_says(folder: Path) -> None:
    """SRILM writes a second language model's scores as `n`; each kind has its scale."""
    text = SLF.replace("acscale", "prscale=3 ngscale=6 acscale").replace("r=-0.25", "r=-0.25 ngram=-0.75")
    (folder / "talk.slf").write_text(text)
    expected = (12 * -0.5 + 3 * -0.25 + 6 * -0.75) / 12 * math.log(10)
    assert read_slf_lattice(folder / "talk.slf").arcs[2].lm_score == pytest.approx(expected)
    (folder / "talk.slf").write_text(text.replace("lmscale=12.0", "lmscale=0"))
    assert read_slf_lattice(folder / "talk.slf").arcs[2].lm_score == pytest.approx(-1.5 * math.log(10))


def test_acoustic_scores_of_srilm_at_nodes(folder: Path) -> None:
    """`-htk-scores-on-nodes`; what a link has itself comes first."""
    text = SLF.replace("W=PAT", "W=PAT a=-1.0").replace("E=1 a=-1.0", "E=1").replace("W=ZEBRA", "W=ZEBRA a=-7 r=-9")
    text = text.replace("l=-0.5\n", "l=-0.5 r=0\n")
    expected = read_slf_lattice(folder / "talk.slf")
    (folder / "talk.slf").write_text(text)
    assert read_slf_lattice(folder / "talk.slf") == expected


def test_nodes_that_srilm_names_begin_and_end_the_lattice(folder: Path, lm: NgramLM) -> None:
    text = SLF.replace("N=4 L=4", "start=0\nend=3\nN=6 L=6").replace("J=0", "I=4 W=CAT\nI=5 W=CAT\nJ=0")
    (folder / "talk.slf").write_text(f"{text}J=4 S=4 E=3 a=0 l=0\nJ=5 S=0 E=5 a=0 l=0\n")
    lattice = read_slf_lattice(folder / "talk.slf")
    assert (lattice.start, lattice.final) == (0, {3: (0.0, 0.0)})
    (folder / "talk.slf").write_text(SLF)
    assert rescore_lattice(lattice, lm, SCALES) == rescore_lattice(read_slf_lattice(folder / "talk.slf"), lm, SCALES)


def test_times_of_htk_have_the_unit_of_the_header(folder: Path) -> None:
    (folder / "talk.slf").write_text(SLF.replace("base=10", "base=10 tscale=0.001").replace("t=0.25", "t=250"))
    assert read_slf_lattice(folder / "talk.slf").time == pytest.approx({0: 0.0, 1: 0.25, 2: 0.25, 3: 0.0008})


LONG_NAMES = {"N": "NODES", "L": "LINKS", "t": "time", "W": "WORD", "S": "START", "E": "END", "a": "acoustic"}


@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_long_names_and_quotes_of_htk(folder: Path, quote: str) -> None:
    """The HTK book allows both forms of a field's name, and quoted values."""
    names = {**LONG_NAMES, "l": "language"}
    text = re.sub(r"\b(\w)=(\S+)", lambda field: f"{names.get(field[1], field[1])}={quote}{field[2]}{quote}", SLF)
    assert "WORD=" in text and "START=" in text
    (folder / "long.slf").write_text(text)
    assert read_slf_lattice(folder / "long.slf") == read_slf_lattice(folder / "talk.slf")


@pytest.mark.parametrize(
    ("written", "word"),
    [
        (r"\'EM", "'EM"),
        ("'EM", "'EM"),
        ('"\'EM"', "'EM"),
        (r'"A \"B\""', 'A "B"'),
        (r"CAF\303\211", "CAFÉ"),
        (r"A\\B", r"A\B"),
        ("A=B", "A=B"),
        ('""', ""),
    ],
)
def test_escaped_words_of_htk(folder: Path, written: str, word: str) -> None:
    (folder / "talk.slf").write_text(SLF.replace("W=PAT", f"W={written}"))
    assert read_slf_lattice(folder / "talk.slf").arcs[0].word == word


@pytest.mark.parametrize("base", ["0", "-2", "1", "ten"])
def test_a_base_without_logarithms_is_refused(folder: Path, base: str) -> None:
    (folder / "talk.slf").write_text(SLF.replace("base=10", f"base={base}"))
    with pytest.raises(AsrError, match=r"base of logarithms|'ten' is not a finite number"):
        read_slf_lattice(folder / "talk.slf")


def test_lattices_of_kaldi_compact_and_not(folder: Path) -> None:
    compact, plain = read_kaldi_archive(folder / "lat.txt", NUMBERED, 0.03)
    assert compact.arcs[0] == WordArc(0, 1, "PAT", -10.0, -1.5) and compact.arcs[3].word == ""
    assert compact.final == {3: (-0.25, -0.5)}
    assert compact.time == pytest.approx({0: 0.0, 1: 0.09, 2: 0.09, 3: 0.15})
    assert [arc.word for arc in plain.arcs] == ["KIT", "", "ZEBRA"] and plain.final == {3: (0.0, 0.0)}
    assert plain.arcs[0] == WordArc(0, 1, "KIT", -1.0, -0.5)
    assert plain.time == pytest.approx({0: 0.0, 1: 0.03, 2: 0.06, 3: 0.06})


def k2_arcs(scores: tuple[float, ...] = (-1.0, -2.0, -3.0, -0.5)) -> torch.Tensor:
    arcs = torch.tensor([[0, 1, 5, 0], [0, 1, 6, 0], [1, 2, 0, 0], [2, 3, -1, 0]], dtype=torch.int32)
    arcs[:, 3] = torch.tensor(scores).view(torch.int32)
    return arcs


def test_a_lattice_of_k2(folder: Path) -> None:
    content = {
        "arcs": k2_arcs(),
        "aux_labels": torch.tensor([1, 2, 0, -1], dtype=torch.int32),
        "lm_scores": torch.tensor([-0.25, 0.0, 0.0, -0.5]),
    }
    torch.save(content, folder / "utt.pt")
    (lattice,) = read_k2_lattices(folder / "utt.pt", NUMBERED, 0.04)
    assert lattice.name == "utt"
    assert lattice.arcs == [WordArc(0, 1, "PAT", -0.75, -0.25), WordArc(0, 1, "KIT", -2.0), WordArc(1, 2, "", -3.0)]
    assert lattice.final == {2: (0.0, -0.5)}
    assert lattice.time == pytest.approx({0: 0.0, 1: 0.04, 2: 0.08})
    content["sentence_end"] = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    torch.save(content, folder / "utt.pt")
    (lattice,) = read_k2_lattices(folder / "utt.pt", NUMBERED, 0.04)
    assert [arc.word for arc in lattice.arcs] == ["PAT", "</s>", "KIT", "</s>"]
    assert lattice.arcs[1:3] == [WordArc(0, 4, "</s>", -2.0), WordArc(4, 1, "KIT", 0.0)]
    torch.save({"arcs": k2_arcs()}, folder / "bad.pt")
    with pytest.raises(AsrError, match=r"the words .* must be one number or one list"):
        read_k2_lattices(folder / "bad.pt", NUMBERED, 0.04)


def test_a_vector_of_lattices_of_k2(folder: Path) -> None:
    """As icefall saves what `get_lattice` returns: several utterances in one flat tensor, one of them without arcs."""
    arcs = torch.cat([k2_arcs(), k2_arcs((-4.0, -5.0, -6.0, -7.0))])
    head = torch.tensor([3, 0, 0, 4, 4, 8, 0, 4, 4, 8], dtype=torch.int32)
    words = torch.tensor([1, 2, 0, -1, 3, 0, 1, -1], dtype=torch.int32)
    torch.save({"arcs": torch.cat([head, arcs.flatten()]), "aux_labels": words}, folder / "some.pt")
    first, empty, last = read_k2_lattices(folder / "some.pt", NUMBERED, 0.04)
    assert [first.name, empty.name, last.name] == ["some-1", "some-2", "some-3"]
    assert [arc.word for arc in first.arcs] == ["PAT", "KIT", ""] and empty.arcs == [] == list(empty.final)
    assert last.arcs == [WordArc(0, 1, "ZEBRA", -4.0), WordArc(0, 1, "", -5.0), WordArc(1, 2, "PAT", -6.0)]
    assert last.final == {2: (-7.0, 0.0)} and first.final == {2: (-0.5, 0.0)}
    for place, value in ((0, 4), (1, 1), (7, 5), (9, 7), (0, -1)):
        wrong = head.clone()
        wrong[place] = value
        torch.save({"arcs": torch.cat([wrong, arcs.flatten()]), "aux_labels": words}, folder / "bad.pt")
        with pytest.raises(AsrError, match="not a k2 lattice: its arcs are not four integers each"):
            read_k2_lattices(folder / "bad.pt", NUMBERED, 0.04)


def test_a_few_arcs_stand_for_no_billion_states(folder: Path) -> None:
    for state in (100, 1 << 20, (1 << 31) - 1):
        arcs = k2_arcs()
        arcs[2, 1] = state
        torch.save({"arcs": arcs, "aux_labels": torch.tensor([1, 2, 0, -1], dtype=torch.int32)}, folder / "bad.pt")
        with pytest.raises(AsrError, match=rf"not a k2 lattice: it has {state + 1} states, but only 4 arcs"):
            read_k2_lattices(folder / "bad.pt", NUMBERED, 0.04)


def test_what_k2_itself_saves(folder: Path) -> None:
    k2 = pytest.importorskip("k2", reason="k2 is not installed", exc_type=ImportError)
    fsa = k2.Fsa.from_str("0 1 1 1 -1.5\n0 1 2 2 -2\n1 2 0 0 -0.25\n2 3 -1 -1 -0.5\n3", acceptor=False)
    torch.save(fsa.as_dict(), folder / "one.pt")
    two = k2.create_fsa_vec([fsa, k2.Fsa.from_str("0 1 3 3 -3\n1 2 -1 -1 0\n2", acceptor=False)])
    torch.save(two.as_dict(), folder / "two.pt")
    two.aux_labels = k2.RaggedTensor([[1], [2, 3], [], [-1], [3, 1], [-1]])
    torch.save(two.as_dict(), folder / "ragged.pt")
    (one,) = read_k2_lattices(folder / "one.pt", NUMBERED, 0.04)
    first, last = read_k2_lattices(folder / "two.pt", NUMBERED, 0.04)
    assert [arc.word for arc in one.arcs] == ["PAT", "KIT", ""] and first.arcs == one.arcs
    assert last.arcs == [WordArc(0, 1, "ZEBRA", -3.0)] and last.final == {1: (0.0, 0.0)}
    first, last = read_k2_lattices(folder / "ragged.pt", NUMBERED, 0.04)
    assert [arc.word for arc in first.arcs] == ["PAT", "KIT", "ZEBRA", ""]
    assert [arc.word for arc in last.arcs] == ["ZEBRA", "PAT"]


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, arpa = str(folder / "text"), str(folder / "2.arpa")
    assert main(["lm", "ngram", "--text", text, "--order", "2", "--arpa", arpa]) == 0
    capsys.readouterr()
    (folder / "nbest").write_text("u1\tSKIP SICK\nu1\tpat two\nu1\tzebra\n")
    model = ["--ngram", arpa]
    words = ["--words", str(folder / "words.txt")]
    inputs = [str(folder / name) for name in ("talk.slf", "lat.txt", "nbest")]
    assert main(["rescore", *inputs, *words, *model, "--lm-scale", "1", "--jsonl", "--nbest", "2"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["id"] for record in records] == ["talk", "utt-1", "utt-2", "u1"]
    assert records[0]["words"][1] == {"word": "ZEBRA", "start": 0.25, "end": 0.8}
    assert records[2]["text"] == "KIT ZEBRA"
    assert records[3]["text"] == "pat two" and len(records[3]["nbest"]) == 2
    assert main(["rescore", inputs[0], *model, "--output-format", "ctm"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "talk 1 0.250 0.550 ZEBRA"
    (folder / "failed").write_text('{"id": "u2", "error": "no audio"}\n{"id": "u3", "text": "PAT"}\n')
    assert main(["rescore", str(folder / "failed"), *model]) == 1
    found = capsys.readouterr()
    assert found.out == "u2\nu3 PAT\n" and found.err == "asr: u2: there is no complete sentence in the input.\n"
    assert main(["rescore", *inputs, *words, *model, "--nbest", "2"]) == 2
    assert "--nbest needs --jsonl" in capsys.readouterr().err
    for name, *unused in (
        ("nbest", "--max-contexts", "8"),
        ("nbest", "--rnn-weight", "0.3"),
        ("nbest", "--cache-mb", "5"),
        ("talk.slf", "--frame-seconds", "0.03"),
        ("talk.slf", "--nbest", "2", "--jsonl"),
        ("talk.slf", *words),
        ("nbest", *words),
    ):
        assert main(["rescore", str(folder / name), *model, *unused]) == 2
        assert f"{unused[0]} has no effect here" in capsys.readouterr().err
    assert main(["rescore", str(folder / "nbest"), *model, "--cache-mb", "nan"]) == 2
    assert "--cache-mb nan: give a number of MB above 0" in capsys.readouterr().err


def test_the_command_says_where_sentences_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arpa = str(folder / "2.arpa")
    assert main(["lm", "ngram", "--text", str(folder / "text"), "--order", "2", "--arpa", arpa]) == 0
    entries = [{"text": "PAT KIT", "sentence_ends": [1]}, {"text": "SICK"}]
    (folder / "list").write_text(json.dumps({"id": "u", "nbest": entries}) + "\n")
    capsys.readouterr()
    command = ["rescore", str(folder / "list"), "--ngram", arpa, "--jsonl"]
    assert main([*command, "--nbest", "2"]) == 0
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    ends = {one["text"]: one.get("sentence_ends") for one in record["nbest"]}
    assert ends == {"PAT KIT": [1], "SICK": None} and "</s>" not in record["text"]
    # Its output can be rescored again.
    (folder / "again").write_text(json.dumps(record) + "\n")
    assert {one.sentence_ends for one in read_n_best(folder / "again")["u"]} == {(), (1,)}


def test_names_with_spaces_and_line_breaks_stay_one_field(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arpa = str(folder / "2.arpa")
    assert main(["lm", "ngram", "--text", str(folder / "text"), "--order", "2", "--arpa", arpa]) == 0
    names = ("my talk", "two\nlines", "speaker/u")
    lines = (json.dumps({"id": name, "nbest": [{"text": "PAT KIT"}]}) for name in names)
    (folder / "list").write_text("\n".join(lines))
    capsys.readouterr()
    assert main(["rescore", str(folder / "list"), "--ngram", arpa]) == 0
    text = capsys.readouterr().out
    assert text == "my_talk PAT KIT\ntwo_lines PAT KIT\nspeaker/u PAT KIT\n"
    (folder / "words.txt").write_text(text)
    assert set(read_transcripts(folder / "words.txt").values()) == {("PAT", "KIT")}


def test_the_command_reads_folders_of_lattices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `asr transcribe --lattices` writes them, with a hidden file and, for Kaldi's, a word list beside them."""
    lattices, arpa = folder / "lattices", str(folder / "2.arpa")
    lattices.mkdir()
    (lattices / ".lattices").write_text("{}\n")
    for source, name in (("talk.slf", "talk.slf"), ("lat.txt", "lattices.txt"), ("words.txt", "words.txt")):
        shutil.copyfile(folder / source, lattices / name)
    assert main(["lm", "ngram", "--text", str(folder / "text"), "--order", "2", "--arpa", arpa]) == 0
    capsys.readouterr()
    arguments = ["rescore", str(lattices), "--words", str(lattices / "words.txt"), "--ngram", arpa]
    assert main(arguments) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["utt-1", "utt-2", "talk"]


def test_frames_of_unknown_length_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arpa = str(folder / "2.arpa")
    assert main(["lm", "ngram", "--text", str(folder / "text"), "--order", "2", "--arpa", arpa]) == 0
    capsys.readouterr()
    kaldi = ["rescore", str(folder / "lat.txt"), "--words", str(folder / "words.txt"), "--ngram", arpa]
    slf = ["rescore", str(folder / "talk.slf"), "--ngram", arpa]
    timed, hint = ["--output-format", "ctm"], "count frames, which are taken to be 0.01 s apart; give --frame-seconds"
    for arguments, is_told in ((kaldi, False), ([*kaldi, *timed], True), ([*slf, *timed], False)):
        assert main(arguments) == 0
        assert (hint in capsys.readouterr().err) == is_told
    assert main([*kaldi, *timed, "--frame-seconds", "0.03"]) == 0
    assert hint not in capsys.readouterr().err


@pytest.mark.slow
def test_histories_of_earlier_utterances_are_forgotten(
    folder: Path, tiny_bundle_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An archive may have thousands of utterances, so memory must not grow with their number."""
    chooser = random.Random(0)
    lists = [[" ".join(chooser.choices(WORDS[:6], k=8)) for _ in range(20)] for _ in range(60)]
    (folder / "list").write_text("".join(f"u{n}\t{text}\n" for n, texts in enumerate(lists) for text in texts))
    arguments = ["rescore", str(folder / "list"), "--rnn-lm", str(tiny_bundle_folder)]
    language_model, engines = rescore.language_model, list[LanguageModel]()

    def recorded(*args: Any) -> LanguageModel:
        engines.append(language_model(*args))
        return engines[-1]

    monkeypatch.setattr(rescore, "language_model", recorded)
    held, texts = list[int](), list[str]()
    for megabytes in ("1", "1024"):
        assert main([*arguments, "--cache-mb", megabytes]) == 0
        engine = engines.pop()
        assert isinstance(engine, CachedRNNLM)
        held.append(engine.statistics().num_contexts)
        texts.append(capsys.readouterr().out)
    assert held[0] < held[1] / 2 and texts[0] == texts[1]


def test_words_that_a_bundles_network_lacks_are_not_worth_its_whole_unknown(
    folder: Path, tiny_bundle_folder: Path
) -> None:
    bundle = Bundle.load(tiny_bundle_folder)
    first, *others = bundle.graph.vocabulary.words[len(SPECIAL_WORDS) :]
    network = RNNLanguageModel(Vocabulary(others), RNNLMConfig(embedding_size=4, hidden_size=4))
    arguments = {"embedding_size": 4, "hidden_size": 4}
    replace(bundle, rnn_lm=ModelSpec("RnnLm", arguments, network), large_ngram=None).save(folder / "bundle")
    names = ("rnn_lm", "ngram", "rnn_weight", "cache_mb")
    lm = rescore.language_model(argparse.Namespace(bundle=folder / "bundle", **dict.fromkeys(names)))
    engine = CachedRNNLM(read_rnn_lm(folder / "bundle").network)  # type: ignore[arg-type]
    unknown, _ = engine.score(engine.start(1), torch.tensor([UNK_ID]))
    found, _ = lm.score(lm.start(1), lm.vocabulary.ids_of([first]))
    torch.testing.assert_close(found, unknown + math.log(0.25))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.slf", SLF.replace("L=4", "L=9"), "the header announces L=9, but there are 4"),
        ("a.slf", SLF.replace("W=KIT", "L=digits"), "a.slf: I=2 L=digits: sub-lattices are not supported"),
        ("a.slf", SLF.replace("base", "SUBLAT=digits base"), "a.slf: SUBLAT=digits: sub-lattices are not supported"),
        ("a.slf", SLF.replace("a=-1.5", "a=x"), "a.slf:10: 'x' is not a finite number"),
        ("a.slf", SLF.replace("E=2", "E=7"), "a.slf:10: a link must lead from a node"),
        ("lat", KALDI.replace("1\t3\t3", "1\t3\t9"), "lat:4: there is no word 9 in the word list"),
        ("lat", KALDI.replace("1.5,10.0", "1.5,nan"), "lat:2: 'nan' is not a finite number"),
        ("list", "u1\tx\tPAT\n", "list:1: 'x' is not a finite number"),
        ("list", "u1 PAT\n", "list:1: expected 'id<TAB>words'"),
        ("list", '{"id": "u", "nbest": [{"score": 1}]}\n', "list:1: expected an object with 'id'"),
        ("list", '{"id": "u", "nbest": [{"text": ["PAT"], "score": 1}]}\n', "list:1: expected an object with 'id'"),
        ("gone", None, "there is no such file or folder"),
    ],
)
def test_wrong_files_are_one_sentence(folder: Path, name: str, content: str | None, message: str, capsys) -> None:
    if content is not None:
        (folder / name).write_text(content)
    assert main(["rescore", str(folder / name), "--words", str(folder / "words.txt")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_can_be_read_is_rescored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.slf").write_text(SLF.replace("L=4", "L=9"))
    (folder / "cut").write_text("u1\tSKIP SICK\nu2\n")
    text, arpa = str(folder / "text"), str(folder / "2.arpa")
    assert main(["lm", "ngram", "--text", text, "--order", "2", "--arpa", arpa]) == 0
    capsys.readouterr()
    inputs = [str(folder / name) for name in ("bad.slf", "talk.slf", "cut", "gone")]
    assert main(["rescore", *inputs, "--ngram", arpa]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[0].startswith("talk ")
    errors = output.err.splitlines()
    assert [line.startswith("asr: error: ") for line in errors] == [True, True, True]
    assert "bad.slf: the header announces L=9" in errors[0] and "gone: there is no such file" in errors[2]


@pytest.mark.parametrize("name", ["am_scale", "old_lm_scale", "lm_scale", "word_insertion_penalty"])
def test_scales_are_finite(name: str) -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(AsrError, match=f"{name} is {value}; give a finite number"):
            RescoringScales(**{name: value})


def test_numbers_need_their_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescore", str(folder / "lat.txt")]) == 2
    assert "its words are numbers; give --words" in capsys.readouterr().err


def test_what_htk_writes(tmp_path: Path) -> None:
    """A packed lattice with a quoted name, marks of beginning and end, and words that stand on links."""
    text = (
        '# comment\nVERSION=1.1\nUTTERANCE="utterance 1"\nlmscale=12 wdpenalty=0.7\nN=4 L=3\n'
        "I=0 t=0.00 \nI=1 t=0.25 \nI=2 t=0.62 \nI=3 t=0.80 \n"
        "J=0 S=0 E=1 W=!ENTER v=0 a=-1432.27 l=0.00 \nJ=1 S=1 E=2 W=THE v=3 a=-24 l=-8.5 \n"
        "J=2 S=2 E=3 W=!EXIT v=0 a=-46 l=-13.83\n"
    )
    path = tmp_path / "it.slf.gz"
    path.write_bytes(gzip.compress(text.encode()))
    lattice = read_slf_lattice(path)
    assert lattice.name == "utterance_1" and [arc.word for arc in lattice.arcs] == ["", "THE", ""]
    assert lattice.scales == (1.0, 12.0, 0.7)
    path.write_bytes(gzip.compress(text.replace('UTTERANCE="utterance 1"\n', "").encode()))
    assert read_slf_lattice(path).name == "it"


def test_a_word_of_a_lattice_of_frames_lasts_until_the_next(lm: NgramLM) -> None:
    """As kaldi-decoder writes it: a word stands on the first of its frames."""
    arcs = [WordArc(n, n + 1, {1: "THE", 4: "CAT"}.get(n, ""), -1.0) for n in range(7)]
    frames = WordLattice("it", 8, 0, arcs, {7: (0.0, 0.0)}, {n: 0.03 * n for n in range(8)})
    found = rescore_lattice(frames, lm, SCALES)
    assert found is not None
    assert [(word.text, round(word.start or 0, 3), round(word.end or 0, 3)) for word in found.words] == [
        ("THE", 0.03, 0.12),
        ("CAT", 0.12, 0.21),
    ]
    # Where arcs are words, a pause between them stays a pause.
    spoken = replace(frames, time={n: 0.3 * n for n in range(8)})
    found = rescore_lattice(spoken, lm, SCALES)
    assert found is not None and [round(word.end or 0, 3) for word in found.words] == [0.6, 1.5]


def test_lattices_of_kaldi_decoder(tmp_path: Path, lm: NgramLM) -> None:
    """Its own best path comes out where its own scores decide, and every score of it is in the lattice."""
    kaldi_decoder = pytest.importorskip("kaldi_decoder", reason="kaldi-decoder is not installed", exc_type=ImportError)
    import kaldifst

    tokens = {"THE": 1, "CAT": 2, "A": 3}
    # A loop over words of one token each, which blanks (label 1) may separate; costs tell the words apart.
    arcs = [f"0 0 {token + 1} {token} {0.25 * token}" for token in tokens.values()] + ["0 0 1 0 0.125"]
    fst = kaldifst.compile("\n".join([*arcs, "0 0.5"]) + "\n")
    log_prob = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    decoder = kaldi_decoder.LatticeSimpleDecoder(
        fst, kaldi_decoder.LatticeSimpleDecoderConfig(beam=20.0, lattice_beam=8.0)
    )
    decodable = kaldi_decoder.DecodableCtc(log_prob.numpy().astype(np.float32))
    assert decoder.decode(decodable)
    (tmp_path / "lat.txt").write_text(f"utt {chr(10)}{decoder.get_raw_lattice()[1]}{chr(10)}")
    found, best = decoder.get_best_path()
    _, _, labels, weight = kaldifst.get_linear_symbol_sequence(best)
    names = {0: "", **{token: word for word, token in tokens.items()}}
    (lattice,) = read_kaldi_archive(tmp_path / "lat.txt", names, 0.03)
    assert len(lattice.arcs) > 12, "with alternatives"
    rescored = rescore_lattice(lattice, lm, RescoringScales(1.0, 1.0, 0.0))
    assert found and rescored is not None
    assert [word.text for word in rescored.words] == [names[label] for label in labels]
    assert rescored.total == pytest.approx(-(weight.value1 + weight.value2), abs=1e-3)
    assert rescored.old_lm_score == pytest.approx(-weight.value1, abs=1e-3)
    # Words tile the time from the first of them on.
    assert [word.end for word in rescored.words[:-1]] == [word.start for word in rescored.words[1:]]
    assert rescored.words[-1].end == pytest.approx(12 * 0.03)


def test_words_are_looked_up_in_equivalent_forms_and_other_cases() -> None:
    vocabulary = Vocabulary(["été", "DON'T", "a"])
    words = ["e\u0301te\u0301", "don’t", "A", "ete", "été"]
    assert [vocabulary.words[word_id] for word_id in word_ids(words, vocabulary)] == [
        "été",
        "DON'T",
        "a",
        "<unk>",
        "été",
    ]
