"""The benchmark of accuracy: its measure of confidences, and the whole of it on tones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asr.metrics import normalized_cross_entropy
from scripts.benchmarks.__main__ import main
from scripts.benchmarks.accuracy import errors
from scripts.benchmarks.speech import Recording
from tests.benchmarks.test_speech import corpus


def test_confidences_that_say_the_share_are_worth_nothing_and_sure_ones_everything() -> None:
    right, wrong = (True, 0.75), (False, 0.75)
    assert normalized_cross_entropy([right, right, right, wrong]) == pytest.approx(0.0, abs=1e-3)
    assert normalized_cross_entropy([(True, 1.0), (False, 0.0)]) == pytest.approx(1.0, abs=1e-3)
    assert normalized_cross_entropy([(True, 0.1), (False, 0.9)]) < -1  # type: ignore[operator]
    # Two bits in all; 0.9 costs 0.152, 0.8 against a wrong word 2.322.
    assert normalized_cross_entropy([(True, 0.9), (False, 0.8)]) == pytest.approx((2 - 2.474) / 2, abs=1e-3)
    assert normalized_cross_entropy([right]) is None and normalized_cross_entropy([(True, None), wrong]) is None


def test_words_are_marked_along_the_alignment() -> None:
    speech = [Recording(Path("one"), ("A", "B", "C"))]
    rate, marked = errors("x", speech, [[("A", 0.9), ("X", 0.4), ("B", 0.8)]])
    assert rate == pytest.approx(66.67)
    assert [is_right for is_right, _ in marked].count(True) == 2 and marked[0] == (True, 0.9)


@pytest.mark.one_stack
@pytest.mark.slow
@pytest.mark.parametrize("is_quick", [True, False])
def test_all_figures_come_in_one_line(
    tmp_path: Path, tiny_bundle_folder: Path, capsys: pytest.CaptureFixture[str], is_quick: bool
) -> None:
    corpus(tmp_path)
    arguments = ["--bundle", str(tiny_bundle_folder), "--corpora", str(tmp_path), "--every", "1"]
    assert main(["accuracy", *["--quick"] * is_quick, *arguments]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_utterances"] == 4 and report["num_words"] == 10 and report["speech"] == "dev-clean-2"
    assert report["wer_ngram"] < 50 and report["wer_default"] < 50
    fields = {
        "wer_stream",
        "wer_pauses",
        "wer_20db_softer",
        "wer_8k",
        "wer_noise10db",
        "wer_babble10db",
        "wer_room_1m",
        "wer_room_2m",
        "words_from_noise_per_minute",
        "nce",
        "rtf_default",
    }
    assert fields <= set(report)
    assert ({"wer_long", "wer_long_stream"} <= set(report)) != is_quick
