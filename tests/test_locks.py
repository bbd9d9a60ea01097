"""Locks of files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from asr.locks import lock


def test_one_at_a_time_has_a_lock(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as other:
        with (tmp_path / "file").open() as one:  # a lock belongs to the open file
            assert lock(one) and lock(one, wait=False)
            assert not lock(other, wait=False)
        assert lock(other, wait=False)


@pytest.mark.parametrize("wait", [True, False])
def test_without_locks_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with (tmp_path / "file").open("w") as file:
        assert lock(file, wait)
