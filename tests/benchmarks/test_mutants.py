"""Mutants: what is changed, that those left out still exist, and which tests are run for them."""

from __future__ import annotations

import ast
import dataclasses
import signal
from pathlib import Path

import pytest

from asr.errors import AsrError
from scripts.benchmarks import mutants
from scripts.benchmarks.mutants import Runner, explanation, modules_of, mutants_of
from scripts.benchmarks.mutants_explained import EXPLAINED, SIZES, WITH_A_GPU, WITH_K2
from scripts.benchmarks.mutants_tests import Outcomes, Reach, Worker

SOURCE = """
SIZE = 4


@cached
def total(prices: list[int], most: int = 3) -> int:
    found = 0
    for price in prices:
        if price < most:
            found += price
    return max(found, -1)


def loop(values: Any) -> int:
    return values[0] + SIZE


@kernel(fastmath=False)
def compiled(value: int) -> int:
    return value + 1


class Shop:
    num_open = 1
    most = 1e30

    def close(self) -> None:
        self.num_open -= 1
"""


def test_each_place_is_changed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "prices.py").write_text(SOURCE)
    made = mutants_of("prices.py")
    assert sorted((one.text, one.change) for one in made) == [
        ("def total(prices: list[int], most: int = 3) -> int:", "3 -> 4"),
        ("found += price", "found += price -> found -= price"),
        ("found += price", "found += price -> pass"),
        ("found = 0", "0 -> 1"),
        ("if price < most:", "price < most -> price <= most"),
        ("num_open = 1", "1 -> 2"),
        ("return max(found, -1)", "-1 -> +1"),
        ("return max(found, -1)", "1 -> 2"),
        ("return max(found, -1)", "max -> min"),
        ("self.num_open -= 1", "1 -> 2"),
        ("self.num_open -= 1", "self.num_open -= 1 -> self.num_open += 1"),
    ]
    lines = SOURCE.splitlines()
    for mutant in made:
        changed = ast.unparse(mutant.tree())
        compile(mutant.tree(), "prices.py", "exec")
        assert (
            changed != ast.unparse(ast.parse(SOURCE))
            and "value + 1" in changed
            and "values[0] + SIZE" in changed
            and "SIZE = 4" in changed
        )
        first = None if mutant.function is None else lines[mutant.function - 1].strip()
        assert first == ("@cached" if mutant.line < 13 else "def close(self) -> None:" if mutant.line > 25 else None)


@pytest.mark.slow
def test_all_that_are_left_out_still_exist() -> None:
    for module in {*EXPLAINED, *WITH_A_GPU, *WITH_K2, *SIZES}:
        made, functions = mutants_of(module), {*WITH_A_GPU.get(module, ()), *WITH_K2.get(module, ())}
        assert {one.name for one in made} >= functions, module
        left_out = [one for one in made if explanation(one)]
        others = [one for one in left_out if one.name not in functions]
        sizes = {one.text.partition(" = ")[0] for one in others if explanation(one) == "how much is done at once"}
        assert sizes == set(SIZES.get(module, ())), module
        singly = {(one.text, one.change) for one in others if explanation(one) != "how much is done at once"}
        assert singly == set(EXPLAINED.get(module, {})), module


def test_folders_stand_for_their_modules() -> None:
    found = modules_of(["asr/lm", "asr/decoding", "asr/lm/combine.py"])
    assert {"asr/lm/combine.py", "asr/lm/cached/engine.py", "asr/decoding/cpu/nbest.py"} <= set(found)
    assert len(set(found)) == len(found)
    assert not any("gpu" in module for module in found)
    with pytest.raises(AsrError, match=r"no module or folder asr/lm/engine\.py"):
        modules_of(["asr/lm/engine.py"])


def test_the_most_specific_tests_come_first_and_their_time_is_limited() -> None:
    wide = frozenset({("asr/a.py", 1), ("asr/a.py", 9), ("asr/b.py", 1)})
    reach = Reach(
        {
            "wide": (1.0, wide),
            "narrow": (2.0, frozenset({("asr/a.py", 1)})),
            "slow": (14.0, frozenset({("asr/a.py", 1), ("asr/a.py", 9)})),
            "other": (0.1, frozenset({("asr/b.py", 1)})),
        }
    )
    assert reach.tests_of("asr/a.py", 1) == (["narrow", "wide"], 3.0)
    assert reach.tests_of("asr/a.py", 9) == (["slow", "wide"], 15.0)
    assert reach.tests_of("asr/b.py", None) == (["other", "wide"], 1.1)
    assert reach.tests_of("asr/a.py", 5) == ([], 0.0)


def test_outcomes_outlive_a_run_that_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_BENCH_CACHE", str(tmp_path))
    files = ["tests/benchmarks/test_mutants.py"]
    first = Outcomes("code", files, "not slow")
    first.add(("asr/a.py", 7, 0), True)
    first.add(("asr/a.py", 7, 1), False)
    (kept,) = tmp_path.rglob("*.jsonl")
    with kept.open("a") as file:
        file.write('["asr/a.py", 8, 0, tr')  # ended while it was written
    again = Outcomes("code", files, "not slow")
    assert [again.of(("asr/a.py", *change)) for change in ((7, 0), (7, 1), (8, 0))] == [True, False, None]
    again.add(("asr/a.py", 8, 0), True)
    assert Outcomes("code", files, "not slow").of(("asr/a.py", 8, 0)) is True
    for others in (("code", files, "slow"), ("code", [], "not slow"), ("other code", files, "not slow")):
        assert Outcomes(*others).of(("asr/a.py", 7, 0)) is None


@pytest.mark.slow
def test_tests_that_are_ended_from_outside_kill_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        def run(self, *_: object, **__: object) -> int:
            return -signal.SIGTERM

        def close(self) -> None:
            pass

    monkeypatch.setenv("ASR_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(mutants, "Worker", Ended)
    monkeypatch.setattr(Reach, "tests_of", lambda *_: (["tests/metrics"], 1.0))
    runner = Runner(1, fast=True)
    try:
        runner.record([])
        with pytest.raises(AsrError, match="ended from outside; the same command continues"):
            list(runner.killed(mutants_of("asr/metrics.py")[:1]))
    finally:
        runner.close()


@pytest.mark.one_stack
@pytest.mark.slow
def test_mutants_are_killed_by_the_tests_that_call_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_BENCH_CACHE", str(tmp_path))
    runner = Runner(1, fast=True)
    try:
        runner.record(["tests/metrics"])
        made = [one for one in mutants_of("asr/metrics.py") if one.name == "num_errors"]
        unreached = dataclasses.replace(made[0], function=-1)
        assert list(runner.killed([*made, dataclasses.replace(unreached, place=-1)])) == [True, True, False]
    finally:
        runner.close()
    runner = Runner(1, fast=True)
    monkeypatch.setattr(Worker, "run", lambda *_, **__: pytest.fail("recorded already"))
    try:
        runner.record(["tests/metrics"])
        assert list(runner.killed(made)) == [True, True]
    finally:
        runner.close()
