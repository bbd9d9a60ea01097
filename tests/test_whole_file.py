"""Files appear whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from asr.errors import AsrError
from asr.whole_file import whole_path, written_whole


def test_a_file_has_its_name_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with written_whole(path) as stream:
        stream.write(b"all of it")
        assert not path.exists()
    assert path.read_bytes() == b"all of it"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failure", [AsrError("the text is empty"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_what_was_there(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    with pytest.raises(type(failure)), written_whole(path) as stream:
        stream.write(b"half")
        raise failure
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    sentence = r"a\.bin: the file cannot be written \(No space left.*make room"
    with pytest.raises(AsrError, match=sentence), whole_path(tmp_path / "a.bin") as partial:
        partial.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(AsrError, match="cannot be written"), written_whole(tmp_path / "none" / "a.bin"):
        pass
