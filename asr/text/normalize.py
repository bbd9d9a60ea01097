"""Normalizes transcripts: upper case, words separated by single spaces, no punctuation except the apostrophe.

| corpus | as distributed | changes |
| --- | --- | --- |
| LibriSpeech | upper case, apostrophes inside and at the end of words | white space only |
| AN4 | `<s> WORDS </s> (utterance)` or words alone; spelled letters are words | all but the words is removed |
| speechocean762 | upper case, some apostrophes of other shapes | apostrophes |
| other English text | anything | see `normalize_english` |

Also reads text files: plain, .gz or .xz, UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import re
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from asr.errors import AsrError

_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "`": "'", "´": "'"})


_AN4_MARKS = re.compile(r"</?s>|\(\S*\)\s*$")


_NOT_WORD = re.compile(r"[^\w']+|_")


_LONE_APOSTROPHE = re.compile(r"(?<!\w)'+(?!\w)")


_REPEATED_APOSTROPHE = re.compile(r"''+")


def normalize_librispeech(text: str) -> str:
    """Normalizes case and white space; the rest of LibriSpeech's transcripts is normalized already."""
    return " ".join(text.upper().split())


def normalize_an4(text: str) -> str:
    """Removes `<s>`, `</s>`, a final `(utterance)`, and fillers such as `++noise++`."""
    words = _AN4_MARKS.sub(" ", text).upper().split()
    return " ".join(word for word in words if not word.startswith("++"))


def normalize_speechocean762(text: str) -> str:
    """Converts to upper case with plain apostrophes, and removes punctuation."""
    return normalize_english(text)


def normalize_english(text: str) -> str:
    """Normalizes any English text: compatibility characters, apostrophes, hyphens, punctuation and case.

    An apostrophe next to a letter is kept (`DON'T`, `BOYS'`, `'TIS`), unless a pair of them quotes words. Digits are
    kept, so that a lexicon reports them as out-of-vocabulary words.
    """
    text = unicodedata.normalize("NFKC", text).translate(_APOSTROPHES)
    text = _REPEATED_APOSTROPHE.sub(" ", text)
    text = re.sub(r"(?<!\w)'([^']*\w)'(?!\w)", r" \1 ", text)
    text = _LONE_APOSTROPHE.sub(" ", _NOT_WORD.sub(" ", text))
    return " ".join(text.upper().split())


# The exceptions of reading a file, or of unpacking a damaged one.
READING_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)


_UNPACKED: dict[str, Callable[[Path], Any]] = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile}


_BUFFER_BYTES = 1 << 20


def open_text(path: Path, what: str = "file") -> IO[bytes]:
    """Opens a plain, `.gz` or `.xz` file and skips a byte order mark.

    Args:
        path: the file.
        what: its name in error messages.

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
    """Reads a plain, `.gz` or `.xz` file in UTF-8.

    Args:
        path: the file.
        what: its name in error messages.

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
    """The error message for one of `READING_ERRORS`."""
    if isinstance(error, OSError) and error.strerror:
        return AsrError(f"{path}: the {what} cannot be read ({error.strerror}).")
    return AsrError(f"{path}: the {what} cannot be unpacked ({error}); fetch it again.")
