"""Sizes and SHA-256 of a folder's files, kept in its description: a damaged file is told from a whole one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asr.errors import AsrError


def checksums(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """File name -> its size and checksum."""
    return {name: {"num_bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in names}


def require_intact(path: Path, expected: dict[str, Any], what: str) -> None:
    """Compares a file with its entry of `checksums`.

    Args:
        path: the file.
        expected: its entry.
        what: whose file it is, `bundle` or such.

    Raises:
        AsrError: the file is missing, or another one.
    """
    if not path.is_file():
        raise AsrError(f"{path}: the {what} names this file, but it is missing; fetch the {what} again.")
    num_bytes = path.stat().st_size
    if num_bytes != expected.get("num_bytes"):
        raise AsrError(
            f"{path}: the file has {num_bytes} bytes where the {what} names {expected.get('num_bytes')}; "
            "the download was cut short, or it is a Git LFS pointer: fetch it again."
        )
    if _sha256(path) != expected.get("sha256"):
        raise AsrError(
            f"{path}: the checksum is not the one that the {what} names; the file is damaged, fetch it again."
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
