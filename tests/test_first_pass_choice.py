from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from asr.decoding.build import default_decoder

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("with_cuda", [True, False])
def test_the_fastest_that_runs_is_the_default(with_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    k2 = ModuleType("k2")
    k2.with_cuda = with_cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    monkeypatch.setitem(sys.modules, "k2", k2)
    assert (default_decoder(CPU), default_decoder(GPU)) == ("token-passing", "k2" if with_cuda else "token-passing")
    monkeypatch.setitem(sys.modules, "numba", None)
    assert default_decoder(CPU) == "k2"
    monkeypatch.setitem(sys.modules, "k2", None)
    assert (default_decoder(CPU), default_decoder(GPU)) == ("token-passing", "token-passing")
