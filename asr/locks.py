"""Locks of files, by which one process at a time works on something."""

from __future__ import annotations

from typing import IO, Any


def lock(file: IO[Any], wait: bool = True) -> bool:
    """Locks an open file until it is closed. Without locks, as on Windows and some network file systems, does nothing.

    Args:
        file: the file.
        wait: until no other process has locked it.

    Returns:
        False if another process has locked the file and `wait` is false.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True
