"""Checkpoints are read without running code from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asr.errors import AsrError
from asr.serialization import read_checkpoint
from tests.reference.harmful_pickle import HarmfulPickle


def test_tensors_and_plain_values_come_back(tmp_path: Path) -> None:
    content = {"state_dict": {"weight": torch.arange(3.0)}, "tokens": ["<blk>", "AA"], "epoch": 3, "states": {0: None}}
    torch.save(content, tmp_path / "last.ckpt")
    read = read_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(read.pop("state_dict")["weight"], content.pop("state_dict")["weight"])  # type: ignore[call-overload]
    assert read == content


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    torch.save({"state_dict": {}, "callbacks": HarmfulPickle(made)}, tmp_path / "last.ckpt")
    torch.load(tmp_path / "last.ckpt", weights_only=False)
    made.rmdir()  # raises where the file is harmless, so that the test would show nothing
    with pytest.raises(AsrError, match="no Lightning checkpoint can be read there"):
        read_checkpoint(tmp_path / "last.ckpt")
    assert not made.exists()


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    with pytest.raises(AsrError, match=r"last\.ckpt: no Lightning checkpoint can be read there \(.+\)"):
        read_checkpoint(path)


def test_a_file_without_network_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "last.ckpt")
    with pytest.raises(AsrError, match="it has no state_dict"):
        read_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(AsrError, match="No such file"):
        read_checkpoint(tmp_path / "none.ckpt")
