"""The exception whose message is written for users."""

from __future__ import annotations

import importlib
from typing import Any


class AsrError(Exception):
    """Bad input. The message is one sentence that names the file, the field and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """


def require_above_zero(**numbers: float) -> None:
    """Checks numbers that the user gave.

    Raises:
        AsrError: one is 0 or less, or not a number.
    """
    for name, number in numbers.items():
        if not number > 0:
            raise AsrError(f"{name} is {number}; give a number above 0.")


def require_at_least(least: float, **numbers: float) -> None:
    """Checks numbers that the user gave.

    Raises:
        AsrError: one is below `least`, or not a number.
    """
    for name, number in numbers.items():
        if not number >= least:
            raise AsrError(f"{name} is {number}; give {least} or more.")


def require_between(least: float, most: float, **numbers: float) -> None:
    """Checks numbers that the user gave.

    Raises:
        AsrError: one is below `least` or above `most`, or not a number.
    """
    for name, number in numbers.items():
        if not least <= number <= most:
            raise AsrError(f"{name} is {number}; give a number between {least} and {most}.")


def require_below_one(**numbers: float) -> None:
    """Checks numbers that the user gave.

    Raises:
        AsrError: one is below 0, or not below 1.
    """
    for name, number in numbers.items():
        if not 0 <= number < 1:
            raise AsrError(f"{name} is {number}; give 0 or more, and less than 1.")


def in_one_line(error: BaseException) -> str:
    """The class of an error and the first line of its message, without a full stop."""
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def printable(text: str) -> str:
    """A text of unknown origin without control characters, which a terminal would obey; lines and tabs stay."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)


def package(name: str, what: str) -> Any:
    """Imports an optional package.

    Raises:
        AsrError: the package is missing or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise AsrError(
            f"{what} needs the package {name}, which cannot be imported here ({error}); "
            f"`pip install {name.partition('.')[0]}`."
        ) from error
