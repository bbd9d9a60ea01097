"""The names of recordings' files: different for all of them, and the same in every run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asr.cli.file_names import enter_names, enter_parts, read_names, read_parts, with_names
from asr.cli.output import TRANSCRIPTS, TranscriptFolder
from asr.errors import AsrError
from asr.transcripts import Transcript


def test_names_are_kept(tmp_path: Path) -> None:
    register = tmp_path / "register"
    assert read_names(register) == {}
    assert enter_names(register, {"b/x.wav": "x"}) == {"b/x.wav": "x"}
    both = {"a/x.wav": "x", "b/x.wav": "x", "a/x.2.wav": "x.2", "odd\udce9 \n.wav": "odd\udce9 \n"}
    names = {"a/x.wav": "x.2", "b/x.wav": "x", "a/x.2.wav": "x.2.2", "odd\udce9 \n.wav": "odd\udce9_"}
    assert with_names(read_names(register), both) == names
    assert read_names(register) == {"b/x.wav": "x"}
    assert enter_names(register, both) == names
    assert with_names(read_names(register), dict(reversed(both.items()))) == names
    assert len(register.read_text().splitlines()) == 4


def test_an_unfinished_line_is_replaced_and_damage_is_told(tmp_path: Path) -> None:
    register = tmp_path / "register"
    register.write_text('["a.wav", "a"]\n["b.wav", "b')
    assert read_names(register) == {"a.wav": "a"}
    assert enter_names(register, {"c.wav": "c"}) == {"c.wav": "c"}
    assert read_names(register) == {"a.wav": "a", "c.wav": "c"}
    for damage in (
        "nonsense",
        '["a.wav"]',
        '["a.wav", 1]',
        '["b.wav", ["a"]]',
        '[["b.wav"], "a"]',
        "{}",
        '["b.wav", "a"]',
    ):
        register.write_text(f'["a.wav", "a"]\n{damage}\n')
        with pytest.raises(AsrError, match=r"register:2: the register of recordings is damaged; choose another folder"):
            read_names(register)
    with pytest.raises(AsrError, match="the register of recordings cannot be written"):
        enter_names(tmp_path / "none" / "register", {})


def test_parts_are_those_that_were_written_last(tmp_path: Path) -> None:
    register = tmp_path / "register"
    assert read_parts(register) == {}
    enter_names(register, {"a.wav": "a", "b.wav": "b", "c.wav": "c"})
    enter_parts(register, "a.wav", "a", ["a-1", "a-2"])
    enter_parts(register, "b.wav", "b", [])
    with register.open("a") as file:
        file.write('["c.wav", "c", ["c-1"')  # by a process that was killed
    enter_parts(register, "a.wav", "a", ["a"])
    assert read_names(register) == {"a.wav": "a", "b.wav": "b", "c.wav": "c"}
    assert read_parts(register) == {"a.wav": ["a"], "b.wav": []}
    for damage in ('["a.wav", "a", "a-1"]', '["a.wav", "a", [1]]', '["a.wav", "a", [], []]', '["a.wav", "x.2", [[]]]'):
        register.write_text(f"{damage}\n")
        with pytest.raises(AsrError, match="register:1: the register of recordings is damaged"):
            read_parts(register)
    with pytest.raises(AsrError, match="the register of recordings cannot be written"):
        enter_parts(tmp_path / "none" / "register", "a.wav", "a", [])


@pytest.mark.parametrize("name", ["../victim", "/victim", "sub/victim", "a b", "a\0b", ""])
def test_a_prepared_register_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / TRANSCRIPTS).write_text(json.dumps(["x.wav", name]) + "\n")
    with pytest.raises(AsrError, match=r"\.transcripts:1: the register of recordings is damaged"):
        TranscriptFolder(folder, ("txt",), {"x.wav": "x"})
    with pytest.raises(AsrError, match=r"\.transcripts:1: the register of recordings is damaged"):
        enter_names(folder / TRANSCRIPTS, {"y.wav": "y"})


def test_a_recording_of_the_same_name_is_not_done(tmp_path: Path) -> None:
    """In another folder, or in another format of audio."""
    folder = TranscriptFolder(tmp_path, ("txt",), {"a/x.wav": "x"})
    folder.require_maker("one")
    folder.add("a/x.wav", Transcript("x", (), 0.0, {}))
    for other in ("b/x.wav", "a/x.flac"):
        later = TranscriptFolder(tmp_path, ("txt",), {other: "x", "a/x.wav": "x"})
        assert later.done == {"a/x.wav": "x"}
        assert later.names == {other: "x.2", "a/x.wav": "x"}


def test_files_of_others_are_not_taken_for_results(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("the reference\n")
    with pytest.raises(AsrError, match=r"x\.txt: it is not known which recording this file is of; choose another"):
        TranscriptFolder(tmp_path, ("txt", "srt"), {"x.wav": "x"})
    assert TranscriptFolder(tmp_path, ("srt",), {"x.wav": "x"}).done == {}
