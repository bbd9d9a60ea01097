"""The fuzzer of `scripts/bench robust` notices each kind of failure, and the readers survive a run of it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asr.errors import AsrError
from scripts.benchmarks import robust


def hang(path: Path) -> None:
    time.sleep(30)


def spin(path: Path) -> None:
    while True:
        pass


def nap(path: Path) -> None:
    time.sleep(1.5)
    raise AsrError(f"{path}: this took its time.")


def fail(path: Path) -> None:
    raise KeyError("no sentence")


def mumble(path: Path) -> None:
    raise AsrError("two\nlines")


def refuse(path: Path) -> None:
    raise AsrError(f"{path}: this is no such file.")


def take_memory(path: Path) -> None:
    bytearray(robust.MEMORY_BYTES * 2)


def read_anything(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.one_stack
@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda path: os.abort(), "crashes"),
        (hang, "hangs"),
        (spin, "hangs"),
        (nap, "refused"),  # a busy machine is no fault of the reader's
        (fail, "other_exceptions"),
        (take_memory, "other_exceptions"),
        (mumble, "refusals_without_sentence"),
        (refuse, "refused"),
        (read_anything, "silent_bit_flips"),
        (lambda path: (path.parents[1] / "executed").mkdir(), "code_executed"),
    ],
)
def test_every_failure_is_counted(tmp_path: Path, monkeypatch, read: Callable[[Path], Any], kind: str) -> None:
    monkeypatch.setattr(robust, "SECONDS_PER_INPUT", 0.5)
    monkeypatch.setattr(robust, "BLOCKED_SECONDS", 3.0)
    (tmp_path / "fuzz-a").mkdir()
    target = robust.Target(read, [b"good"], is_checked=kind == "silent_bit_flips")
    report: Counter[str] = Counter()
    path, marker = tmp_path / "fuzz-a" / "input", tmp_path / "executed"
    path.write_bytes(b"good")
    done = robust._child("a", target, range(1), 0, path, marker, tmp_path / "keep", report)
    assert done == 1 and report == {"inputs_tried": 1, kind: 1}
    assert (tmp_path / "keep").is_dir() == (kind != "refused")


@pytest.mark.slow
@pytest.mark.one_stack
def test_readers_survive_a_short_run(tmp_path: Path) -> None:
    report: Counter[str] = Counter()
    for name, target in robust.targets_in(tmp_path).items():
        robust._fuzz(name, target, 6, 1, tmp_path, tmp_path / "keep", report)
    assert set(report) <= {"inputs_tried", "refused"} and report["inputs_tried"] > 100


@pytest.mark.slow
@pytest.mark.one_stack
def test_killed_runs_lose_and_double_nothing(tmp_path: Path) -> None:
    report: Counter[str] = Counter()
    robust._kill_and_resume(tmp_path, 8, 0, report)
    assert not any(report.values())
    assert len({json.loads(line)["audio"] for line in (tmp_path / "killed.jsonl").read_text().splitlines()}) == 400
