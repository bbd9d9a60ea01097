"""k2 from a wheel index: which wheel is taken, and that it is believed only after it has worked. pip is a stand-in."""

from __future__ import annotations

import functools
import http.server
import os
import platform
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import install_k2

ROOT = Path(__file__).resolve().parents[2]
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
MACHINE = platform.machine()

# Takes wheels apart where Python finds them, and notes what it was asked for.
PIP = """
import os, pathlib, sys, urllib.request, zipfile, io
site = pathlib.Path(os.environ["SITE"])
with (site / "pip.log").open("a") as log:
    print(sys.argv[1], sys.argv[-1].rsplit("/", 1)[-1], file=log)
if sys.argv[1] == "uninstall":
    (site / "k2.py").unlink()
else:
    zipfile.ZipFile(io.BytesIO(urllib.request.urlopen(sys.argv[-1]).read())).extractall(site)
"""

# What the trial calls: the sum of the graph's scores and of the frames' for the label that it reads.
K2 = """
class Fsa:
    def from_str(text):
        return [line.split() for line in text.split(chr(10)) if len(line.split()) == 4]
def create_fsa_vec(graphs):
    return graphs[0]
class DenseFsaVec:
    def __init__(self, scores, segments):
        self.frames = scores[0][: int(segments[0][2])]
class Lattice:
    def __init__(self, total):
        self.get_tot_scores = lambda use_double_scores, log_semiring: total
def intersect_dense_pruned(graph, dense, *beams):
    loop, end = graph
    return Lattice(sum(frame[int(loop[2])] + float(loop[3]) for frame in dense.frames) + float(end[3]) + WRONG)
"""


class Index(http.server.ThreadingHTTPServer):
    """Serves a folder of pages and wheels on the loopback interface."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self.server_address[1]}/k2"
        self.folder = folder / "k2"
        (self.folder / "wheels").mkdir(parents=True)

    def publish(self, page: str, *names: str, wrong: float = 0.0) -> None:
        links = [f'<a href="wheels/{name.replace("+", "%2B")}">{name}</a><br>' for name in names]
        (self.folder / page).write_text("\n".join(["<html>", *links]))
        for name in names:
            with zipfile.ZipFile(self.folder / "wheels" / name, "w") as wheel:
                wheel.writestr("k2.py", K2.replace("WRONG", repr(wrong)))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(tmp_path) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a torch 2.9.0 for CUDA 12.6, which knows lists only, and a pip."""
    folder = tmp_path / "site"
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(PIP)
    which = [sys.executable, "-c", "import pip; print(pip.__file__)"]
    found = subprocess.run(
        which, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(str(folder)), "the environment's own pip must not run here"
    (folder / "torch.py").write_text(
        "__version__ = '2.9.0+cu126'\nint32 = None\nclass version:\n    cuda = '12.6'\n"
        "def tensor(values, dtype=None):\n    return values\n"
    )
    return folder


def name(version: str, build: str, torch: str, tag: str = TAG, machine: str = MACHINE) -> str:
    platforms = f"manylinux_2_17_{machine}.manylinux2014_{machine}"
    return f"k2-{version}+{build}.torch{torch}-{tag}-{tag}-{platforms}.whl"


OLD, NEW = (name(f"1.24.4.dev2025{day}", "cuda12.6", "2.9.0") for day in ("0930", "1030"))
OTHERS = [
    name("1.24.5.dev20260101", "cuda12.8", "2.9.0"),
    name("1.24.5.dev20260101", "cpu", "2.9.0"),
    name("1.24.5.dev20260101", "cuda12.6", "2.8.0"),
    name("1.24.5.dev20260101", "cuda12.6", "2.10.0"),
    name("1.24.5.dev20260101", "cuda12.6", "2.9.0", tag="cp39"),
    name("1.24.5.dev20260101", "cuda12.6", "2.9.0", machine="other"),
    name("1.24.5.dev20260101", "cuda12.6", "2.9.0").replace("manylinux", "macosx"),
]


def install(index: str, site: Path) -> str:
    """What it says; the exit code is always 0."""
    environment = {**os.environ, "PYTHONPATH": str(site), "SITE": str(site), "no_proxy": "*"}
    script = ROOT / "scripts" / "install_k2.py"
    ran = subprocess.run(
        [sys.executable, "-S", str(script), index], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    return ran.stderr


def asked_of_pip(site: Path) -> list[str]:
    log = site / "pip.log"
    return log.read_text().replace("%2B", "+").splitlines() if log.exists() else []


@pytest.mark.slow
def test_the_newest_fitting_wheel_is_installed_and_tried(index: Index, site: Path) -> None:
    index.publish("cuda.html", OLD, NEW, *OTHERS)
    said = install(index.address, site)
    assert "k2 1.24.4.dev20251030 (cuda12.6, torch 2.9.0) from its own index" in said and "it works" in said
    assert asked_of_pip(site) == [f"install {NEW}"] and (site / "k2.py").is_file()


@pytest.mark.slow
def test_one_that_gives_a_wrong_score_is_taken_away(index: Index, site: Path) -> None:
    index.publish("cuda.html", NEW, wrong=0.01)
    said = install(index.address, site)
    assert "does not intersect two states here (AssertionError: -1.24), and was taken away" in said
    assert asked_of_pip(site) == [f"install {NEW}", "uninstall k2"] and not (site / "k2.py").exists()


@pytest.mark.slow
def test_without_a_fitting_wheel_nothing_is_installed(index: Index, site: Path) -> None:
    index.publish("cuda.html", *OTHERS)
    said = install(index.address, site)
    assert "has no wheel for torch 2.9.0 (cuda12.6) on Python" in said
    assert "its newest one for this Python is for torch 2.10.0; decoding is by token passing" in said
    assert "cpu.html is not reached" in install_as_cpu(index, site)
    assert asked_of_pip(site) == []


def install_as_cpu(index: Index, site: Path) -> str:
    torch = site / "torch.py"
    torch.write_text(torch.read_text().replace("'12.6'", "None"))
    return install(index.address, site)


@pytest.mark.slow
def test_without_a_network_one_sentence_says_so(site: Path) -> None:
    said = install("http://127.0.0.1:9/k2", site)
    assert said.count("\n") == 1 and "cuda.html is not reached (" in said and "token passing" in said


def test_a_page_of_https_cannot_lead_elsewhere() -> None:
    page = f'<a href="http://example.org/{NEW}"></a><a href="https://example.org/{OLD}#sha256=12"></a>'
    (wheel,) = install_k2.wheels_of(page, "https://example.org/k2/cuda.html")
    assert wheel.address == f"https://example.org/{OLD}#sha256=12"
    assert len(install_k2.wheels_of(page, "http://127.0.0.1/k2/cuda.html")) == 2
