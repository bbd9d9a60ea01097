"""Installs k2 from its own wheel index into this environment, where the index is reached and has a fitting wheel.

    python scripts/install_k2.py [INDEX]

k2's wheels are linked against one version of torch and CUDA. INDEX is the address of the folder with `cpu.html` and
`cuda.html`, k2's own by default. A wheel is believed after it has intersected a graph of two states with
log-probabilities in a process of its own; one that does not is taken away again. What was done goes to stderr. The exit
code is 0 with k2 and without: everything but k2's decoder works without it.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import NamedTuple

INDEX = "https://k2-fsa.github.io/k2/"
_TIMEOUT_SECONDS = 10
_MAX_BYTES = 1 << 25
_LINK = re.compile(r"href=[\"']?([^\"'\s>]+\.whl)(#[^\"'\s>]*)?")
_WHEEL = re.compile(r"k2-([\d.]+(?:dev\d+)?)\+(cpu|cuda[\d.]+)\.torch([\d.]+)-cp(\d)(\d+)-[^-]+-([\w.]+)\.whl")

# Two states: the graph reads token 1 in each of two frames, with a score of 0.5, and ends with one of 0.25.
TRIAL = """
import k2, torch
graph = k2.Fsa.from_str("0 0 1 0.5\\n0 1 -1 0.25\\n1")
scores = torch.tensor([[[-1.0, -2.0], [-3.0, -0.5]]])
dense = k2.DenseFsaVec(scores, torch.tensor([[0, 0, 2]], dtype=torch.int32))
lattice = k2.intersect_dense_pruned(k2.create_fsa_vec([graph]), dense, 10.0, 8.0, 1, 100)
total = float(lattice.get_tot_scores(use_double_scores=True, log_semiring=False))
assert abs(total - (-2.0 - 0.5 + 2 * 0.5 + 0.25)) < 1e-4, total
"""


class Wheel(NamedTuple):
    """A wheel of an index: `build` is `cpu` or `cuda12.6`, `python` (3, 11), `platforms` its tag."""

    address: str
    version: str
    build: str
    torch: str
    python: tuple[int, int]
    platforms: str


def wheels_of(page: str, address: str) -> list[Wheel]:
    """The wheels that a page links to.

    Args:
        page: HTML.
        address: of the page, which links may be relative to.
    """
    found = []
    for link, fragment in _LINK.findall(page):
        match = _WHEEL.fullmatch(urllib.parse.unquote(link.rsplit("/", 1)[-1]))
        whole = urllib.parse.urljoin(address, link) + fragment
        is_safe = whole.startswith("https:") or not address.startswith("https:")
        if match is not None and is_safe:
            version, build, torch, major, minor, platforms = match.groups()
            found.append(Wheel(whole, version, build, torch, (int(major), int(minor)), platforms))
    return found


def newest(wheels: list[Wheel]) -> Wheel | None:
    """The one of the highest version."""
    return max(wheels, key=lambda one: _numbers(one.version), default=None)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def main(arguments: list[str]) -> int:
    import torch

    index = (arguments[0] if arguments else INDEX).rstrip("/") + "/"
    cuda = torch.version.cuda
    build, version = "cpu" if cuda is None else f"cuda{cuda}", torch.__version__.partition("+")[0]
    page = urllib.parse.urljoin(index, "cpu.html" if cuda is None else "cuda.html")
    python = ".".join(map(str, sys.version_info[:2]))
    without = "decoding is by token passing"
    try:
        with urllib.request.urlopen(page, timeout=_TIMEOUT_SECONDS) as answer:
            text = answer.read(_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return _say(f"k2's index {page} is not reached ({reason}); {without}.")
    fits = f"linux.*_{platform.machine()}"
    here = [
        one for one in wheels_of(text, page) if one.python == sys.version_info[:2] and re.search(fits, one.platforms)
    ]
    wheel = newest([one for one in here if (one.build, one.torch) == (build, version)])
    if wheel is None:
        last = max((_numbers(one.torch) for one in here), default=[])
        has = f"; its newest one for this Python is for torch {'.'.join(map(str, last))}" if last else ""
        return _say(f"k2's index has no wheel for torch {version} ({build}) on Python {python}{has}; {without}.")
    pip = [sys.executable, "-m", "pip"]
    install = [*pip, "install", "-qq", "--no-deps", "--force-reinstall", wheel.address]
    if subprocess.run(install, check=False).returncode:
        return _say(f"k2 {wheel.version} could not be installed from {wheel.address}; {without}.")
    tried = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, text=True, check=False)
    if tried.returncode:
        subprocess.run([*pip, "uninstall", "-qq", "--yes", "k2"], check=False)
        reason = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
        return _say(f"k2 {wheel.version} does not intersect two states here ({reason}), and was taken away; {without}.")
    return _say(f"k2 {wheel.version} ({build}, torch {version}) from its own index, without a pinned hash; it works.")


def _say(text: str) -> int:
    print(f"scripts/setup: {text}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
