"""The checks of `scripts/gpu_check` with nothing but torch, Triton, NumPy and the standard library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from scripts.benchmarks.gpu import CHECKS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "scripts" / "benchmarks" / "stand_ins"
# NumPy, Triton, torch, and what torch itself imports.
PACKAGES = (
    "torch torchgen functorch triton numpy numpy.libs typing_extensions.py sympy mpmath filelock networkx jinja2 "
    "markupsafe fsspec setuptools"
).split()
# They import nothing that others do not, and take longest.
LEFT_OUT = {
    "kernels",
    "recognition",
    "compile",
    "workers",
    "speed_default",
    "speed_one_pass",
    "speed_gru_512",
    "profile",
}
# Everything runs on the CPU, with little to do.
PROGRAM = """
import contextlib, io, json, sys
from unittest import mock
import torch
from scripts.benchmarks import gpu_tasks
from scripts.benchmarks.gpu_expected import clips
from scripts.benchmarks.inputs import AN4_BUNDLE
bench = gpu_tasks.Bench(torch.device("cpu"), AN4_BUNDLE, [clips()[0][:16000]], True)
found = {}
cuda = {"synchronize": lambda: None, "get_device_name": lambda _: "none"}
with mock.patch.multiple(torch.cuda, **cuda), contextlib.redirect_stdout(io.StringIO()):
    for name in sys.argv[1:]:
        found[name] = gpu_tasks.TASKS[name](bench)
print(json.dumps(found))
"""


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python that has these packages and no others."""
    installed = Path(sysconfig.get_path("purelib"))
    if not (installed / "torch").is_dir():
        pytest.skip("torch is not in this environment's own folder")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    (target,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    for name in PACKAGES:
        if (installed / name).exists():
            (target / name).symlink_to(installed / name)
    return tmp_path / "bare" / "bin" / "python"


@pytest.mark.skipif(torch.__version__ < "2", reason="a GPU's machine of today has torch 2")
def test_all_checks_do_without_other_packages(bare_python: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{STAND_INS}", "OMP_NUM_THREADS": "1"}
    names = [check.name for check in CHECKS if check.name not in LEFT_OUT]
    done = subprocess.run(
        [str(bare_python), "-c", PROGRAM, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not [name for name, one in found.items() if "wrong" in one]
    assert "not_here" in found["k2"]
    assert found["queries"] and found["speed_large_ngram"]["times_real_time_new_1"] > 0
