"""`scripts/bench use`: its quick parts; the wheel takes longer and is left to the benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asr import transcripts
from scripts.benchmarks import use
from scripts.benchmarks.inputs import ROOT

SCLITE = """
from asr.metrics import alignment_errors
from asr.nist import align, read_trn
references, hypotheses = read_trn("ref.trn"), read_trn("hyp.trn")
for number, name in enumerate(references):
    counts = alignment_errors(align(references[name], hypotheses[name]))
    right = counts.num_ref - counts.num_substitutions - counts.num_deletions
    deleted = counts.num_deletions + (number == 0)
    print(f"id: ({name})")
    print(f"Scores: (#C #S #D #I) {right} {counts.num_substitutions} {deleted} {counts.num_insertions}")
"""


def test_formats_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert use.formats_round_trip(tmp_path)
    late = transcripts.Format("CTM a second late", lambda talk: (f"{talk.name} 1 1 1 W" for _ in talk.words), True)
    monkeypatch.setitem(transcripts.FORMATS, "ctm", late)
    assert not use.formats_round_trip(tmp_path)


def test_a_requirement_of_an_extra_is_not_one_of_the_wheel() -> None:
    assert use._required_name('numba; python_version < "3.15"') == "numba"
    assert use._required_name('av; extra == "media"') == ""


@pytest.mark.slow
def test_other_counts_than_sclites_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its place a program that counts one deletion too many in the first sentence."""
    program = tmp_path / "sclite"
    program.write_text(f"#!{sys.executable}\n{SCLITE}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert use.sclite_difference(tmp_path) == 1


@pytest.mark.slow
def test_resuming_finds_all_recordings_done(tmp_path: Path) -> None:
    assert 0 < use.resume_seconds(tmp_path, 2000) < 10


@pytest.mark.slow
def test_an_exported_network_is_as_close_as_it_should_be(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    difference = use.onnx_difference(tmp_path, "an4")
    assert difference is not None and 0.0 < difference < 1e-4
