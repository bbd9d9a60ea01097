"""`asr bundle fetch`: fetches a bundle and shows the progress."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from asr import hub
from asr.bundle import FILE_NAME, bundle_folder, read_manifest
from asr.errors import AsrError
from asr.serialization import atomic_folder

NAME = "bundle fetch"


HELP = """Fetches a bundle, checks it, and prints its folder.

Files that are already on this machine are not fetched again. After an interruption, repeat the command: it continues
where the transfer stopped. All files are compared with the checksums in the bundle.

environment:
  ASR_CACHE     the folder for fetched bundles (default: asr/ in the user's cache folder)
  ASR_BUNDLES   address of the folder that an4 and librispeech are fetched from
  HF_TOKEN      access token for private repositories on the Hugging Face Hub
  HF_ENDPOINT   address of another hub

examples:
  asr bundle fetch hf:owner/name
  asr bundle fetch https://example.org/bundles/mine --output mine"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="https://..., hf:owner/name, hf:owner/name@revision, an4 or librispeech")
    parser.add_argument("--output", metavar="FOLDER", help="copy the bundle to this folder as well")
    parser.add_argument("--refresh", action="store_true", help="fetch the files that have changed at the source")


def run(args: argparse.Namespace) -> int:
    source = hub.source_of(args.bundle)
    if source is not None and args.refresh:
        with fetching(args.bundle) as report:
            folder = hub.fetch(source, refresh=True, on_progress=report)
    else:
        with fetching(args.bundle) as report:
            folder = bundle_folder(args.bundle, on_progress=report)
    manifest = read_manifest(folder)
    if args.output is not None:
        output = Path(args.output)
        if output.exists() and not (output / FILE_NAME).is_file() and any(output.iterdir() if output.is_dir() else [1]):
            raise AsrError(f"{output}: this already exists and is not a bundle; name a new folder.")
        with atomic_folder(output) as partial:
            for name in (FILE_NAME, "card.md", *manifest["files"]):
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, partial / name)
        folder = output
    print(folder)
    return 0


@contextmanager
def fetching(name: str) -> Iterator[hub.Progress]:
    """Shows a progress bar in bytes on stderr, or one line if stderr is no terminal; nothing if nothing is fetched."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = None

        def report(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = progress.add_task(f"fetching {name}", total=total)
                if not console.is_terminal:
                    print(f"asr: fetching {name}, {total / 1e6:.1f} MB.", file=sys.stderr)
            progress.update(task, completed=done)

        yield report
