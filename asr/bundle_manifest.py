"""`bundle.json`: what is in a bundle, and whether its files are whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from asr.errors import AsrError

FORMAT = "asr bundle"
VERSION = 1
FILE_NAME = "bundle.json"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes `bundle.json` with size and checksum of each file that it names."""
    files = {
        name: {"num_bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        for name in _files_of(manifest)
    }
    content = {"format": FORMAT, "version": VERSION, **manifest, "files": files}
    (folder / FILE_NAME).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads `bundle.json` and checks every file that it names.

    Raises:
        AsrError: there is none, it is of another format or version, or a file is missing or damaged.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise AsrError(f"{folder}: there is no bundle here ({FILE_NAME} is missing); name a folder of checkpoints/.")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AsrError(f"{path}: the bundle's description cannot be read ({error}).") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise AsrError(f"{path}: this is no bundle of this program; its 'format' must be {FORMAT!r}.")
    if manifest.get("version") != VERSION:
        raise AsrError(
            f"{path}: the bundle has version {manifest.get('version')} and this program reads {VERSION}; "
            "update the program or fetch another bundle."
        )
    for key in ("name", "features", "acoustic_model", "graph", "decoding", "files"):
        if key not in manifest:
            raise AsrError(f"{path}: the field {key!r} is missing; fetch the bundle again.")
    for name in _files_of(manifest):
        _require_intact(folder / name, manifest["files"].get(name, {}))
    return manifest


def _files_of(manifest: dict[str, Any]) -> list[str]:
    entries = [entry for entry in manifest.values() if isinstance(entry, dict)]
    return sorted(str(entry[key]) for entry in entries for key in ("file", "words") if key in entry)


def _require_intact(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise AsrError(f"{path}: the bundle names this file, but it is missing; fetch the bundle again.")
    num_bytes = path.stat().st_size
    if num_bytes != expected.get("num_bytes"):
        raise AsrError(
            f"{path}: the file has {num_bytes} bytes where the bundle names {expected.get('num_bytes')}; "
            "the download was cut short, or it is a Git LFS pointer: fetch it again."
        )
    if _sha256(path) != expected.get("sha256"):
        raise AsrError(
            f"{path}: the checksum is not the one that the bundle names; the file is damaged, fetch it again."
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
