"""The bundles that the repository carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr.bundle import FILE_NAME, Bundle
from asr.decoding.build import recognition_settings

pytestmark = pytest.mark.slow

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
BUNDLES = sorted(path.parent for path in CHECKPOINTS.glob(f"*/{FILE_NAME}"))


@pytest.mark.parametrize("folder", BUNDLES, ids=lambda folder: folder.name)
def test_every_bundle_is_whole_and_has_a_card(folder):
    bundle = Bundle.load(folder)
    assert bundle.name == folder.name
    assert "word error rate" in " ".join(bundle.card.lower().split())


def test_a_bundle_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Bundle.load("an4").name == "an4"


def test_all_of_them_together_are_small_enough_for_torch_hub():
    assert sum(path.stat().st_size for path in CHECKPOINTS.rglob("*") if path.is_file()) < 120e6


def test_the_pages_name_the_options_of_the_librispeech_bundle():
    options = recognition_settings(Bundle.load(CHECKPOINTS / "librispeech"), "rnn", {}).decoding
    root = CHECKPOINTS.parent
    page = " ".join((root / "docs" / "benchmarks" / "onepass.md").read_text(encoding="utf-8").split())
    assert f"every {options.chunk_frames} frames the network prunes" in page
    assert f"the search is {options.lookahead_frames} frames ahead" in page
    beams = (
        f"{options.search_beam} / {options.max_active_states:,} / {options.output_beam:g} / {options.context_beam:g}"
    )
    assert f"The bundle's beams are {beams} with the GRU" in page
    assert f"by more than the bundle's skip beam, {options.skip_beam:g}," in page
    architecture = " ".join((root / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    assert f"cuts the frames into chunks of {options.chunk_frames};" in architecture
