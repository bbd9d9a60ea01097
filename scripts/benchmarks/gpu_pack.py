"""The files that `scripts/gpu_check` needs on a machine with only torch, Triton, NumPy and safetensors."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.inputs import AN4_BUNDLE, ROOT

_FILES = ("scripts/gpu_check", "scripts/bench", "tests/assets/query_streams.npz.xz", "tests/assets/gpu_expected.npz")
_FOLDERS = ("asr", "scripts/benchmarks")
_KINDS = (".py", ".json")


def packed_files() -> Iterator[Path]:
    """The files, below the checkout's root: code, recorded queries and the smallest bundle."""
    yield from (ROOT / name for name in _FILES)
    for folder in _FOLDERS:
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in _KINDS)
    yield from sorted(path for path in AN4_BUNDLE.iterdir() if path.is_file())


def packed_bytes() -> int:
    """Their size together, before compression."""
    return sum(path.stat().st_size for path in packed_files())


def pack(target: Path) -> None:
    """Writes them into an archive, a compressed tar file that `tar xzf` unpacks."""
    with tarfile.open(target, "w:gz") as archive:
        for path in packed_files():
            archive.add(path, path.relative_to(ROOT))
