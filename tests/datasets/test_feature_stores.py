"""Features kept in memory and in a folder come back as they were."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from asr.datasets.dataset import FeatureFolder, FeatureMemory
from asr.errors import AsrError

CONFIG = {"num_mel_bins": 4, "high_freq": 0.0}


def test_memory_keeps_what_fits() -> None:
    frames = torch.randn(256, 1)  # 1 KiB
    memory = FeatureMemory(2.5 / 2**20)
    for key in ("a", "a", "b", "c"):
        memory.put(key, frames)
    assert torch.equal(memory.get("a"), frames) and torch.equal(memory.get("b"), frames)
    assert memory.get("c") is None and len(memory) == 2


def test_a_folder_outlives_its_process(tmp_path: Path) -> None:
    frames = torch.randn(7, 4)
    FeatureFolder(tmp_path / "features", CONFIG).put("speaker/utterance_sp0.9", frames)
    again = FeatureFolder(tmp_path / "features", CONFIG)
    assert torch.equal(again.get("speaker/utterance_sp0.9"), frames)
    assert again.get("speaker_utterance_sp0.9") is None


def test_processes_that_begin_at_once_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process looks into the folder while the first one is writing there."""
    write_text = Path.write_text

    def slowly(path: Path, text: str, **options: str) -> None:
        monkeypatch.undo()
        with path.open("w", **options):
            FeatureFolder(tmp_path, CONFIG)
        write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", slowly)
    FeatureFolder(tmp_path, CONFIG)


def test_a_folder_of_other_features_is_refused(tmp_path: Path) -> None:
    FeatureFolder(tmp_path, CONFIG)
    with pytest.raises(AsrError, match="the features in it were computed with"):
        FeatureFolder(tmp_path, {**CONFIG, "high_freq": 5600.0})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = FeatureFolder(tmp_path, CONFIG)
    folder.put("u", torch.randn(7, 4))
    path = next(tmp_path.rglob("*.npy"))
    for content in (path.read_bytes()[:-10], b"", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(AsrError, match="are damaged") as error:
            folder.get("u")
        assert str(path) in str(error.value)


def test_a_full_disk_ends_the_storing_but_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, frames = FeatureFolder(tmp_path, CONFIG), torch.randn(7, 4)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("numpy.save", full)
        folder.put("a", frames)
    folder.put("b", frames)
    (message,) = caplog.messages
    assert "no more features are stored: " in message and "No space left on device" in message
    assert folder.get("a") is None and folder.get("b") is None


def test_ids_may_be_longer_than_names_of_files(tmp_path: Path) -> None:
    folder = FeatureFolder(tmp_path, CONFIG)
    ids = ["ü" * 200 + end for end in ("a", "b")]
    for number, name in enumerate(ids):
        folder.put(name, torch.full((3, 4), float(number)))
    assert [float(folder.get(name)[0, 0]) for name in ids] == [0.0, 1.0]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AsrError, match="cannot be used"):
        FeatureFolder(tmp_path / "file", CONFIG)
