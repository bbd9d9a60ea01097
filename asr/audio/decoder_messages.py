"""Captures what a C decoder writes to stderr, so that one message of this program can replace it.

libmpg123 writes complaints about a damaged MP3 to C's `stderr`, and libsndfile, which includes it, has no option to
turn them off. In glibc `stderr` is a variable that a program may set. File descriptor 2 is left alone: messages of
Python, faulthandler and glibc's own checks appear at once, even from other threads and in a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import threading
from collections.abc import Iterator

_COMPLAINT = re.compile(rb"\[src/libmpg123/|Note: |Warning: |\s*$")


class _Kept:
    """A file in memory that takes the place of C's `stderr`; raises an error if the C library has no such variable."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        libc.setbuf.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
        self._variable = ctypes.c_void_p.in_dll(libc, "stderr")
        self._stderr = self._variable.value
        self._descriptor = os.memfd_create("stderr")
        self._file: int = libc.fdopen(self._descriptor, b"a")
        libc.setbuf(self._file, None)
        self.lock = threading.Lock()

    def begin(self) -> None:
        self._variable.value = self._file

    def end(self) -> list[bytes]:
        """The lines since `begin`."""
        self._variable.value = self._stderr
        size = os.fstat(self._descriptor).st_size
        if not size:
            return []
        written = os.pread(self._descriptor, size, 0)
        os.ftruncate(self._descriptor, 0)
        return written.splitlines(keepends=True)

    def after_fork(self) -> None:
        """Resets the state in a child, whose parent may have been decoding in a thread that the child does not have."""
        self.end()
        self.lock = threading.Lock()


@functools.cache
def _kept() -> _Kept | None:
    try:
        kept = _Kept()
    except (OSError, AttributeError, ValueError):
        return None  # another C library, with which complaints appear directly
    os.register_at_fork(after_in_child=kept.after_fork)
    return kept


@contextlib.contextmanager
def kept_complaints() -> Iterator[list[str]]:
    """Captures libmpg123's complaints: the list has them after the block, which only one thread at a time runs.

    Whatever else was written to C's `stderr` in the block is written out after it.
    """
    complaints = list[str]()
    kept = _kept()
    if kept is None:
        yield complaints
        return
    with kept.lock:
        kept.begin()
        try:
            yield complaints
        finally:
            for line in kept.end():
                if _COMPLAINT.match(line):
                    complaints.append(line.decode(errors="replace").strip())
                else:
                    os.write(2, line)
