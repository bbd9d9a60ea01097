"""What a run on a GPU is compared with is what this code finds in this bundle."""

from __future__ import annotations

import pytest
import torch

from scripts.benchmarks.gpu_expected import load_expected, recognized
from scripts.benchmarks.inputs import AN4_BUNDLE


@pytest.mark.slow
def test_expectations_are_those_of_the_bundle() -> None:
    expected = load_expected(AN4_BUNDLE)
    assert expected is not None, "the AN4 bundle has changed: run python -m scripts.benchmarks.gpu_expected"
    found = recognized(AN4_BUNDLE, "ngram, torch", expected.waveforms, torch.device("cpu"))
    assert [text for text, _ in found] == [text for text, _ in expected.results["ngram, torch"]]
    totals = [total for _, total in expected.results["ngram, torch"]]
    assert [total for _, total in found] == pytest.approx(totals, abs=0.05)
