"""The exception whose message is written for users."""

from __future__ import annotations


class AsrError(Exception):
    """Bad input. The message is one sentence that names the file, the field and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """


def printable(text: str) -> str:
    """A text of unknown origin without control characters, which a terminal would obey; lines and tabs stay."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)
