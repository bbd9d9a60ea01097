"""Results as lines, each written as soon as it is known, and read again where an interrupted run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from asr.errors import AsrError


def records_of(path: Path, field: str) -> dict[str, dict[str, Any]]:
    """What an earlier run wrote there as JSON Lines, failures left out, by the field that names the recording.

    A line that an interruption left unfinished is taken away; without a file there is nothing.

    Raises:
        AsrError: the file cannot be read or holds something else; it then is left as it is.
    """
    if not path.is_file():
        return {}
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AsrError(f"{path}: the output of the earlier run cannot be read ({error.strerror}).") from error
    whole, _, rest = content.rpartition(b"\n")
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        record = _record(line, field)
        if record is None:
            raise _foreign(path, number)
        if "error" not in record:
            records[record[field]] = record
    if rest:
        beginning = json.dumps({field: ""})[:-2].encode()
        if not rest.startswith(beginning[: len(rest)]):
            raise _foreign(path, content.count(b"\n") + 1)
        os.truncate(path, len(content) - len(rest))
    return records


def _record(line: bytes, field: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        return None
    return record if isinstance(record.get("text"), str) or "error" in record else None


def _foreign(path: Path, number: int) -> AsrError:
    return AsrError(f"{path}:{number}: this is no output of this command; name another --output.")


@contextmanager
def appended(path: str | None, anew: bool = False) -> Iterator[TextIO | None]:
    """The file to add lines to, or None where there is no path; `anew` drops what it has.

    Raises:
        AsrError: it cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        stream = Path(path).open("w" if anew else "a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise AsrError(f"{path}: the output cannot be written ({error.strerror}).") from error
    try:
        yield stream
    finally:
        # Each line has been flushed, or its failure told.
        with suppress(OSError):
            stream.close()


def print_record(record: Mapping[str, Any], stream: TextIO) -> None:
    """A JSON line. Letters that the stream cannot write, such as those of a file name that is not UTF-8, are escaped.

    Raises:
        AsrError: as `print_line`.
    """
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(record)
    print_line(line, stream)


def print_line(line: str, stream: TextIO) -> None:
    """A line, at once; letters that the stream cannot write are shown by their codes.

    Raises:
        AsrError: the disk is full, for instance.
    """
    encoding = stream.encoding or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AsrError(f"{stream.name}: the output cannot be written ({error.strerror}); make room first.") from error
