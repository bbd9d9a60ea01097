"""`scripts/gpu_check --simulate`: every check's body on the simulated device, and the command with a small budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="GPUs run Triton's kernels")
pytest.importorskip("kaldifst", reason="compiling the graph needs kaldifst")

from scripts.benchmarks import gpu_tasks
from scripts.benchmarks.gpu import CHECKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_a_check_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_tasks.main(["--simulate", name]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found and "wrong" not in found
    if name.startswith("speed"):
        assert found["times_real_time_new_1"] >= 0 and found["times_real_time_again_1"] >= 0
    if name == "profile":
        assert {"features", "acoustic model", "search"} <= set(found["stages"])
        assert len(found["host_functions"]) == 30 and all(one["n"] > 0 for one in found["host_functions"].values())
    if name == "placements":
        moved = {row["search, hidden, output"]: row["MB moved"] for row in found["placements"]}
        assert moved["cpu, cuda, cpu"] > 0 and moved["cuda, cpu, cuda"] > 0 and moved["cuda, cuda, cuda"] == 0


def test_the_command_ends_in_time_and_tells_what_it_left_out(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "gpu_check"), "--simulate", "--budget-s", "80", "--out", str(tmp_path)]
    begin = time.monotonic()
    done = subprocess.run(
        command, env={**os.environ, "ASR_PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    # Starting takes its time, too.
    assert time.monotonic() - begin < 140
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text("utf-8").splitlines()]
    assert [result["check"] for result in results] == [check.name for check in CHECKS]
    states = {result["check"]: result["state"] for result in results}
    assert (states["environment"], states["kernels"], states["recognition"]) == ("ok", "left out", "left out")
    assert results[0]["device"] == "simulated"
    assert json.loads(done.stdout.splitlines()[-1])["left_out"] == [*states.values()].count("left out")
