"""A process that recognizes keeps what oneDNN compiles for a few shapes only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# The first shape comes again behind 99 others, and says whether it is compiled anew.
SHAPES = """
import torch
from asr.recognizer import Recognizer
Recognizer.from_folder("checkpoints/an4")
convolution = torch.nn.Conv1d(16, 16, 3)
for num_frames in [*range(2000, 2100), 2000]:
    convolution(torch.zeros(1, 16, num_frames))
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize(("capacity", "expected"), [(None, "cache_miss"), ("1000", "cache_hit")])
def test_compiled_shapes_are_few_unless_the_environment_wants_more(capacity: str | None, expected: str) -> None:
    environment = {**os.environ, "ONEDNN_VERBOSE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY", None)
    if capacity is not None:
        environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = capacity
    ran = subprocess.run(
        [sys.executable, "-c", SHAPES], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    created = [line for line in ran.stdout.splitlines() if "create:" in line and ",convolution," in line]
    assert len(created) == 101 and expected in created[-1], created[-1:]
