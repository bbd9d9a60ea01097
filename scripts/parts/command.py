"""How the scripts here run: bad input is one sentence and exit code 2, as with the `asr` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from asr.errors import AsrError


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script's main function and exits."""
    try:
        sys.exit(main())
    except AsrError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
