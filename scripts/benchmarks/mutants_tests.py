"""The tests of mutants: which test calls which functions, and which mutants they killed, both recorded until code or
tests change; and processes that run tests."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asr.errors import AsrError
from scripts.benchmarks.inputs import ROOT, cache_folder

NOTHING_SELECTED = 5
"""Exit status of pytest."""
_MOST_SECONDS = 15.0
"""Tests of a mutant are added until they take this long without it: CPU seconds."""

Function = tuple[str, int]
"""A function: path of its module, and its first line, which may be a decorator's."""
Place = tuple[str, int, int]
"""A change: path of the module, which node of its syntax tree, and the kind of change."""


class Reach:
    """Which functions each test calls.

    Args:
        tests: name of a test -> CPU seconds that it takes, and the functions.
    """

    def __init__(self, tests: dict[str, tuple[float, frozenset[Function]]]) -> None:
        self._tests = tests

    def tests_of(self, module: str, first_line: int | None) -> tuple[list[str], float]:
        """The tests that call a function, or any of a module, and their CPU seconds.

        Tests that call the fewest other functions come first. The last ones are left out if all together take long.
        """
        found = [
            (len(reached), name, seconds)
            for name, (seconds, reached) in self._tests.items()
            if any(path == module and first_line in (None, line) for path, line in reached)
        ]
        chosen, total = [], 0.0
        for _, name, seconds in sorted(found):
            if chosen and total + seconds > _MOST_SECONDS:
                continue
            chosen.append(name)
            total += seconds
        return chosen, total


class Worker:
    """A process that runs tests, one order after another."""

    def __init__(self) -> None:
        # CI: Hypothesis draws the same examples for every mutant.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CI": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.benchmarks.mutants_server"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def close(self) -> None:
        self._process.communicate()

    def run(self, tests: Sequence[str], marked: str, **options: Any) -> int:
        """Exit status of pytest, negative for a signal.

        Args:
            tests: names of tests or files.
            marked: selection by marks.
            options: `mutant`, the fields of a mutant; `record`, a file for what the tests call; `cpu_s`, a time limit.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"tests": tests, "marked": marked, **options}), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline()
        return int(status) if status else -signal.SIGTERM  # the process itself was ended


class Outcomes:
    """Which mutants were killed, in a file that is written mutant by mutant, so that a run that was ended can go on.

    Outcomes for other code or other tests are dropped.

    Args:
        state: of the code, from `state_of_code`.
        files: with tests.
        marked: selection by marks.
    """

    def __init__(self, state: str, files: Sequence[str], marked: str) -> None:
        tests = [(path, (ROOT / path).read_text(encoding="utf-8")) for path in files]
        key = json.dumps(hashlib.sha256(repr((state, tests, marked)).encode()).hexdigest())
        self._path = cache_folder() / "mutants" / "outcomes.jsonl"
        known = self._path.read_text(encoding="utf-8").split("\n") if self._path.is_file() else []
        if known[:1] != [key]:
            known = [key, ""]
            self._path.parent.mkdir(parents=True, exist_ok=True)
        # What follows the last line break was not written to its end.
        self._path.write_text("\n".join([*known[:-1], ""]), encoding="utf-8")
        self._killed = {tuple(place): is_killed for *place, is_killed in map(json.loads, known[1:-1])}

    def of(self, place: Place) -> bool | None:
        """Whether the mutant was killed; None if that is unknown."""
        return self._killed.get(place)

    def add(self, place: Place, is_killed: bool) -> None:
        """Writes down what became of a mutant."""
        self._killed[place] = is_killed
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([*place, is_killed]) + "\n")


def test_files(paths: Sequence[str]) -> list[str]:
    """The files with tests that files and folders stand for."""
    found = {
        file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"))
    }
    return sorted(file.relative_to(ROOT).as_posix() for file in found)


def record(process: Worker, path: str, marked: str, state: str) -> dict[str, tuple[float, frozenset[Function]]]:
    """The tests of a file; its earlier recording if nothing has changed.

    Args:
        path: of the file.
        marked: selection by marks.
        state: of the code, from `state_of_code`.

    Raises:
        AsrError: a test fails.
    """
    key = hashlib.sha256(f"{state} {marked} {(ROOT / path).read_text(encoding='utf-8')}".encode()).hexdigest()
    known = json.loads(_place(path).read_text(encoding="utf-8")) if _place(path).is_file() else {"key": None}
    if known["key"] != key:
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "reached.json"
            if process.run([path], marked, record=str(written)) not in (0, NOTHING_SELECTED):
                raise AsrError(f"the tests of {path} fail without a mutant; fix them first.")
            known = {"key": key, **json.loads(written.read_text(encoding="utf-8"))}
        _place(path).parent.mkdir(parents=True, exist_ok=True)
        _place(path).write_text(json.dumps(known), encoding="utf-8")
    functions = [(module, line) for module, line in known["functions"]]
    return {
        name: (seconds, frozenset(functions[number] for number in numbers)) for name, seconds, numbers in known["tests"]
    }


def state_of_code() -> str:
    """A number for the code and what tests share."""
    state = hashlib.sha256(sys.version.encode())
    for path in sorted([*(ROOT / "asr").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        if not path.name.startswith("test_"):
            state.update(path.read_bytes())
    return state.hexdigest()


def _place(path: str) -> Path:
    return cache_folder() / "mutants" / (path.replace("/", "+") + ".json")
