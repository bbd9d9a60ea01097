"""Reads text files (plain, .gz or .xz, UTF-8, with or without a byte order mark), and what stands in them.

Parsers for JSON, YAML and numbers of unknown origin; errors of the first two are all `ValueError`.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from asr.errors import AsrError

LARGEST_NUMBER = 1e30
"""The largest magnitude of a number in a text file: sums of such numbers stay within float32."""

_NESTED = "it is nested too deeply"

# The exceptions of reading a file, or of unpacking a damaged one.
READING_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)

_UNPACKED: dict[str, Callable[[Path], Any]] = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile}
# The first bytes of compressed files, which no text begins with.
_PACKED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"BZh91AY&SY": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}
_BUFFER_BYTES = 1 << 20
_MAX_EXPANSION = 200
_LEAST_ROOM_BYTES = 64_000_000


def open_text(path: Path, what: str = "file") -> IO[bytes]:
    """Opens a plain, `.gz` or `.xz` file and skips a byte order mark.

    Args:
        path: the file.
        what: its name in error messages.

    Raises:
        AsrError: the file is missing or damaged, or compressed although its name does not say so. Reading raises it,
            too, where a packed file has expanded to 200 times its size and more than 64 MB.
    """
    try:
        raw = _Unpacked(path, what) if path.suffix in _UNPACKED else io.FileIO(path)
        stream: Any = io.BufferedReader(raw, _BUFFER_BYTES)
        head = stream.peek(max(map(len, _PACKED)))
        if head.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
    except READING_ERRORS as error:
        raise unreadable(path, what, error) from error
    for mark, kind in _PACKED.items():
        if head.startswith(mark):
            stream.close()
            raise AsrError(f"{path}: the {what} is compressed ({kind}); unpack it, or give .gz or .xz files so named.")
    return stream


def read_text(path: str | Path, what: str = "file") -> str:
    """Reads a plain, `.gz` or `.xz` file in UTF-8.

    Args:
        path: the file.
        what: its name in error messages.

    Raises:
        AsrError: the file is missing, damaged or not UTF-8, or a packed file expands to 200 times its size and more
            than 64 MB.
    """
    path = Path(path)
    with open_text(path, what) as stream:
        try:
            return stream.read().decode("utf-8")
        except UnicodeDecodeError as error:
            line = 1 + error.object.count(b"\n", 0, error.start)
            raise AsrError(f"{path}, line {line}: the {what} is not UTF-8; convert it first.") from error
        except READING_ERRORS as error:
            raise unreadable(path, what, error) from error


def room(path: Path) -> int:
    """How many bytes a packed file may expand to. A small file from an attacker could otherwise fill the memory."""
    return max(_LEAST_ROOM_BYTES, _MAX_EXPANSION * path.stat().st_size)


class _Unpacked(io.RawIOBase):
    """The content of a packed file, up to `room`."""

    def __init__(self, path: Path, what: str) -> None:
        self._stream = _UNPACKED[path.suffix](path)
        self._path, self._what, self._left = path, what, room(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num: int = self._stream.readinto(buffer)
        self._left -= num
        if self._left < 0:
            raise AsrError(
                f"{self._path}: the {self._what} expands to more than {room(self._path) / 1e6:.0f} MB, which no file "
                "of its size does; fetch it again, or unpack it first."
            )
        return num

    def close(self) -> None:
        self._stream.close()
        super().close()


def unreadable(path: str | Path, what: str, error: BaseException) -> AsrError:
    """The error message for one of `READING_ERRORS`."""
    if isinstance(error, OSError) and error.strerror:
        return AsrError(f"{path}: the {what} cannot be read ({error.strerror}).")
    return AsrError(f"{path}: the {what} cannot be unpacked ({error}); fetch it again.")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply for Python's parser.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_NESTED) from error


def parse_yaml(text: str) -> Any:
    """The value of a YAML text: mappings, lists, strings, numbers, dates.

    Raises:
        ValueError: the text is not YAML, names objects of other kinds, or is nested too deeply.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError(_NESTED) from error
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        # PyYAML's constructors for numbers and dates raise these for texts that only look like one.
        raise ValueError(f"a value cannot be read: {error}") from error


def is_whole_number(text: str) -> bool:
    """Whether a text is a whole number, 0 or more, of at most 18 digits."""
    return len(text) <= 18 and text.isascii() and text.isdigit()


def number_or_none(text: str) -> float | None:
    """The finite number that a text is; None if it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def finite_number(text: str, where: str) -> float:
    """Converts text to a number, which is at most `LARGEST_NUMBER` in magnitude.

    Args:
        text: of the number.
        where: the file and the line or entry, for error messages.

    Raises:
        AsrError: it is not a number, not finite, or too large.
    """
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not abs(number) <= LARGEST_NUMBER:
        raise AsrError(f"{where}: {text!r} is not a finite number of at most {LARGEST_NUMBER:g}.")
    return number
