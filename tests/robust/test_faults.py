"""Commands that are killed, find the disk full, or cannot write: what the sweep of `scripts/bench robust` notices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asr.cli.main import main
from asr.errors import AsrError
from asr.serialization import atomic_folder, write_whole_text
from scripts.benchmarks import faults

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    path = tmp_path_factory.mktemp("library") / "faults.so"
    source = ROOT / "scripts" / "benchmarks" / "faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source), "-ldl"], check=True)
    return path


CAREFUL = "file = open('new', 'w'); file.write('b' * 100); file.close(); os.replace('new', 'out')"
CARELESS = "file = open('out', 'w'); file.write('b' * 100); file.close()"


@pytest.mark.slow
@pytest.mark.parametrize(("action", "error"), [(1, 0), (2, 0), (3, 28)], ids=["killed", "half written", "disk full"])
@pytest.mark.parametrize(("program", "is_careful"), [(CAREFUL, True), (CARELESS, False)])
def test_faults_strike_at_each_call(
    library: Path, tmp_path: Path, action: int, error: int, program: str, is_careful: bool
) -> None:
    """The library does what it says: a program that overwrites in place loses its file at some call."""
    before, after = "a" * 100, "b" * 100
    arm = "import ctypes, os; shim = ctypes.CDLL({!r}); shim.faults_arm(os.getcwd().encode(), {}, {}, {}); "
    is_lost = False
    for call in range(4):
        (tmp_path / "out").write_text(before)
        code = arm.format(str(library), call, action, error) + program
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        command = [sys.executable, "-S", "-c", code]
        ran = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
        if call == 0:
            assert ran.returncode != 0 and (tmp_path / "out").read_text() == before
            assert error == 0 or "No space left" in ran.stderr
        is_lost |= (tmp_path / "out").read_text() not in (before, after)
    assert is_lost == (not is_careful)


@pytest.mark.slow
@pytest.mark.one_stack
def test_a_short_sweep_finds_nothing(library: Path) -> None:
    pytest.importorskip("kaldifst")
    process = faults.run_faults(8, seed=1, only="transcribe")
    assert process is not None
    report = faults.report_of(process)
    assert report.pop("faults_tried") == 10  # and two without a GPU's memory
    assert not any(report.values())


def test_a_folder_is_there_at_every_moment(tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "bundle"
    (target / "more").mkdir(parents=True)
    for name in ("old", "notes", "more/inner"):
        (target / name).write_text(name)
    (target / "link").symlink_to("notes")
    seen = []
    for name in ("rename", "replace", "unlink", "rmdir"):
        real = getattr(os, name)

        def watched(*arguments, real=real, **settings):
            seen.append((target / "old").is_file())
            return real(*arguments, **settings)

        monkeypatch.setattr(os, name, watched)
    with atomic_folder(target) as partial:
        (partial / "old").write_text("new")
    assert all(seen)
    assert {path.name: path.read_text() for path in target.iterdir() if path.is_file()} == {
        "old": "new",
        "notes": "notes",
        "link": "notes",
    }
    assert (target / "link").is_symlink() and (target / "more" / "inner").read_text() == "more/inner"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_text_is_replaced_as_a_whole(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    real = Path.write_text

    def disk_is_full(self, text, **settings):
        real(self, text[:2], **settings)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", disk_is_full)
    with pytest.raises(AsrError, match="No space left"):
        write_whole_text(path, "after")
    assert path.read_text() == "before" and [one.name for one in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nMore"),
    ],
    ids=["GPU", "library of a GPU", "Python", "CPU"],
)
def test_lacking_memory_is_told_in_one_sentence(error: Exception, monkeypatch, capsys) -> None:
    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr("asr.cli.main.run", fails)
    assert main(["transcribe"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("asr: error: there is not enough memory (") and told.count("\n") == 1


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch) -> None:
    def fails(*_: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("asr.cli.main.run", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["transcribe"])


@pytest.mark.slow
@pytest.mark.one_stack
def test_homes_that_are_missing_or_read_only(tiny_bundle_folder: Path, tmp_path: Path) -> None:
    import soundfile

    from asr.testing.tones import RATE, tones

    soundfile.write(str(tmp_path / "a.wav"), tones(["PAT", "KIT"]).numpy(), RATE, subtype="FLOAT")
    command = [sys.executable, "-m", "asr", "transcribe", "--bundle", str(tiny_bundle_folder), str(tmp_path / "a.wav")]
    # Nothing can be written below a device.
    environment = {**os.environ, "HOME": "/dev/null/home", "XDG_CACHE_HOME": "/dev/null/cache", "PYTHONPATH": str(ROOT)}
    command += ["--jsonl"]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["text"] == "PAT KIT"
