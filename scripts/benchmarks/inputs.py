"""Corpora, bundles and cache folder of the benchmarks, and their command-line parser."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from asr.errors import AsrError
from asr.text.documents import read_text

ROOT = Path(__file__).resolve().parents[2]
LIBRISPEECH_BUNDLE = ROOT / "checkpoints" / "librispeech"
AN4_BUNDLE = ROOT / "checkpoints" / "an4"
_T = TypeVar("_T")


def argument_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `scripts/bench NAME`, whose description is printed unwrapped."""
    return argparse.ArgumentParser(
        prog=f"scripts/bench {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def cache_folder() -> Path:
    """Folder for files that take long to make: ASR_BENCH_CACHE, or `data/benchmarks`, which git ignores."""
    return Path(os.environ.get("ASR_BENCH_CACHE") or ROOT / "data" / "benchmarks")


def default_corpora() -> Path | None:
    """The folder that ASR_CORPORA names, or `shared/data` inside or next to this checkout; None if there is none."""
    named = os.environ.get("ASR_CORPORA")
    candidates = [Path(named)] if named else []
    candidates += [ROOT / "shared" / "data", ROOT.parent / "shared" / "data"]
    return next((folder for folder in candidates if folder.is_dir()), None)


def required_corpora(folder: Path | None) -> Path:
    """The folder of corpora.

    Raises:
        AsrError: there is none.
    """
    if folder is None or not folder.is_dir():
        raise AsrError(
            "no corpora: name the folder that holds librispeech/ and text/ with --corpora or the variable ASR_CORPORA."
        )
    return folder


def read_sentences(path: Path) -> Iterator[list[str]]:
    """The words of each non-empty line."""
    return filter(None, map(str.split, read_text(path).splitlines()))


def with_progress(items: Iterable[_T], what: str, total: int | None = None) -> Iterator[_T]:
    """The items, with a progress bar on stderr."""
    from rich.console import Console  # scripts/gpu_check has to do without rich
    from rich.progress import track

    yield from track(items, description=what, total=total, console=Console(stderr=True), transient=True)
