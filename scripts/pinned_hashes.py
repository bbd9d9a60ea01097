"""Splits what pip would install into what `constraints/hashes.txt` knows, with its hashes, and the rest.

    python scripts/pinned_hashes.py report.json constraints/hashes.txt FOLDER

The report is that of `pip install --dry-run --report`. Into FOLDER go `hashed.txt`, for `pip install
--require-hashes`, and `others.txt`, exact versions without hashes: what torch's CUDA builds bring along. The project
itself is in neither. With `--update` in the place of the folder, the hashes of requirements files, as `uv pip compile
--generate-hashes` writes them, are merged into the list.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
Pin = tuple[str, str]


def canonical(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_hashes(path: Path) -> dict[Pin, set[str]]:
    """(name, version) -> hashes of a requirements file."""
    found: dict[Pin, set[str]] = {}
    pin: Pin | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _PIN.match(line)
        if match:
            pin = canonical(match[1]), match[2]
            found.setdefault(pin, set())
        if pin is not None:
            found[pin].update(_HASH.findall(line))
    return found


def split(report: dict[str, object], known: dict[Pin, set[str]]) -> tuple[list[str], list[str]]:
    """Requirements with hashes, and those for which there are none."""
    hashed, others = [], []
    for item in report["install"]:  # type: ignore[attr-defined]
        if "dir_info" in item["download_info"]:
            continue  # the project
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        # torch's CPU builds are called 2.13.0+cpu and the like; the list has the hashes of one under 2.13.0, too.
        hashes = known.get((canonical(name), version)) or known.get((canonical(name), version.partition("+")[0]))
        if hashes:
            hashed.append(" ".join([f"{name}=={version}", *(f"--hash={one}" for one in sorted(hashes))]))
        else:
            others.append(f"{name}=={version}")
    return sorted(hashed), sorted(others)


def update(path: Path, sources: list[Path]) -> None:
    """Merges the hashes of requirements files into the list."""
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    known: dict[Pin, set[str]] = {}
    for source in sources:
        for pin, hashes in read_hashes(source).items():
            known.setdefault(pin, set()).update(hashes)
    lines = [" \\\n  ".join([f"{name}=={version}", *(f"--hash={one}" for one in sorted(known[name, version]))])
             for name, version in sorted(known)]  # fmt: skip
    path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments[1] == "--update":
        update(Path(arguments[0]), [Path(name) for name in arguments[2:]])
        return 0
    report, known, folder = (Path(name) for name in arguments)
    hashed, others = split(json.loads(report.read_text(encoding="utf-8")), read_hashes(known))
    for name, lines in (("hashed.txt", hashed), ("others.txt", others)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
