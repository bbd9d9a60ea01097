from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from asr.decoding import k2
from asr.decoding.build import OLD_FIRST_PASSES, calibration_of, chosen_decoder, default_decoder, old_first_pass
from asr.errors import AsrError
from tests.decoding.random_graphs import random_graph

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("k2_runs", [True, False])
def test_the_fastest_that_runs_is_the_default(k2_runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k2, "k2_works", lambda device: k2_runs)
    other = "k2" if k2_runs else "token-passing"
    monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    assert (default_decoder(CPU), default_decoder(GPU)) == ("token-passing", other)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert default_decoder(CPU) == other


def test_a_k2_that_imports_but_cannot_intersect_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("k2")
    monkeypatch.setitem(sys.modules, "k2", module)
    assert not k2.k2_works(CPU)
    monkeypatch.setitem(sys.modules, "k2", None)
    assert not k2.k2_works(CPU)


def test_a_k2_that_intersects_works() -> None:
    pytest.importorskip("k2")
    assert k2.k2_works(CPU)


@pytest.mark.parametrize(
    ("asked", "has_epsilons", "chosen"),
    [
        (("auto", "auto"), False, ("token-passing", "chunks")),
        (("auto", "lattice"), False, ("token-passing", "lattice")),
        (("auto", "search"), False, ("token-passing", "search")),
        (("token-passing", "auto"), False, ("token-passing", "chunks")),
        (("token-passing", "chunks"), False, ("token-passing", "chunks")),
        (("k2", "auto"), False, ("k2", "lattice")),
        (("k2", "lattice"), False, ("k2", "lattice")),
        (("auto", "auto"), True, ("token-passing", "search")),
        (("token-passing", "lattice"), True, ("token-passing", "search")),
        (("k2", "auto"), True, ("k2", "lattice")),
    ],
)
def test_decoder_and_fusion_are_chosen_for_the_graph(
    asked: tuple[str, str], has_epsilons: bool, chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    assert chosen_decoder(*asked, random_graph(1, epsilons=has_epsilons), CPU) == chosen


def test_without_compiled_loops_lattices_are_rescored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(k2, "k2_works", lambda device: True)
    graph = random_graph(1)
    assert chosen_decoder("token-passing", "auto", graph, CPU) == ("token-passing", "lattice")
    # k2 has no fusion within the search, and does not read epsilons.
    assert chosen_decoder("auto", "lattice", graph, CPU) == ("k2", "lattice")
    assert chosen_decoder("auto", "search", graph, CPU) == ("token-passing", "search")
    assert chosen_decoder("auto", "auto", random_graph(1, epsilons=True), CPU) == ("token-passing", "search")


@pytest.mark.parametrize(
    ("decoder", "lm_fusion", "device", "message"),
    [
        ("kaldi", "auto", CPU, "there is no decoder 'kaldi'; choose one of auto, token-passing, k2"),
        ("auto", "frames", CPU, "there is no fusion 'frames' of the language model; choose auto or one of"),
        ("k2", "chunks", CPU, "k2 does not support lm_fusion chunks; choose lattice"),
        ("k2", "search", CPU, "k2 does not support lm_fusion search; choose lattice"),
        ("token-passing", "chunks", GPU, "lm_fusion chunks needs a CPU, but the recognizer is on cuda"),
    ],
)
def test_what_no_decoder_can_do_is_one_sentence(
    decoder: str, lm_fusion: str, device: torch.device, message: str
) -> None:
    with pytest.raises(AsrError, match=message):
        chosen_decoder(decoder, lm_fusion, random_graph(1), device)


def test_old_names_of_first_passes() -> None:
    names = {old_first_pass(*new): old for old, new in OLD_FIRST_PASSES.items()}
    assert names == {old: old for old in OLD_FIRST_PASSES}
    assert old_first_pass("token-passing", "chunks") == "torch-chunks"


def test_confidences_are_calibrated_where_there_are_lattices() -> None:
    """By the mode's own calibration or that of the first mode that has one; graphs with epsilons have no lattices."""

    def bundle(epsilons: bool, *modes: str) -> Any:
        graph = random_graph(1, epsilons=epsilons)
        confidence = {mode: {"bias": float(number), "terms": {}} for number, mode in enumerate(modes)}
        parts = {"rnn_lm": None, "small_ngram": None, "large_ngram": None, "default_mode": None}
        return SimpleNamespace(name="small", graph=graph, confidence=confidence, **parts)

    assert calibration_of(bundle(True, "ngram"), "ngram") is None
    assert calibration_of(bundle(False), "ngram") is None and calibration_of(bundle(False, "rnn"), "ngram") is None
    for mode, bias in (("rnn", 1.0), ("ngram", 0.0), ("external", 0.0)):
        found = calibration_of(bundle(False, "ngram", "rnn"), mode)
        assert found is not None and found.bias == bias
