"""The bundles that the repository carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr.bundle import FILE_NAME, Bundle

pytestmark = pytest.mark.slow

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
BUNDLES = sorted(path.parent for path in CHECKPOINTS.glob(f"*/{FILE_NAME}"))


@pytest.mark.parametrize("folder", BUNDLES, ids=lambda folder: folder.name)
def test_every_bundle_is_whole_and_has_a_card(folder):
    bundle = Bundle.load(folder)
    assert bundle.name == folder.name
    assert "word error rate" in " ".join(bundle.card.lower().split())


def test_all_of_them_together_are_small_enough_for_torch_hub():
    assert sum(path.stat().st_size for path in CHECKPOINTS.rglob("*") if path.is_file()) < 120e6
