"""Which recordings have all their lattices in a folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from asr.cli.output import LatticeWriter, with_lattices
from asr.cli.recordings import Shard
from asr.locks import lock

WHOLE, SECOND = Shard.parse("1/1"), Shard.parse("2/2")
WRITTEN = {"x.wav": ["x"], "long.wav": ["long-0000000-0001000", "long-0001000-0002000"], "noise.wav": []}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [[recording, recording[:-4], names] for recording, names in WRITTEN.items()]
    lines.append(["begun.wav", "begun"])
    (tmp_path / ".lattices").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


def found(folder: Path, lattice_format: str, shard: Shard = WHOLE) -> list[str]:
    return sorted(with_lattices(folder, lattice_format, shard, [*WRITTEN, "begun.wav", "unknown.wav"]))


@pytest.mark.parametrize(("lattice_format", "suffix"), [("slf", ".slf"), ("slf", ".slf.gz"), ("k2", ".pt")])
def test_each_segment_has_its_file(folder: Path, lattice_format: str, suffix: str) -> None:
    assert found(folder, lattice_format) == ["noise.wav"]
    for name in ("x", "begun", "long-0000000-0001000"):
        (folder / f"{name}{suffix}").touch()
    (folder / f"long-0001000-0002000{suffix}").mkdir()
    assert found(folder, lattice_format) == ["noise.wav", "x.wav"]
    (folder / f"long-0001000-0002000{suffix}").rmdir()
    (folder / f"long-0001000-0002000{suffix}").touch()
    assert found(folder, lattice_format) == ["long.wav", "noise.wav", "x.wav"]
    assert found(folder, "k2" if lattice_format == "slf" else "slf") == ["noise.wav"]
    (folder / ".lattices").unlink()
    assert found(folder, lattice_format) == found(folder / "none", lattice_format) == []


def entry(name: str) -> bytes:
    return f"{name} \n0\t1\t2\t0,0,1\n1\t0,0,\n\n".encode()


def test_archives_count_as_far_as_they_are_readable(folder: Path) -> None:
    first, second = (entry(name) for name in WRITTEN["long.wav"])
    (folder / "lattices.1.txt").write_bytes(first + second[:-1])
    (folder / "lattices.2.txt.gz").write_bytes(gzip.compress(entry("x")) + gzip.compress(second)[:-4])
    for shard in (WHOLE, SECOND):
        assert found(folder, "kaldi", shard) == ["noise.wav", "x.wav"]
    (folder / "lattices.txt").write_bytes(second)
    for shard in (WHOLE, SECOND):
        assert found(folder, "kaldi", shard) == ["long.wav", "noise.wav", "x.wav"]
    (folder / "lattices.2.txt.gz").write_bytes(b"damaged")
    assert found(folder, "kaldi") == ["long.wav", "noise.wav"]


def lattice_writer(folder: Path, lattice_format: str) -> LatticeWriter:
    graph = SimpleNamespace(vocabulary=SimpleNamespace(words=["<eps>", "A"]), tokens=None)
    recognizer: Any = SimpleNamespace(bundle=SimpleNamespace(graph=graph), final_options=None)
    return LatticeWriter(folder, lattice_format, recognizer, {"a.wav": "a"}, ["a.wav"], None, WHOLE)


def test_a_writer_enters_what_it_wrote_and_gives_its_archive_free(tmp_path: Path) -> None:
    result: Any = SimpleNamespace(lattices=(), duration=1.0)
    for _ in range(2):
        with lattice_writer(tmp_path, "kaldi") as writer:
            writer.write("a.wav", result)
            with (tmp_path / "lattices.txt.gz").open("ab") as other:
                assert not lock(other, wait=False)
        with (tmp_path / "lattices.txt.gz").open("ab") as other:
            assert lock(other, wait=False)
    assert (tmp_path / ".lattices").read_text() == '["a.wav", "a"]\n["a.wav", "a", []]\n'


def test_a_lattice_that_was_interrupted_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_slf(file: TextIO, *_: object) -> None:
        file.write("VERSION=1.0\n")
        raise KeyboardInterrupt

    monkeypatch.setattr("asr.cli.output.write_slf", write_slf)
    lattice = SimpleNamespace(with_sentence_ends=lambda _: lattice)
    piece = SimpleNamespace(begin=0.0, end=1.0, lattice=lattice, frame_seconds=0.01)
    result: Any = SimpleNamespace(lattices=(piece,), duration=1.0)
    with lattice_writer(tmp_path, "slf") as writer, pytest.raises(KeyboardInterrupt):
        writer.write("a.wav", result)
    assert [path.name for path in tmp_path.iterdir()] == [".lattices"]
