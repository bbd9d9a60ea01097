"""What stands in for safetensors reads and writes what the package does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

STAND_INS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "stand_ins"
TENSORS = {
    "bfloat16": torch.arange(6).reshape(2, 3).bfloat16(),
    "float16": torch.arange(3).half(),
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor(-5),
    "empty": torch.zeros(0, 3),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported in the place of the package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield importlib.import_module("safetensors.torch")
    for name in ("safetensors", "safetensors.torch"):
        del sys.modules[name]


def assert_same(found: dict[str, Any]) -> None:
    assert sorted(found) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_it_reads_what_the_package_writes(tmp_path: Path, stand_in: Any) -> None:
    own = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    (tmp_path / "file").write_bytes(save(own, {"key": "ä"}))
    assert_same(stand_in.load_file(tmp_path / "file"))
    with stand_in.safe_open(tmp_path / "file", framework="np") as file:
        assert file.metadata() == {"key": "ä"}
        assert np.array_equal(file.get_tensor("uint8"), np.arange(5))


def test_the_package_reads_what_it_writes(tmp_path: Path, stand_in: Any) -> None:
    (tmp_path / "file").write_bytes(stand_in.save(TENSORS, {"key": "ä"}))
    assert_same(load_file(tmp_path / "file"))
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"key": "ä"}


def test_damaged_files_are_refused(tmp_path: Path, stand_in: Any) -> None:
    content = stand_in.save(TENSORS)
    error = sys.modules["safetensors"].SafetensorError
    for damaged in (content[:-3], content[:40], b"", b"\xff" * 30):
        (tmp_path / "file").write_bytes(damaged)
        with pytest.raises(error):
            stand_in.load_file(tmp_path / "file")
