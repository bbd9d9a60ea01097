"""Names of the files that recordings get in a folder, kept in the folder so that no later run gives one away again.

Two recordings may have the same short name, such as `a/x.wav` and `b/x.flac`. The first one's files are then called
`x`, the second one's `x.2`. A register, a hidden file of JSON Lines `[recording, name]`, says which is which. All
recordings of a run are entered before any of their files is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    try:
        content = register.read_bytes()
    except (FileNotFoundError, NotADirectoryError):  # a file in place of the folder is reported by who writes to it
        return {}
    except OSError as error:
        raise AsrError(f"{register}: the register of recordings cannot be read ({error.strerror}).") from error
    return _parsed(content, register)


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
            known = _parsed(content, register)
            file.truncate(content.rfind(b"\n") + 1)
            names = with_names(known, stems)
            new = [recording for recording in names if recording not in known]
            file.writelines(f"{json.dumps([recording, names[recording]])}\n".encode() for recording in new)
    except OSError as error:
        raise AsrError(f"{register}: the register of recordings cannot be written ({error.strerror}).") from error
    return names


def _parsed(content: bytes, register: Path) -> dict[str, str]:
    names: dict[str, str] = {}
    taken = set[str]()
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            recording, name = parse_json(line)
        except (ValueError, TypeError):
            recording = name = None
        # The folder may come from someone else: a name with a slash would be a file outside it.
        is_plain = isinstance(name, str) and name == plain_name(name) and "\0" not in name
        if not isinstance(recording, str) or not is_plain or (name in taken and names.get(recording) != name):
            raise AsrError(f"{register}:{number}: the register of recordings is damaged; choose another folder.")
        names[recording] = name
        taken.add(name)
    return names
