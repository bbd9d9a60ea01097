"""The bundles that the repository carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr.bundle import FILE_NAME, Bundle
from asr.cli.main import main
from asr.cli.options import local_rnn_lm
from asr.decoding.build import recognition_settings

pytestmark = [pytest.mark.slow, pytest.mark.one_stack]

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
ARPA = """\\data\\
ngram 1=3

\\1-grams:
-0.6 </s>
-99 <s>
-0.3 SIX

\\end\\
"""
BUNDLES = sorted(path.parent for path in CHECKPOINTS.glob(f"*/{FILE_NAME}"))


@pytest.mark.parametrize("folder", BUNDLES, ids=lambda folder: folder.name)
def test_every_bundle_is_whole_and_has_a_card(folder):
    bundle = Bundle.load(folder)
    assert bundle.name == folder.name
    assert "word error rate" in " ".join(bundle.card.lower().split())


def test_a_bundle_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Bundle.load("an4").name == "an4"


def test_every_option_that_takes_a_bundle_takes_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    an4 = CHECKPOINTS / "an4"
    Path("text").write_text("ENTER SIX\n")
    Path("list.jsonl").write_text('{"id": "u", "nbest": [{"text": "ENTER SIX", "score": -1}]}\n')
    Path("2gram.arpa").write_text(ARPA)
    Path("lexicon").write_text("SIX S IH K S\n")
    parts = f"--graph {an4 / 'graph.safetensors'} --small-ngram {an4 / 'small_ngram.bin'}"
    river = CHECKPOINTS.parent / "scripts" / "demo_clips" / "river.flac"
    for command in (
        f"bundle mine --acoustic-model an4 {parts} --rnn-lm an4",
        "graph --tokens an4 --lexicon lexicon --arpa 2gram.arpa --output graph.safetensors",
        "lm rnn measure an4 --text text",
        "rescore list.jsonl --rnn-lm an4",
        f"transcribe {river} --bundle an4 --rnn-lm an4 --mode rnn",
    ):
        assert main(command.split()) == 0, capsys.readouterr().err
    assert local_rnn_lm("an4") == an4  # no output may overwrite its files


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
