"""The one exception that users are meant to read."""

from __future__ import annotations


class AsrError(Exception):
    """Bad input: one clear sentence that names the file, the field and the cure.

    The command line prints it without a traceback and exits with status 2.
    """
