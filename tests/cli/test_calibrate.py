"""`asr calibrate`: fits on a manifest, and writes only what it has fitted."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import soundfile

from asr.bundle import Bundle, read_manifest, write_manifest
from asr.cli import calibrate
from asr.cli.main import main, run
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.testing.tones import RATE, TEXT, tones

lhotse = pytest.importorskip("lhotse")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 sentences of two speakers; every third transcript has one word that was not said."""
    folder = tmp_path_factory.mktemp("speech")
    chooser, lines = random.Random(1), []
    for number in range(120):
        words = chooser.choice(TEXT).split()
        path = folder / f"{number}.wav"
        soundfile.write(path, tones(words, seed=number).numpy(), RATE)
        if number % 3 == 0:
            words[0] = "SKIP" if words[0] != "SKIP" else "KIT"
        recording = lhotse.Recording.from_file(path)
        cut = recording.to_cut()
        cut.supervisions = [
            lhotse.SupervisionSegment(
                str(number), recording.id, 0.0, cut.duration, 0, " ".join(words), speaker=f"s{number % 2}"
            )
        ]
        lines.append(json.dumps(cut.to_dict()))
    (folder / "cuts.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "cuts.jsonl"


@pytest.mark.slow
def test_confidences_become_the_share_of_right_words(
    manifest: Path, tiny_bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_bundle_folder, folder)
    command = ["calibrate", str(tiny_bundle_folder), "--cuts", str(manifest), "--into", str(folder), "--modes", "rnn"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0.8 < report["rnn"]["right"] < 0.9 and abs(report["rnn"]["nce_of_other_speakers"]) < 0.2
    assert "confidence" not in json.loads((tiny_bundle_folder / "bundle.json").read_text())
    recognizer = Recognizer(Bundle.load(folder), mode="rnn")
    results = recognizer(sorted(manifest.parent.glob("*.wav")))
    told = [word.confidence for result in results for word in result.words if word.confidence is not None]
    assert len(told) == report["rnn"]["words"]
    # The fit's bias is free, so that both are equal on the speech itself.
    assert sum(told) / len(told) == pytest.approx(report["rnn"]["right"], abs=0.005)
    # A mode that was not fitted has the calibration of one that was.
    assert Recognizer(Bundle.load(folder), mode="ngram").calibration.as_dict() == recognizer.calibration.as_dict()


@pytest.mark.slow
def test_transcripts_with_case_and_punctuation_are_compared_without_them(
    manifest: Path, tiny_bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_bundle_folder, folder)
    records = list(map(json.loads, manifest.read_text().splitlines()))
    for record in records:
        (supervision,) = record["supervisions"]
        supervision["text"] = f"{supervision['text'].capitalize().replace(' ', '-', 1)}."
    (tmp_path / "cuts.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    reports = []
    for cuts, *options in (
        [manifest],
        [tmp_path / "cuts.jsonl", "--ignore-case", "--ignore-punctuation"],
        [manifest, "--ignore-case", "--ignore-punctuation"],
    ):
        assert main(["calibrate", str(folder), "--cuts", str(cuts), "--modes", "ngram", *options]) == 0
        said = capsys.readouterr()
        reports.append(json.loads(said.out))
        assert "--ignore" not in said.err
    assert reports[1] == reports[2] == reports[0]
    before = (folder / "bundle.json").read_bytes()
    assert main(["calibrate", str(folder), "--cuts", str(tmp_path / "cuts.jsonl"), "--modes", "ngram"]) == 2
    said = capsys.readouterr().err
    assert "words are in the bundle's vocabulary" in said and "give --ignore-case and --ignore-punctuation" in said
    assert f"asr: error: {tmp_path / 'cuts.jsonl'}: in the mode ngram, calibration: 0 of" in said
    assert (folder / "bundle.json").read_bytes() == before


def test_a_word_is_right_if_all_of_its_parts_are() -> None:
    words, reference = ["WELL-KNOWN", "WORLD-WIDE", "-", "WEB"], "well known word wide".split()
    assert calibrate._are_right([*map(str.upper, reference)], words, (True, True)).tolist() == [
        True,
        False,
        True,
        False,
    ]
    assert calibrate._are_right(["WEB"], ["WEB", "WEB"], (False, False)).sum() == 1


@pytest.mark.slow
def test_speakers_who_are_not_there_are_refused(manifest: Path, tiny_bundle_folder: Path, tmp_path: Path) -> None:
    command = ["calibrate", str(tiny_bundle_folder), "--cuts"]
    with pytest.raises(AsrError, match="no utterances of the speakers nobody"):
        run([*command, str(manifest), "--speakers", "nobody"])
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(AsrError, match=r"empty\.jsonl: there are no utterances\."):
        run([*command, str(tmp_path / "empty.jsonl")])


@pytest.mark.slow
def test_a_mode_that_the_bundle_lacks_is_refused_before_anything_is_recognized(
    manifest: Path, tiny_bundle_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["calibrate", str(tiny_bundle_folder), "--cuts", str(manifest), "--modes", "ngram"]
    for other in ("none", "rnnn"):
        assert main([*command, other]) == 2
        said = capsys.readouterr().err
        assert said.startswith("asr: error: ") and len(said.splitlines()) == 1


@pytest.mark.slow
def test_modes_that_are_done_stay_after_an_interruption(
    manifest: Path,
    tiny_bundle_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_bundle_folder, folder)

    def interrupted(bundle: Bundle, mode: str, **arguments: Any) -> Recognizer:
        if mode == "rnn":
            raise KeyboardInterrupt
        return Recognizer(bundle, mode, **arguments)

    monkeypatch.setattr(calibrate, "Recognizer", interrupted)
    assert main(["calibrate", str(folder), "--cuts", str(manifest), "--modes", "ngram", "rnn", "interpolated"]) == 130
    said = capsys.readouterr()
    assert set(read_manifest(folder)["confidence"]) == set(json.loads(said.out)) == {"ngram"}
    assert "the calibrations of ngram are written; to continue, give --modes rnn interpolated." in said.err


@pytest.mark.slow
def test_what_another_process_calibrates_meanwhile_stays(
    manifest: Path, tiny_bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_bundle_folder, folder)
    fit = calibrate.fit_calibration

    def fit_while_another_writes(*arguments: Any) -> Any:
        fitted = fit(*arguments)
        content = read_manifest(folder)
        content.setdefault("confidence", {})["rnn"] = fitted.as_dict()
        write_manifest(folder, content)
        return fitted

    monkeypatch.setattr(calibrate, "fit_calibration", fit_while_another_writes)
    assert main(["calibrate", str(folder), "--cuts", str(manifest), "--modes", "ngram"]) == 0
    assert set(read_manifest(folder)["confidence"]) == {"ngram", "rnn"}
