"""Damaged MP3 gives our sentences, and nothing of its decoder's; what others write to stderr is not lost."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.codecs import kept_complaints
from asr.audio.io import file_pieces, read_audio
from asr.errors import AsrError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="C's stderr is set in glibc only")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mp3") / "intact.mp3"
    soundfile.write(str(path), np.random.default_rng(0).uniform(-0.3, 0.3, 48000).astype(np.float32), 16000)
    return path


def damaged(intact: Path, path: Path) -> Path:
    """With a frame whose side information asks for more values than a frame has."""
    content = bytearray(intact.read_bytes())
    header = content.index(b"\xff\xf3", 1500)
    content[header + 4 : header + 13] = b"\xff" * 9
    path.write_bytes(content)
    return path


def pieces(path: Path) -> torch.Tensor:
    return torch.cat(list(file_pieces(path, 0.2)[1]))


@pytest.mark.parametrize("read", [read_audio, pieces])
def test_damage_that_is_passed_over_is_one_warning_of_ours(intact: Path, tmp_path: Path, read, capfd, caplog) -> None:
    path = damaged(intact, tmp_path / "a.mp3")
    assert len(read(path)) == len(read(intact))
    assert caplog.messages == [f"{path}: the MP3 is damaged in places; words there may be wrong or missing."]
    assert "mpg123" not in capfd.readouterr().err


def test_damaged_mp3_that_is_cut_short_is_one_sentence(intact: Path, tmp_path: Path, capfd, caplog) -> None:
    path = damaged(intact, tmp_path / "a.mp3")
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(AsrError, match="the audio is cut short"):
        read_audio(path)
    assert not caplog.messages
    assert 0 < len(pieces(path)) < 48000
    assert caplog.messages == [f"{path}: the audio is cut short: its header announces more than there is."]
    assert "Xing" not in capfd.readouterr().err


def write_in_c(line: bytes) -> None:
    libc = ctypes.CDLL(None)
    libc.fputs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    libc.fputs(line, ctypes.c_void_p.in_dll(libc, "stderr"))


def test_another_thread_waits_so_that_each_has_its_own_complaints() -> None:
    others = list[list[str]]()

    def read() -> None:
        with kept_complaints() as complaints:
            others.append(complaints)

    with kept_complaints() as mine:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(0.2)
        assert not others
        write_in_c(b"Note: Trying to resync...\n")
    thread.join()
    assert (mine, others) == (["Note: Trying to resync..."], [[]])


def test_what_others_write_to_stderr_meanwhile_is_not_lost(capfd) -> None:
    with kept_complaints() as complaints:
        write_in_c(b"Note: Trying to resync...\nAssertion failed.\n")
        os.write(2, b"At once.\n")
    assert complaints == ["Note: Trying to resync..."]
    assert capfd.readouterr().err == "At once.\nAssertion failed.\n"
    write_in_c(b"Afterwards.\n")
    assert capfd.readouterr().err == "Afterwards.\n"


def test_a_process_forked_meanwhile_does_not_wait() -> None:
    """As those that prepare batches, whatever another thread is decoding."""
    with kept_complaints():
        child = os.fork()
        if child == 0:
            with kept_complaints():
                os._exit(0)
        watch = threading.Timer(20, os.kill, (child, 9))
        watch.start()
        assert os.waitpid(child, 0)[1] == 0
        watch.cancel()
