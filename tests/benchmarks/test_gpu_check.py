"""scripts/gpu_check runs from end to end, here on a CPU with next to nothing to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_it_runs(tiny_bundle_folder: Path) -> None:
    command = [sys.executable, "-m", "scripts.benchmarks", "gpu", "--device", "cpu", "--small"]
    done = subprocess.run(
        [*command, "--bundle", str(tiny_bundle_folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == 0
    assert summary["checks"] - summary["not_for_this_device"] >= 8
    assert summary["checks"] >= 12
    assert summary["queries_per_s_3_streams"] > 0
    assert summary["training_words_per_s_500"] > 0
