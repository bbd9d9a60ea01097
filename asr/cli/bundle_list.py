"""`asr bundle list`: the bundles that are on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from asr import hub
from asr.bundle import all_bundle_folders

NAME = "bundle list"


HELP = """Lists the bundles on this machine: those of the checkout, and fetched ones.

A bundle that is not listed is fetched on first use, or by 'asr bundle fetch'. Fetched bundles are in the folder that
ASR_CACHE names, or else in asr/ in the user's cache folder; deleting a folder there deletes the bundle."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of the table")


def run(args: argparse.Namespace) -> int:
    here = [(folder.name, folder) for folder in all_bundle_folders()] + hub.cached_bundles()
    width = max((len(name) for name, _ in here), default=0) + 2
    for name, folder in here:
        num_bytes = folder_bytes(folder)
        if args.json:
            print(json.dumps({"name": name, "folder": str(folder), "megabytes": round(num_bytes / 1e6, 1)}))
        else:
            print(f"{name:<{width}}{num_bytes / 1e6:8.1f} MB  {folder}")
    if not here:
        print(
            f"asr: there is no bundle on this machine; fetch one with 'asr bundle fetch' "
            f"({', '.join(hub.KNOWN_BUNDLES)}, https://... or hf:owner/name).",
            file=sys.stderr,
        )
    return 0


def folder_bytes(folder: Path) -> int:
    """The bytes of all files of a bundle."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
