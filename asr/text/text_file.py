"""Text files: plain, .gz or .xz, in UTF-8, with a byte order mark or without."""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from asr.errors import AsrError

# What reading a file may raise, a damaged archive's among them.
READING_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)
_UNPACKED: dict[str, Callable[[Path], Any]] = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile}
_BUFFER_BYTES = 1 << 20


def open_text(path: Path, what: str = "file") -> IO[bytes]:
    """Opens a plain, `.gz` or `.xz` file for reading its bytes, those behind a byte order mark; `what` names it.

    Raises:
        AsrError: the file is missing or damaged.
    """
    try:
        stream: Any = io.BufferedReader(_UNPACKED.get(path.suffix, io.FileIO)(path), _BUFFER_BYTES)
        if stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        return stream
    except READING_ERRORS as error:
        raise unreadable(path, what, error) from error


def read_text(path: str | Path, what: str = "file") -> str:
    """All of such a file.

    Raises:
        AsrError: the file is missing, damaged or not UTF-8.
    """
    with open_text(Path(path), what) as stream:
        try:
            return stream.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise AsrError(f"{path}: the {what} is not UTF-8 (byte {error.start}); convert it first.") from error
        except READING_ERRORS as error:
            raise unreadable(path, what, error) from error


def unreadable(path: str | Path, what: str, error: BaseException) -> AsrError:
    """What to say of one of `READING_ERRORS`."""
    if isinstance(error, OSError) and error.strerror:
        return AsrError(f"{path}: the {what} cannot be read ({error.strerror}).")
    return AsrError(f"{path}: the {what} cannot be unpacked ({error}); fetch it again.")
