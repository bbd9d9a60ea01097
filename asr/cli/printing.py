"""Lines on standard output and in files of JSON Lines, with characters that not every stream can encode."""

from __future__ import annotations

import json
import re
from typing import Any, TextIO

from asr.errors import AsrError
from asr.serialization import cure_of


def print_record(record: Any, stream: TextIO) -> None:
    """Prints an object of JSON types in a line. Characters that the stream cannot encode are escaped.

    Raises:
        AsrError: like `print_line`.
    """
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(record)
    print_line(line, stream)


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def shown(text: str) -> str:
    """A text with the name of a recording, which may have line ends and what a terminal obeys: these become escapes."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_line(line: str, stream: TextIO) -> None:
    """Prints a line and flushes it. Characters that the stream cannot encode are shown as escape codes.

    Raises:
        AsrError: the line cannot be written, for example because the disk is full.
    """
    encoding = stream.encoding or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AsrError(f"{stream.name}: the output cannot be written ({error.strerror}); {cure_of(error)}.") from error
