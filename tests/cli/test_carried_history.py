"""`--carry-history` of the commands: which recordings follow one another."""

from __future__ import annotations

import json

import pytest
import soundfile
import torch

from asr.bundle import Bundle
from asr.cli.main import main
from asr.decoding.settings import ResourceOptions
from asr.recognizer import Recognizer
from asr.testing.tones import RATE, TEXT, tones

WAVEFORMS = [tones(text.split(), seed=index) for index, text in enumerate(TEXT[:6])]


@pytest.fixture(scope="module")
def recognizer(tiny_bundle_folder):
    return Recognizer(Bundle.load(tiny_bundle_folder), "rnn", options={"carry_history": True})


@pytest.fixture
def parts(tmp_path):
    """A manifest of a recording with two cuts, of a chapter in the names of LibriSpeech at two speeds, and of one more
    recording; none of them in order."""
    lhotse = pytest.importorskip("lhotse")
    files = {"r": WAVEFORMS[:2], "1-2-0001": WAVEFORMS[2:3], "1-2-0000": WAVEFORMS[3:4], "1-2-0001_sp2": WAVEFORMS[4:5]}
    made = []
    for name, waveforms in {**files, "s": WAVEFORMS[5:]}.items():
        path = tmp_path / f"{name}.wav"
        soundfile.write(path, torch.cat(waveforms).numpy(), RATE, subtype="FLOAT")
        recording = lhotse.Recording.from_file(path, recording_id=name)
        begin = 0.0
        for number, waveform in enumerate(waveforms):
            seconds = len(waveform) / RATE
            cut_id = f"{name}{number or ''}"
            text = TEXT[[one is waveform for one in WAVEFORMS].index(True)]
            supervision = lhotse.SupervisionSegment(cut_id, name, 0, seconds, text=text)
            made.append(lhotse.MonoCut(cut_id, begin, seconds, 0, [supervision], recording=recording))
            begin += seconds
    lhotse.CutSet.from_cuts(reversed(made)).to_file(tmp_path / "cuts.jsonl.gz")
    return tmp_path / "cuts.jsonl.gz"


@pytest.mark.slow
def test_cuts_of_a_recording_and_utterances_of_a_chapter_follow_one_another(
    tmp_path, parts, evaluate, tiny_bundle_folder, recognizer
):
    output = tmp_path / "words.jsonl"
    arguments = ("--cuts", parts, "--bundle", tiny_bundle_folder, "--mode", "rnn", "--carry-history")
    assert evaluate(*arguments, "--output", output, "--json")[0] == 0
    found = {record["id"]: record for record in map(json.loads, output.read_text().splitlines())}
    order = {"r": 0, "r1": 1, "1-2-0000": 3, "1-2-0001": 2, "1-2-0001_sp2": 4, "s": 5}
    expected = recognizer([WAVEFORMS[i] for i in order.values()], sessions=["r", "r", "c", "c", "d", "s"])
    plain = recognizer([WAVEFORMS[i] for i in order.values()])
    for name, own, alone in zip(order, expected, plain, strict=True):
        assert found[name]["text"] == own.text
        assert found[name]["scores"]["lm"] == pytest.approx(own.lm_score, abs=1e-3)
        assert (own.lm_score == pytest.approx(alone.lm_score, abs=1e-4)) == (name not in ("r1", "1-2-0001"))
    code, _, errors = evaluate(*arguments, "--output", output, "--resume")
    assert code == 2 and "--resume and --carry-history exclude each other" in errors


@pytest.mark.slow
def test_utterances_that_asr_prepare_found_in_one_file_follow_one_another(
    tmp_path, evaluate, tiny_bundle_folder, recognizer
):
    soundfile.write(tmp_path / "r.wav", torch.cat(WAVEFORMS[:2]).numpy(), RATE, subtype="FLOAT")
    middle, end = (sum(map(len, WAVEFORMS[:count])) / RATE for count in (1, 2))
    lines = {
        "wav.scp": [f"r {tmp_path / 'r.wav'}"],
        # The first in the list is the last in the file.
        "segments": [f"a-later r {middle} {end}", f"b-first r 0 {middle}"],
        "text": [f"a-later {TEXT[1]}", f"b-first {TEXT[0]}"],
    }
    (tmp_path / "train").mkdir()
    for name, content in lines.items():
        (tmp_path / "train" / name).write_text("".join(f"{line}\n" for line in content))
    assert main(["prepare", "kaldi", "--corpus", str(tmp_path / "train"), "--output", str(tmp_path)]) == 0
    output = tmp_path / "words.jsonl"
    arguments = ("--cuts", tmp_path / "kaldi_train.jsonl.gz", "--bundle", tiny_bundle_folder, "--mode", "rnn")
    assert evaluate(*arguments, "--carry-history", "--output", output)[0] == 0
    found = {record["id"]: record["scores"]["lm"] for record in map(json.loads, output.read_text().splitlines())}
    first, later = recognizer(WAVEFORMS[:2], sessions=["r", "r"])
    assert found == pytest.approx({"b-first": first.lm_score, "a-later": later.lm_score}, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--cache-mb", "0.05")])
def test_each_file_is_a_recording_of_its_own(tmp_path, capsys, tiny_bundle_folder, recognizer, options):
    names = [tmp_path / f"{name}.wav" for name in "ab"]
    recordings = [torch.cat(WAVEFORMS[:3]), torch.cat(WAVEFORMS[3:])]
    for name, waveform in zip(names, recordings, strict=True):
        soundfile.write(name, waveform.numpy(), RATE, subtype="FLOAT")
    short = Recognizer(
        recognizer.bundle, "rnn", options={"carry_history": True}, resources=ResourceOptions(max_segment_seconds=1.0)
    )
    expected = [short(waveform)[0] for waveform in recordings]
    command = ["transcribe", *map(str, names), "--bundle", str(tiny_bundle_folder), "--mode", "rnn", "--jsonl"]
    assert main([*command, "--carry-history", "--max-segment-seconds", "1", *options]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for record, own in zip(found, expected, strict=True):
        assert (record["text"], record["scores"]["lm"]) == (own.text, pytest.approx(own.lm_score, abs=1e-2))
