"""`asr bundle info`: the contents of a bundle."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from asr.bundle import bundle_folder, read_manifest
from asr.cli.bundle_fetch import fetching
from asr.cli.bundle_list import folder_bytes
from asr.serialization import fingerprint_of_description

NAME = "bundle info"


HELP = """Shows the contents of a bundle: parts, sizes, decoding options of each mode, and its card.

The bundle is fetched if it is not on this machine. All files are compared with their checksums."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle", nargs="?", help="folder, name, https://... or hf:owner/name (default: the preferred one)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    with fetching(str(args.bundle)) as report:
        folder = bundle_folder(args.bundle, on_progress=report)
    info = describe(folder)
    if args.json:
        print(json.dumps(info))
        return 0
    card = info.pop("card")
    print(f"{info.pop('name')}  {info.pop('megabytes')} MB  {info.pop('folder')}")
    for part, text in info["parts"].items():
        print(f"  {part:<18}{text}")
    for mode, options in info["decoding"].items():
        print(f"  mode {mode:<13}{', '.join(f'{name} {value}' for name, value in options.items())}")
    print(f"  {'fingerprint':<18}{info['fingerprint']}")
    if card:
        print(f"\n{card.strip()}")
    return 0


def describe(folder: Path) -> dict[str, Any]:
    """The contents of a bundle as JSON values; no model is loaded.

    Raises:
        AsrError: there is no bundle, or one of its files is damaged.
    """
    manifest = read_manifest(folder)
    parts = {}
    for part in ("features", "acoustic_model", "graph", "small_ngram", "large_ngram", "rnn_lm", "lexicon"):
        if part not in manifest:
            continue
        entry = manifest[part]
        sizes = [manifest["files"][entry[key]]["num_bytes"] for key in ("file", "words") if key in entry]
        described = [str(entry["class"])] if "class" in entry else []
        parts[part] = ", ".join(described + ([f"{sum(sizes) / 1e6:.1f} MB"] if sizes else []))
    card = folder / "card.md"
    return {
        "name": manifest["name"],
        "folder": str(folder),
        "megabytes": round(folder_bytes(folder) / 1e6, 1),
        "parts": parts,
        "decoding": manifest["decoding"],
        "fingerprint": fingerprint_of_description(manifest),
        "card": card.read_text(encoding="utf-8", errors="replace") if card.is_file() else "",
    }
