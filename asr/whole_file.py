"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from asr.errors import AsrError

_BUFFER_BYTES = 1 << 20


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A stream to write to; the file has its name only once it is complete.

    Raises:
        AsrError: it cannot be written, for want of space for instance.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb", buffering=_BUFFER_BYTES) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise AsrError(f"{path}: the file cannot be written ({error.strerror}); make room and try again.") from error
