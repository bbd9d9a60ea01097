from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from asr.decoding import k2
from asr.decoding.build import default_decoder

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
