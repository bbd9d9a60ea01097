"""`bundle.json`: what is in a bundle, and whether its files are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asr.errors import AsrError
from asr.file_checksums import checksums, require_intact

FORMAT = "asr bundle"
VERSION = 1
FILE_NAME = "bundle.json"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes `bundle.json` with size and checksum of each file that it names."""
    content = {"format": FORMAT, "version": VERSION, **manifest, "files": checksums(folder, _files_of(manifest))}
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
        require_intact(folder / name, manifest["files"].get(name, {}), "bundle")
    return manifest


def _files_of(manifest: dict[str, Any]) -> list[str]:
    entries = [entry for entry in manifest.values() if isinstance(entry, dict)]
    return sorted(str(entry[key]) for entry in entries for key in ("file", "words") if key in entry)
