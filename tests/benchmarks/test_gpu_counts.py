"""Launches and waits of a GPU's host per frame, per call and per recording: these counts may fall, but not rise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="GPUs run Triton's kernels")
os.environ.setdefault("TRITON_INTERPRET", "1")

from asr.bundle import Bundle
from scripts.benchmarks.gpu_counts import counts_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes"),
]
# What was counted, with a little room for other versions of torch.
MOST = {
    "ngram": {
        "waits_per_frame": 1 / 32,
        "waits_per_call": 8,
        "waits_per_utterance": 0,
        "launches_per_frame": 4,
        "launches_per_call": 350,
        "launches_per_utterance": 2,
    },
    "ngram_lattice": {
        "waits_per_frame": 1 / 32,
        "waits_per_call": 16,
        "waits_per_utterance": 0,
        "launches_per_frame": 4,
        "launches_per_call": 600,
        "launches_per_utterance": 5,
    },
    "one_pass": {"waits_per_frame": 0.6, "launches_per_frame": 25},
    "default": {"waits_per_frame": 1, "launches_per_frame": 20},
}


@pytest.mark.parametrize("name", MOST)
def test_launches_and_waits_do_not_rise(name: str, tiny_bundle_folder: Path) -> None:
    counts = counts_of(Bundle.load(tiny_bundle_folder), name)
    assert counts.keys() == MOST[name].keys()
    over = {kind: (count, MOST[name][kind]) for kind, count in counts.items() if count > MOST[name][kind]}
    assert not over
