"""The exception whose message is written for users."""

from __future__ import annotations


class AsrError(Exception):
    """Bad input. The message is one sentence that names the file, the field and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """
