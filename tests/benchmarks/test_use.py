"""`scripts/bench use`: its quick parts; the wheel takes longer and is left to the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr import transcripts
from scripts.benchmarks import use


def test_formats_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert use.formats_round_trip(tmp_path)
    late = transcripts.Format("CTM a second late", lambda talk: (f"{talk.name} 1 1 1 W" for _ in talk.words), True)
    monkeypatch.setitem(transcripts.FORMATS, "ctm", late)
    assert not use.formats_round_trip(tmp_path)


def test_a_requirement_of_an_extra_is_not_one_of_the_wheel() -> None:
    assert use._required_name('numba; python_version < "3.15"') == "numba"
    assert use._required_name('av; extra == "media"') == ""


@pytest.mark.slow
def test_resuming_finds_all_recordings_done(tmp_path: Path) -> None:
    assert 0 < use.resume_seconds(tmp_path, 2000) < 10


@pytest.mark.slow
def test_an_exported_network_is_as_close_as_it_should_be(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    difference = use.onnx_difference(tmp_path, "an4")
    assert difference is not None and 0.0 < difference < 1e-4
