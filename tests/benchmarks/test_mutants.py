"""Mutants: what is changed, and that those left out still exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.benchmarks import mutants
from scripts.benchmarks.mutants import TESTS, explanation, mutants_of
from scripts.benchmarks.mutants_explained import EXPLAINED

SOURCE = """
def total(prices: list[int], most: int = 3) -> int:
    found = 0
    for price in prices:
        if price < most:
            found += price
    return max(found, -1)


def loop(values: Any) -> int:
    return values[0] + 1
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
        ("return max(found, -1)", "-1 -> +1"),
        ("return max(found, -1)", "1 -> 2"),
        ("return max(found, -1)", "max -> min"),
    ]
    for mutant in made:
        changed = mutant.source()
        compile(changed, "prices.py", "exec")
        assert changed != SOURCE and "values[0] + 1" in changed


def test_all_that_are_left_out_still_exist() -> None:
    assert set(EXPLAINED) <= set(TESTS)
    for module, explained in EXPLAINED.items():
        made = {(one.text, one.change) for one in mutants_of(module) if explanation(one) is not None}
        assert made == set(explained), module


def test_the_tests_of_modules_exist() -> None:
    for module, tests in TESTS.items():
        assert all((mutants.ROOT / path).exists() for path in (module, *tests)), module
