"""`asr transcribe --transducer`, with a small transducer in place of a loaded one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile
import torch

from asr.bundle import Bundle
from asr.cli.main import main
from asr.transducer import TransducerDecoder, TransducerRecognizer
from tests.reference.tiny_arpa import TINY
from tests.reference.toy_transducer import ToyTransducer

Run = Callable[..., tuple[int, str, str]]


def network() -> ToyTransducer:
    return ToyTransducer(["▁a", "b", "<blk>", "▁b"], dim=160, blank_bias=0.5)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    samples = torch.rand(16000, generator=torch.Generator().manual_seed(0)) - 0.5
    soundfile.write(tmp_path / "noise.wav", samples.numpy(), 16000)
    return tmp_path / "noise.wav"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("asr.cli.transducer.load_transducer", lambda name: network())

    def transcribe(*arguments: object) -> tuple[int, str, str]:
        code = main(["transcribe", "--transducer", "onnx:toy", *map(str, arguments)])
        return code, *capsys.readouterr()

    return transcribe


@pytest.fixture
def arpa(tmp_path: Path) -> Path:
    (tmp_path / "tiny.arpa").write_text(TINY)
    return tmp_path / "tiny.arpa"


def test_words_and_options_are_those_of_the_decoder(run: Run, recording: Path, arpa: Path) -> None:
    plain = TransducerRecognizer(TransducerDecoder(network()))(recording)[0].text
    assert run(recording) == (0, f"{recording}: {plain}\n", "")
    settings = {"beam_size": 3, "lm_scale": 1.5, "word_insertion_penalty": 12.0, "spelling_penalty": -9.0}
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    decoder = TransducerDecoder(network(), ngram=arpa, **settings)
    (wanted,) = TransducerRecognizer(decoder)(recording, nbest=3)
    code, printed, _ = run(recording, "--ngram", arpa, *flags, "--nbest", 3, "--jsonl")
    record = json.loads(printed)
    assert code == 0
    assert record["text"] == wanted.text != plain
    assert [each["text"] for each in record["nbest"]] == [each.text for each in wanted.hypotheses]
    assert record["scores"]["total"] == pytest.approx(wanted.total, abs=1e-3)


def test_hot_words_and_lists_of_words(run: Run, recording: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("ab\na\n")
    (tmp_path / "hot.txt").write_text("ab\n")
    (tmp_path / "own.txt").write_text("ab :0\n")
    _, plain, _ = run(recording, "--words", tmp_path / "words.txt", "--spelling-penalty", "-inf")
    assert set(plain.split()[1:]) <= {"a", "ab"}
    code, _, said = run(recording, "--hot-words", tmp_path / "hot.txt")
    assert code == 2
    assert "--hot-words has no effect here: it is for searches of words" in said
    hot = ("--hot-words", tmp_path / "hot.txt", "--hot-word-score", 100, "--token-min-log-prob", -20)
    _, printed, _ = run(recording, "--words", tmp_path / "words.txt", *hot)
    assert printed.split().count("ab") > plain.split().count("ab")
    own = ("--hot-words", tmp_path / "own.txt", "--hot-word-score", 100, "--token-min-log-prob", -20)
    assert run(recording, "--words", tmp_path / "words.txt", *own)[1].split().count("ab") < printed.split().count("ab")


def test_language_models_of_a_bundle(
    run: Run, recording: Path, tiny_bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def letters() -> ToyTransducer:
        return ToyTransducer(["<blk>", "|", *"PATOKI"], dim=160, blank_bias=0.5, seed=3)

    monkeypatch.setattr("asr.cli.transducer.load_transducer", lambda name: letters())
    bundle = Bundle.load(tiny_bundle_folder)
    assert bundle.rnn_lm is not None
    decoder = TransducerDecoder(letters(), ngram=bundle.large_ngram or bundle.small_ngram, lm=bundle, lm_weight=0.4)
    (wanted,) = TransducerRecognizer(decoder)(recording)
    _, printed, _ = run(recording, "--bundle", tiny_bundle_folder, "--rnn-weight", 0.4, "--jsonl")
    record = json.loads(printed)
    assert record["text"] == wanted.text
    assert record["scores"]["lm"] == pytest.approx(wanted.lm_score, abs=1e-3)
    assert record["scores"]["total"] == pytest.approx(wanted.total, abs=1e-3)


def test_a_run_continues_only_with_the_same_options(run: Run, recording: Path, tmp_path: Path, arpa: Path) -> None:
    output = tmp_path / "words.jsonl"
    assert run(recording, "--output", output)[0] == 0
    code, _, said = run(recording, "--output", output)
    assert code == 0
    assert "1 of 1 files are already in" in said
    for others in (["--beam-size", 2], ["--ngram", arpa], ["--nbest", 2], ["--max-segment-seconds", 5]):
        code, _, said = run(recording, "--output", output, *others)
        assert code == 2
        assert str(output) in said
    assert len(output.read_text().splitlines()) == 1
    for name in ("tiny.arpa", "of:July.arpa"):
        others, model = tmp_path / f"{name}.jsonl", tmp_path / name
        model.write_text(TINY)
        assert run(recording, "--ngram", model, "--output", others)[0] == 0
        model.write_text(TINY.replace("-0.05", "-0.06"))
        assert run(recording, "--ngram", model, "--output", others)[0] == 2
    (record,) = map(json.loads, output.read_text().splitlines())
    assert record["made_by"].startswith("onnx:toy ")


def test_words_in_another_letter_case(run: Run, recording: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("AB\nA\n")
    code, printed, _ = run(recording, "--words", tmp_path / "words.txt", "--spelling-penalty", "-inf")
    assert code == 0
    assert "a" in printed.split()[1:]
    code, _, said = run(recording, "--words", tmp_path / "words.txt", "--no-plain-words")
    assert code == 2
    assert "convert words and language models to that case, or set --plain-words" in said


def test_large_files_are_read_for_checksums_only_if_a_run_may_continue(
    run: Run, recording: Path, tmp_path: Path, arpa: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr("asr.cli.transducer.fingerprint_of", lambda path: read.append(path) or "")
    assert run(recording, "--ngram", arpa)[0] == 0
    assert not read
    assert run(recording, "--ngram", arpa, "--output", tmp_path / "words.jsonl")[0] == 0
    assert arpa in read


def test_a_file_that_cannot_be_read_does_not_stop_the_others(run: Run, recording: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.wav").write_bytes(b"nothing")
    code, printed, said = run(tmp_path / "bad.wav", recording)
    assert code == 1
    assert printed.startswith(f"{recording}: ")
    assert "bad.wav" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "rnn"], "--mode has no effect with --transducer"),
        (["--large-ngram", "x"], "--large-ngram has no effect with --transducer"),
        (["--output-beam", "3"], "--output-beam has no effect with --transducer"),
        (["--acoustic-model", "onnx:x"], "--acoustic-model has no effect with --transducer"),
        (["--stream"], "--stream and --transducer exclude each other"),
        (["--lattices", "x"], "--lattices and --transducer exclude each other"),
        (["--adapt"], "--adapt and --transducer exclude each other"),
        (["--lm-scale", "1"], "--lm-scale has no effect here: there is no language model"),
        (["--beam-size", "0"], "--beam-size is 0"),
        (["--spelling-penalty", "-1"], "--spelling-penalty has no effect here"),
        (["--no-plain-words"], "--plain-words has no effect here"),
        (["--rnn-weight", "0.5"], "--rnn-weight needs an n-gram and a recurrent model"),
        (["--hot-word-score", "2"], "--hot-word-score has no effect without --hot-words"),
        (["--ngram", "missing.arpa"], "missing.arpa"),
    ],
)
def test_options_are_refused(run: Run, recording: Path, options: list[str], message: str) -> None:
    code, printed, said = run(recording, *options)
    assert code == 2
    assert printed == ""
    assert message in said
    assert len(said.splitlines()) == 1


def test_options_of_transducers_need_one(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", str(recording), "--beam-size", "4"]) == 2
    assert "--beam-size has no effect without --transducer" in capsys.readouterr().err
    assert main(["transcribe", str(recording), "--transducer", "toy"]) == 2
    assert "a transducer is named KIND:NAME" in capsys.readouterr().err


def test_outputs_do_not_overwrite_inputs(run: Run, recording: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a\n")
    code, _, said = run(recording, "--words", tmp_path / "words.txt", "--output", tmp_path / "words.txt")
    assert code == 2
    assert "words.txt: this is an input of the same command" in said
    assert (tmp_path / "words.txt").read_text() == "a\n"
