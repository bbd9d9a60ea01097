"""Where the benchmarks look for real speech and text, and how they read sentences."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from asr.text.normalize import read_text


def default_corpora() -> Path | None:
    """The folder that ASR_CORPORA names, or `shared/data` inside or beside this checkout; None where there is none."""
    checkout = Path(__file__).resolve().parents[2]
    named = os.environ.get("ASR_CORPORA")
    candidates = [Path(named)] if named else []
    candidates += [checkout / "shared" / "data", checkout.parent / "shared" / "data"]
    return next((folder for folder in candidates if folder.is_dir()), None)


def read_sentences(path: Path) -> Iterator[list[str]]:
    """The words of each line that has any."""
    return filter(None, map(str.split, read_text(path).splitlines()))
