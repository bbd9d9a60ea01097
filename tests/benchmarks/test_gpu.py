"""The plan of `scripts/gpu_check`: no check hides another, and the budget is kept."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from scripts.benchmarks.gpu import CHECKS, Check, planned_seconds, run_plan, summary
from scripts.benchmarks.gpu_tasks import TASKS

_CHECK = """
import os, signal, subprocess, sys, time
name = sys.argv[1]
if name == "crashes": os.kill(os.getpid(), signal.SIGSEGV)
if name == "hangs":
    print('{"rate": 3}', flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(60)
if name == "is silent": sys.exit(0)
if name == "poisons":
    os.environ["POISON"] = "1"
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
assert "POISON" not in os.environ
print("something"); print('{"rate": 5}' if name == "works" else '{"wrong": "1 is 2"}')
"""


@pytest.mark.slow
def test_none_hides_another(tmp_path: Path) -> None:
    names = ("crashes", "hangs", "is silent", "poisons", "works", "is wrong")
    checks = [Check(name, 1.0 if name == "hangs" else 20.0) for name in names] + [Check("too long", 1000.0)]
    begin = time.monotonic()
    results = run_plan([sys.executable, "-c", _CHECK], 200.0, tmp_path, checks)
    assert time.monotonic() - begin < 60
    states = ["crashed", "unfinished", "crashed", "crashed", "ok", "wrong", "left out"]
    assert [result["state"] for result in results] == states
    assert results[0]["code"] == -11 and results[4]["rate"] == 5
    # What was measured before the end is kept, and the last line says why.
    assert results[1]["rate"] == 3 and "illegal memory access" in results[3]["last_line"]
    assert summary(results) == {"ok": 1, "wrong": 1, "crashed": 3, "unfinished": 1, "left_out": 1}
    assert [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()] == results


def test_all_that_is_planned_fits_into_nine_minutes() -> None:
    assert planned_seconds() <= 540
    assert [check.name for check in CHECKS] == list(TASKS)
