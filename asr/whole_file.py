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
def whole_path(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` once the block has ended well; nothing is left of it otherwise.

    Raises:
        AsrError: it cannot be written, for want of space for instance.
    """
    # The process id comes first: some libraries go by the suffix.
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise AsrError(f"{path}: the file cannot be written ({error.strerror}); make room and try again.") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A stream to write to; the file has its name only once it is complete and on the disk.

    Raises:
        AsrError: as `whole_path`.
    """
    with whole_path(path) as partial, partial.open("wb", buffering=_BUFFER_BYTES) as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
