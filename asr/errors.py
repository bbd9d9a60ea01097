"""The exception whose message is written for users."""

from __future__ import annotations


class AsrError(Exception):
    """Bad input. The message is one sentence that names the file, the field and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """


def in_one_line(error: BaseException) -> str:
    """The class of an error and the first line of its message, without a full stop."""
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def printable(text: str) -> str:
    """A text of unknown origin without control characters, which a terminal would obey; lines and tabs stay."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)
