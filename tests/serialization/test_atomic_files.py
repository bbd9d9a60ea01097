"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asr.errors import AsrError
from asr.serialization import atomic_path, open_atomic, require_writable, write_whole_text


def test_a_file_has_its_name_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with open_atomic(path) as stream:
        stream.write(b"all of it")
        assert not path.exists()
    assert path.read_bytes() == b"all of it"
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_utf_8_cannot_encode_is_written_escaped(tmp_path: Path) -> None:
    write_whole_text(tmp_path / "a.txt", "caf\u00e9 \ud800\n")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "caf\u00e9 \\ud800\n"


@pytest.mark.parametrize("failure", [AsrError("the text is empty"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_what_was_there(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    with pytest.raises(type(failure)), open_atomic(path) as stream:
        stream.write(b"half")
        raise failure
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    sentence = r"a\.bin: the file cannot be written \(No space left.*make room"
    with pytest.raises(AsrError, match=sentence), atomic_path(tmp_path / "a.bin") as partial:
        partial.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_what_numpy_says_of_a_full_disk_is_said(tmp_path: Path) -> None:
    """Its error has neither a number nor the system's text."""
    sentence = r"a\.npy: the file cannot be written \(800 requested and 400 written\)"
    with pytest.raises(AsrError, match=sentence), atomic_path(tmp_path / "a.npy"):
        raise OSError("800 requested and 400 written")


def test_a_limit_of_file_sizes_is_one_sentence(tmp_path: Path) -> None:
    sentence = r"a\.bin: the file cannot be written \(File too large\); raise the limit .*ulimit -f"
    with pytest.raises(AsrError, match=sentence), atomic_path(tmp_path / "a.bin"):
        raise OSError(errno.EFBIG, "File too large")


def test_a_disk_that_becomes_read_only_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting the unfinished file then fails, too."""

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", fail)
    sentence = r"/a\.bin: the file cannot be written \(Read-only file system\)"
    with pytest.raises(AsrError, match=sentence), atomic_path(tmp_path / "a.bin"):
        raise OSError(errno.EROFS, "Read-only file system")


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    sentence = "cannot be written.*make its folder first"
    with pytest.raises(AsrError, match=sentence), open_atomic(tmp_path / "none" / "a.bin"):
        pass


def test_links_lead_to_the_file_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large" / "a.bin")
    for content in (b"first", b"second"):
        with open_atomic(tmp_path / "link") as stream:
            stream.write(content)
        assert (tmp_path / "large" / "a.bin").read_bytes() == content
    assert (tmp_path / "link").is_symlink()


def test_pipes_and_devices_are_written_to_and_stay(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open_atomic(pipe) as stream:
        stream.write(b"all of it")
    assert os.read(reader, 100) == b"all of it"
    os.close(reader)
    assert pipe.is_fifo()


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    for name in ("none/a", "", "a", "b/../a"):
        (tmp_path / "b").mkdir(exist_ok=True)
        with pytest.raises(AsrError, match=r"make it first|name a file in it|two results would go"):
            require_writable(tmp_path / "a", tmp_path / name)
    require_writable(tmp_path / "a", tmp_path / "c")


def test_threads_that_write_the_same_file_do_not_disturb_each_other(tmp_path):
    path, contents = tmp_path / "a.txt", {str(number) * 10_000 for number in range(4)}

    def write(content: str) -> None:
        for _ in range(50):
            write_whole_text(path, content)
            assert path.read_text() in contents

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, contents))
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]
