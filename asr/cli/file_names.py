"""Names of the files that recordings get in a folder, kept in the folder so that no later run gives one away again.

Two recordings may have the same short name, such as `a/x.wav` and `b/x.flac`. The first one's files are then called
`x`, the second one's `x.2`. A register, a hidden file of JSON Lines `[recording, name]`, says which is which. All
recordings of a run are entered before any of their files is written. Where a recording may have any number of files,
`[recording, name, [part, ...]]` names them once they are written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from asr.errors import AsrError
from asr.locks import lock
from asr.text.documents import parse_json
from asr.transcripts import plain_name, unique_names


def read_names(register: Path) -> dict[str, str]:
    """Recording -> name of its files, as entered so far. An unfinished last line, left by an interruption, is ignored.

    Raises:
        AsrError: the register cannot be read, or is damaged.
    """
    return _parsed(_content(register), register)[0]


def read_parts(register: Path) -> dict[str, list[str]]:
    """Recording -> what was written of it, as entered last by `enter_parts`.

    Raises:
        AsrError: as for `read_names`.
    """
    return _parsed(_content(register), register)[1]


def with_names(known: Mapping[str, str], stems: Mapping[str, str]) -> dict[str, str]:
    """Recording -> name of its files; recordings that are known keep theirs.

    Args:
        known: recording -> name, from `read_names`.
        stems: recording -> a short name, which need not be unique.
    """
    new = {recording: stem for recording, stem in stems.items() if recording not in known}
    names = dict(zip(new, unique_names(list(new.values()), known.values()), strict=True))
    return {recording: known.get(recording) or names[recording] for recording in stems}


def enter_names(register: Path, stems: Mapping[str, str]) -> dict[str, str]:
    """Like `with_names`, and enters the new recordings; several processes may do so at the same time.

    Raises:
        AsrError: the register cannot be read or written, or is damaged.
    """
    try:
        with register.open("a+b") as file:
            lock(file)
            file.seek(0)
            content = file.read()
            known, _ = _parsed(content, register)
            file.truncate(content.rfind(b"\n") + 1)
            names = with_names(known, stems)
            new = [recording for recording in names if recording not in known]
            file.writelines(f"{json.dumps([recording, names[recording]])}\n".encode() for recording in new)
    except OSError as error:
        raise _unwritable(register, error) from error
    return names


def enter_parts(register: Path, recording: str, name: str, parts: Sequence[str]) -> None:
    """Enters what has been written of a recording; several processes may do so at the same time.

    Args:
        register: the register.
        recording: it has been entered before.
        name: of its files.
        parts: names of what has been written.

    Raises:
        AsrError: the register cannot be written.
    """
    try:
        with register.open("a+b") as file:
            lock(file)
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read() != b"\n":  # another process was stopped within its line
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(f"{json.dumps([recording, name, parts])}\n".encode())
    except OSError as error:
        raise _unwritable(register, error) from error


def _unwritable(register: Path, error: OSError) -> AsrError:
    return AsrError(f"{register}: the register of recordings cannot be written ({error.strerror}).")


def _content(register: Path) -> bytes:
    try:
        return register.read_bytes()
    except (FileNotFoundError, NotADirectoryError):  # a file in place of the folder is reported by who writes to it
        return b""
    except OSError as error:
        raise AsrError(f"{register}: the register of recordings cannot be read ({error.strerror}).") from error


def _parsed(content: bytes, register: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The names and the parts of all recordings."""
    names: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    taken = set[str]()
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            recording, name, *more = parse_json(line)
        except (ValueError, TypeError):
            recording, name, more = None, None, []
        # The folder may come from someone else: a name with a slash would be a file outside it.
        is_plain = isinstance(name, str) and name == plain_name(name) and "\0" not in name
        is_sound = isinstance(recording, str) and is_plain and (name not in taken or names.get(recording) == name)
        has_parts = len(more) == 1 and isinstance(more[0], list) and all(isinstance(part, str) for part in more[0])
        if not is_sound or (more and not has_parts):
            raise AsrError(f"{register}:{number}: the register of recordings is damaged; choose another folder.")
        names[recording] = name
        taken.add(name)
        if more:
            parts[recording] = more[0]
    return names, parts
