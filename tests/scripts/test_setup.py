"""scripts/setup with stand-ins for interpreters, pip and the machine: which Python it takes, what it installs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("awk", "bash", "cat", "cut", "dirname", "rm", "sed", "sha256sum", "tr")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_stack,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="scripts/setup is for Linux"),
]

# As an interpreter of some version: runs code, makes environments of links to itself, and notes what pip is asked for.
INTERPRETER = """
import os, pathlib, sys
version, log, path, option, *arguments = sys.argv[1:]
sys.version_info, sys.executable = (*map(int, version.split(".")), 0), path
if option == "--version":
    print("Python " + version)
elif option == "-c":
    exec(arguments[0])
elif option.startswith("scripts/"):
    with open(log + ".scripts", "a") as file:
        print(option.removeprefix("scripts/"), *arguments, file=file)
elif arguments[0] == "venv":
    folder = pathlib.Path(arguments[1], "bin")
    folder.mkdir(parents=True)
    for name in ("python", "python3", "python" + version):
        (folder / name).symlink_to(os.path.realpath(path))
elif arguments[0] == "pip":
    with open(log, "a") as file:
        print(*arguments, file=file)
    sys.exit(os.environ.get("PIP_FAILS", "") in arguments)
"""


class Machine:
    """A checkout and a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin, self.log = folder / "checkout", folder / "bin", folder / "pip.log"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.add("uname", "case $1 in -s) echo Linux ;; *) echo x86_64 ;; esac")
        self.free("9000000")
        (folder / "interpreter.py").write_text(INTERPRETER)
        (self.checkout / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup", self.checkout / "scripts")
        shutil.copytree(ROOT / "constraints", self.checkout / "constraints")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        self.folder = folder

    def add(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def free(self, kib: str) -> None:
        self.add("df", f"echo head; echo disk 0 0 {kib}")

    def add_python(self, version: str, name: str = "") -> None:
        stand_in = f'"{sys.executable}" -S -E "{self.folder}/interpreter.py" {version} "{self.log}"'
        self.add(name or f"python{version}", f'exec {stand_in} "$0" "$@"')

    def setup(self, *arguments: str, first_on_path: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, (first_on_path, str(self.bin))))
        environment = {"PATH": path, "HOME": str(self.folder), **more}
        command = [str(self.checkout / "scripts" / "setup"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def asked_of_pip(self) -> list[str]:
        """What pip was asked for since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def asked_of_scripts(self) -> list[str]:
        """Which scripts ran since the last call, but for the one that splits the list of packages."""
        log = Path(f"{self.log}.scripts")
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line for line in lines if not line.startswith("pinned_hashes")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_stack_a_is_installed_once(machine: Machine) -> None:
    machine.add_python("3.10")
    machine.add_python("3.12")
    first = machine.setup()
    assert (first.returncode, first.stdout) == (0, f"{machine.checkout}/.venv/bin/python\n"), first.stderr
    pip, k2, all_else, project = machine.asked_of_pip()
    assert "pip==25.3" in pip and "--requirement constraints/k2.txt" in k2
    assert "--dry-run" in all_else and "--no-deps --editable ." in project
    assert "--constraint constraints/stack-a.txt --editable .[k2,graph,media,serve,train,onnx]" in all_else
    assert machine.setup().stdout == first.stdout and machine.asked_of_pip() == []
    assert machine.setup("--tests").returncode == 0 and ".[all]" in machine.asked_of_pip()[-2]
    assert machine.setup().stdout == first.stdout and machine.asked_of_pip() == []


def test_an_activated_environment_is_kept_and_brought_up_to_date(machine: Machine) -> None:
    machine.add_python("3.10")
    machine.setup()
    (machine.checkout / ".venv" / "kept").touch()
    (machine.checkout / "pyproject.toml").write_text("changed")
    machine.asked_of_pip()
    again = machine.setup(first_on_path=str(machine.checkout / ".venv" / "bin"))
    assert again.returncode == 0 and len(machine.asked_of_pip()) == 4
    assert (machine.checkout / ".venv" / "kept").exists()


def test_an_interpreter_that_does_not_run_is_passed_over(machine: Machine) -> None:
    machine.add("python3.10", "echo no such version >&2; exit 127")
    machine.add_python("3.11")
    machine.add_python("3.12")
    done = machine.setup()
    assert done.stdout.endswith("/.venv/bin/python\n") and "taking stack B (Python 3.12)" in done.stderr
    assert [line for line in machine.asked_of_pip() if "k2.txt" in line or "stack-a" in line] == []
    done = machine.setup("--stack", "b")
    assert done.stdout.endswith("/.venv-b/bin/python\n") and "with Python 3.11" in done.stderr


def test_a_gpu_that_torch_1_cannot_drive_takes_stack_b(machine: Machine) -> None:
    machine.add_python("3.10")
    machine.add("nvidia-smi", "echo 8.9; echo 10.0")
    only_old = machine.setup()
    assert "stack A in .venv" in only_old.stderr and "no code for this GPU (compute capability 10.0)" in only_old.stderr
    machine.add_python("3.12")
    done = machine.setup()
    assert "no code for this GPU (compute capability 10.0): taking stack B (Python 3.12)" in done.stderr
    assert "stack B in .venv " in done.stderr and any("stack-b.txt" in line for line in machine.asked_of_pip())
    machine.add("nvidia-smi", "echo 8.9")
    assert "stack A in .venv" in machine.setup().stderr


def test_stack_b_looks_for_k2_in_its_own_index(machine: Machine) -> None:
    machine.add_python("3.12")
    scripts = machine.checkout / "scripts"
    (scripts / "install_k2.py").touch()
    assert machine.setup("--stack", "b").returncode == 0
    assert machine.asked_of_scripts() == ["install_k2.py"]
    (machine.checkout / ".venv-b" / "asr-setup-stamp").unlink()
    assert machine.setup("--stack", "b", "--k2-index", "https://example.org/k2").returncode == 0
    assert machine.asked_of_scripts() == ["install_k2.py https://example.org/k2"]
    (machine.checkout / ".venv-b" / "asr-setup-stamp").unlink()
    assert machine.setup("--stack", "b", "--k2-index", "none").returncode == 0
    machine.add_python("3.10")
    assert machine.setup("--stack", "a").returncode == 0
    assert machine.asked_of_scripts() == []


def test_what_failed_is_tried_again(machine: Machine) -> None:
    machine.add_python("3.10")
    failed = machine.setup(PIP_FAILS="--editable")
    assert (failed.returncode, failed.stdout) == (2, "") and "is there a network?" in failed.stderr
    machine.asked_of_pip()
    assert machine.setup().returncode == 0 and len(machine.asked_of_pip()) == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--stack", "c"), "--stack is a or b, not 'c'"),
        (("--stack",), "--stack needs a or b"),
        (("--tset",), "unknown argument '--tset'"),
        (("--stack", "a"), "stack A needs x86-64 Linux and a Python 3.10"),
        (("--stack", "a", "--python", "python3.12"), "stack A needs Python 3.10, and '.*/python3.12' is 3.12"),
        (("--stack", "b", "--python", "python3.9"), "stack B needs Python 3.11 or newer, and '.*/python3.9' is 3.9"),
        (("--python", "nowhere"), "'nowhere' does not run as a Python interpreter"),
    ],
)
def test_what_cannot_be_is_one_sentence(machine: Machine, arguments: tuple[str, ...], sentence: str) -> None:
    machine.add_python("3.9")
    machine.add_python("3.12")
    done = machine.setup(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(f"scripts/setup: {sentence}", done.stderr)


def test_too_little_room_is_told_before_anything_is_made(machine: Machine) -> None:
    machine.add_python("3.10")
    machine.free("5000000")
    done = machine.setup()
    assert done.returncode == 2 and "only 4882 MiB are free here" in done.stderr
    assert not (machine.checkout / ".venv").exists()


def test_files_are_pinned_by_hash(tmp_path: Path) -> None:
    """What the list knows is installed by its hashes, a build of torch as well; the project is left out."""
    one, other = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    known = tmp_path / "hashes.txt"
    known.write_text("# of\n")
    (tmp_path / "new").write_text(f"torch==2.13.0 ; python_version > '3' \\\n    --hash={one} \\\n    --hash={other}\n")
    (tmp_path / "newer").write_text(f"Some.Package==1 --hash={other}\n")
    script = [sys.executable, str(ROOT / "scripts" / "pinned_hashes.py")]
    subprocess.run([*script, str(known), "--update", str(tmp_path / "new"), str(tmp_path / "newer")], check=True)

    def item(name: str, version: str, **info: object) -> dict[str, object]:
        return {"metadata": {"name": name, "version": version}, "download_info": info}

    items = [item("torch", "2.13.0+cpu"), item("some_package", "1"), item("triton", "3"), item("us", "0", dir_info={})]
    (tmp_path / "report").write_text(json.dumps({"install": items}))
    subprocess.run([*script, str(tmp_path / "report"), str(known), str(tmp_path)], check=True)
    hashed = [f"some_package==1 --hash={other}", f"torch==2.13.0+cpu --hash={one} --hash={other}"]
    assert (tmp_path / "hashed.txt").read_text().splitlines() == hashed
    assert (tmp_path / "others.txt").read_text() == "triton==3\n"
    assert known.read_text().startswith("# of\n")


@pytest.mark.parametrize("stack", ["a", "b"])
def test_every_pin_has_hashes(stack: str) -> None:
    known = (ROOT / "constraints" / "hashes.txt").read_text()
    lines = (ROOT / "constraints" / f"stack-{stack}.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    lacking = [name for name, version in pins if f"{canonical(name)}=={version} \\\n" not in known]
    assert lacking == []


def test_everything_that_is_installed_is_pinned() -> None:
    """What the project with the tests needs, and what these packages need, has a version and so hashes."""
    requirements = pytest.importorskip("packaging.requirements")
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    lines = (ROOT / "constraints" / f"stack-{'a' if sys.version_info < (3, 11) else 'b'}.txt").read_text().splitlines()
    pins = {canonical(name): version for name, _, version in (line.partition("==") for line in lines)}
    if metadata.version("torch").partition("+")[0] != pins["torch"]:
        pytest.skip("this environment is of neither stack")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def own_of(extras: frozenset[str]) -> list[str]:
        return project["dependencies"] + [one for name in extras for one in project["optional-dependencies"][name]]

    pending = [("onepass-asr", frozenset({"all"}))]
    seen = set(pending)
    while pending:
        package, extras = pending.pop()
        try:
            needed = own_of(extras) if package == "onepass-asr" else metadata.requires(package)
        except metadata.PackageNotFoundError:
            continue  # an extra that this environment lacks
        for requirement in map(requirements.Requirement, needed or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
                found = requirement.name, frozenset(requirement.extras)
                pending += [found] if found not in seen else []
                seen.add(found)
    # pip builds with the first two, and torch's CUDA builds bring the others in versions of their own.
    free = re.compile(r"setuptools|wheel|triton|nvidia-.*|cuda-.*|onepass-asr")
    names = {canonical(name) for name, _ in seen}
    assert len(names) > 50
    assert {name for name in names - pins.keys() if not free.fullmatch(name)} == set()


def canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()
