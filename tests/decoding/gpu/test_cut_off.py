"""The cut-off of all streams by all programs gives what sorting each stream's scores gives, for all block sizes."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
os.environ.setdefault("TRITON_INTERPRET", "1")

from scripts.benchmarks.kernel_checks import check_cut_off


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [pytest.param(2, marks=pytest.mark.slow), 8, pytest.param(64, marks=pytest.mark.slow), 512]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_thresholds_are_those_of_sorted_scores(seed: int, block: int) -> None:
    check_cut_off(seed, block)
