from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_bundle import tones

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[1]


def test_torch_hub_loads_a_recognizer_from_the_checkout(tiny_bundle_folder):
    recognizer = torch.hub.load(
        str(CHECKOUT),
        "recognizer",
        source="local",
        bundle=str(tiny_bundle_folder),
        mode="ngram",
        decoder="token-passing",
    )
    assert isinstance(recognizer, torch.nn.Module)
    assert recognizer(tones(["PAT", "TWO"]), sampling_rate=16000)[0].text == "PAT TWO"
