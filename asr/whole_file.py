"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
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

    Where `path` is a link, the file that it leads to is meant. A device or a pipe has no other name: it is written to.

    Raises:
        AsrError: it cannot be written, for want of space for instance.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        partial = target
    else:
        # The process id comes first: some libraries go by the suffix.
        partial = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield partial
        if partial != target:
            partial.replace(target)
    except OSError as error:
        raise AsrError(f"{path}: the file cannot be written ({error.strerror}); {_cure(error)}.") from error
    finally:
        if partial != target:
            partial.unlink(missing_ok=True)


def require_writable(*paths: Path) -> None:
    """Refuses what cannot be written before long work begins.

    Raises:
        AsrError: a path's folder is missing or not writable, the path is a folder, or two are the same.
    """
    seen: set[str] = set()
    for path in paths:
        folder = path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise AsrError(f"{path}: the folder {folder} is not there or not writable; make it first.")
        if path.is_dir():
            raise AsrError(f"{path}: this is a folder; name a file in it.")
        if os.path.realpath(path) in seen:
            raise AsrError(f"{path}: two results would go to this file; name another one for one of them.")
        seen.add(os.path.realpath(path))


def _cure(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "make its folder first"
    return "name another one" if error.errno in (errno.EISDIR, errno.EACCES, errno.EROFS) else "make room and try again"


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A stream to write to; the file has its name only once it is complete and on the disk.

    Raises:
        AsrError: as `whole_path`.
    """
    with whole_path(path) as partial, partial.open("wb", buffering=_BUFFER_BYTES) as stream:
        yield stream
        stream.flush()
        if partial.is_file():
            os.fsync(stream.fileno())
