"""The count of allocated bytes finds what is kept, and nothing where all is freed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.live_memory import ALLOCATOR, growth, live_megabytes

ROOT = Path(__file__).resolve().parents[2]
# Each step makes an array, small objects and a cycle, and keeps what it is told: arrays of 20 kB, or objects of 25 kB.
STEPS = """
import sys
import numpy as np
from scripts.benchmarks.live_memory import growth, live_megabytes
kept, live = [], []
for step in range(60):
    array, small, cycle = np.ones(2500), [str(number) + "x" for number in range(400)], [np.ones(3000)]
    cycle.append(cycle)
    kept += [array] if "arrays" in sys.argv else []
    kept += small if "objects" in sys.argv else []
    live.append(live_megabytes())
print(growth(live[10:], 1.0))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "least", "most"), [("", 0.0, 0.003), ("arrays", 0.019, 0.022), ("objects", 0.015, 0.04)]
)
def test_what_is_kept_is_found(kept: str, least: float, most: float) -> None:
    if live_megabytes() is None:
        pytest.skip("the C library does not count")
    environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", STEPS, kept], env=environment, capture_output=True, text=True, check=True
    )
    assert least <= float(ran.stdout) <= most


def test_growth_is_a_slope_without_outliers() -> None:
    assert growth([5.0 + 0.5 * step for step in range(20)], 0.25) == pytest.approx(2.0)
    assert growth([5.0] * 19 + [9.0], 0.25) == 0.0 == growth([5.0, 4.0, 3.0], 1.0)
