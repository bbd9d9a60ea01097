"""`--transducer` of `asr transcribe` and `asr evaluate`, with a small transducer in place of a loaded one."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile
import torch

from asr.attention import AttentionDecoder, AttentionRecognizer
from asr.bundle import Bundle
from asr.cli.main import main
from asr.ctc.streams import ExternalStreams
from asr.streaming import StreamingOptions
from asr.transducer import TransducerDecoder, TransducerRecognizer
from tests.reference.tiny_arpa import TINY
from tests.reference.toy_attention import ToyAttention
from tests.reference.toy_transducer import StreamingToy, ToyTransducer

Run = Callable[..., tuple[int, str, str]]


def network() -> ToyTransducer:
    return ToyTransducer(["▁a", "b", "<blk>", "▁b"], dim=160, blank_bias=0.5)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    samples = torch.rand(16000, generator=torch.Generator().manual_seed(0)) - 0.5
    samples *= torch.linspace(0.5, 1.0, 16000)  # steady noise is silence to attention models
    soundfile.write(tmp_path / "noise.wav", samples.numpy(), 16000)
    return tmp_path / "noise.wav"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("asr.cli.external.load_transducer", lambda name: network())

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


def test_segments_that_are_too_short_are_named_by_their_option(run: Run, recording: Path) -> None:
    code, _, said = run(recording, "--max-segment-seconds", 0.5)
    assert code == 2 and "--max-segment-seconds is 0.5; give 1 second or more" in said


def test_hot_words_and_lists_of_words(run: Run, recording: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("ab\na\n")
    (tmp_path / "hot.txt").write_text("ab\n")
    (tmp_path / "own.txt").write_text("ab :0\n")
    _, plain, _ = run(recording, "--words", tmp_path / "words.txt", "--spelling-penalty", "-inf")
    assert set(plain.split()[1:]) <= {"a", "ab"}
    alone = ("--hot-words", tmp_path / "hot.txt", "--hot-word-score", 100, "--token-min-log-prob", -20)
    code, found, _ = run(recording, *alone)
    assert code == 0
    assert found.split().count("ab") > run(recording)[1].split().count("ab")
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

    monkeypatch.setattr("asr.cli.external.load_transducer", lambda name: letters())
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
    monkeypatch.setattr("asr.cli.external.fingerprint_of", lambda path: read.append(path) or "")
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
        (["--stream"], "toy: its encoder keeps no states and reads whole utterances; it cannot stream"),
        (["--stream", "--left-seconds", "1"], "--left-seconds has no effect with --transducer"),
        (["--stream", "--chunk-seconds", "1"], "--chunk-seconds has no effect with --transducer"),
        (["--stream", "--batch-seconds", "9"], "--batch-seconds has no effect with --stream"),
        (["--stream", "--mode", "rnn"], "--mode has no effect with --transducer"),
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
    assert "--beam-size has no effect without --transducer or --attention-model" in capsys.readouterr().err
    assert main(["transcribe", str(recording), "--transducer", "toy"]) == 2
    assert "a transducer is named KIND:NAME" in capsys.readouterr().err


def test_outputs_do_not_overwrite_inputs(run: Run, recording: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a\n")
    code, _, said = run(recording, "--words", tmp_path / "words.txt", "--output", tmp_path / "words.txt")
    assert code == 2
    assert "words.txt: this is an input of the same command" in said
    assert (tmp_path / "words.txt").read_text() == "a\n"


def streaming() -> StreamingToy:
    return StreamingToy(["▁a", "b", "<blk>", "▁b"], dim=160, blank_bias=0.5, seed=7)


def test_streams(run: Run, recording: Path, tmp_path: Path, arpa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr.cli.external.load_transducer", lambda name: streaming())
    decoder = TransducerDecoder(streaming(), ngram=arpa, spelling_penalty=-9.0)
    streams = ExternalStreams(decoder.network, decoder, StreamingOptions(longest_utterance=0.5))
    streams.push(streams.open(), torch.from_numpy(soundfile.read(recording, dtype="float32")[0]))
    streams.close(0)
    wanted = [result for result in streams.step() if result.is_final]
    assert len(wanted) > 1 and all(result.words for result in wanted[:-1])
    command = [recording, "--stream", "--ngram", arpa, "--spelling-penalty", -9, "--longest-utterance", 0.5]
    code, printed, said = run(*command, "--statistics")
    assert code == 0
    assert printed.splitlines() == [
        f"{recording} {each.begin:.2f}-{each.end:.2f}: {each.text}" for each in wanted if each.words
    ]
    assert said.startswith("toy: acoustic model ")
    output = tmp_path / "words.jsonl"
    assert run(*command, "--output", output)[0] == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["text"] for line in lines if line["type"] == "final"] == [each.text for each in wanted]
    assert any(line["type"] == "partial" for line in lines)
    has_confidences = {line["type"]: all("confidence" in word for word in line["words"]) for line in lines}
    assert has_confidences == {"partial": False, "final": True}
    assert {line["made_by"].partition(" ")[0] for line in lines} == {"onnx:toy"}
    for others in (["--longest-utterance", 0.6], ["--beam-size", 2], ["--partials", "best"]):
        code, _, said = run(*command, "--output", output, *others)
        assert code == 2 and "words.jsonl" in said
    plain = TransducerRecognizer(TransducerDecoder(streaming(), ngram=arpa, spelling_penalty=-9.0))(recording)[0].text
    assert run(recording, "--ngram", arpa, "--spelling-penalty", -9)[1] == f"{recording}: {plain}\n"


def test_raw_samples_of_standard_input(run: Run, recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr.cli.external.load_transducer", lambda name: streaming())
    samples, rate = soundfile.read(recording, dtype="int16")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(samples.tobytes())))
    code, printed, _ = run("-", "--stream", "--raw-rate", rate)
    assert code == 0
    assert printed.removeprefix("-") == run(recording, "--stream")[1].removeprefix(str(recording))


def cased() -> ToyTransducer:
    return ToyTransducer(["▁A", "b", "<blk>", "▁B", ",", "-b"], dim=1600, blank_bias=-3.0)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = {"onnx:toy": network, "onnx:cased": cased}
    monkeypatch.setattr("asr.cli.external.load_transducer", lambda name: networks[name]())


@pytest.mark.usefixtures("loads")
def test_a_manifest_is_recognized_and_scored(evaluate: Run, cuts: Path, tmp_path: Path, arpa: Path) -> None:
    output, details = tmp_path / "words.jsonl", tmp_path / "own.json"
    settings = ["--ngram", arpa, "--beam-size", 3, "--spelling-penalty", "-inf"]
    command = ["--cuts", cuts, "--transducer", "onnx:toy", *settings, "--output", output]
    code, printed, said = evaluate(*command, "--details", details, "--json")
    summary = json.loads(printed)
    recordings = [tmp_path / f"u{number}.wav" for number in range(3)]
    decoder = TransducerDecoder(network(), ngram=arpa, beam_size=3, spelling_penalty=-math.inf)
    wanted = [result.text for result in TransducerRecognizer(decoder)(recordings)]
    lines = output.read_text().splitlines(keepends=True)
    assert code == 0
    assert [json.loads(line)["text"] for line in lines] == wanted
    assert "onnx:toy: acoustic model" in said
    assert summary["transducer"] == "onnx:toy"
    assert summary["wer"] > 0.0 < summary["real_time_factor"]
    assert summary["wer_interval"][0] <= summary["wer"] <= summary["wer_interval"][1]
    made = json.loads(details.read_text())
    assert made["summary"] == summary
    assert made["system"]["ngram"] == str(arpa)
    assert made["system"]["options"]["beam_size"] == 3
    assert made["utterances"][0]["words"][0]["start"] < made["utterances"][0]["words"][0]["end"]
    confidences = [word["confidence"] for utterance in made["utterances"] for word in utterance["words"]]
    assert all(0.0 < each <= 1.0 for each in confidences) and min(confidences) < 1.0
    assert main(["report", str(details)]) == 0
    # An interrupted run goes on, with the same options only.
    output.write_text("".join(lines[:2]))
    assert evaluate(*command)[0] == 2
    code, printed, said = evaluate(*command, "--resume", "--json")
    assert (code, json.loads(printed)["wer"]) == (0, summary["wer"])
    assert "2 of 3 recordings are already in" in said
    code, _, said = evaluate(*command, "--resume", "--lm-scale", 2)
    assert code == 2 and "words.jsonl" in said


@pytest.mark.usefixtures("loads")
def test_a_recipe_may_have_several_transducers(evaluate: Run, cuts: Path, tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(
        f"sets: {{tones: {cuts}}}\n"
        "systems: {narrow: --transducer onnx:toy --beam-size 1, wide: --transducer onnx:toy, Cased: --transducer "
        "onnx:cased}\n"
    )
    command = ["--recipe", recipe, "--output", folder]
    code, printed, _ = evaluate(*command, "--ignore-case")
    assert code == 0
    assert [line.split(" ")[1] for line in printed.splitlines()[2:5]] == ["narrow", "wide", "Cased"]
    table = (folder / "table.json").read_text()
    assert evaluate(*command, "--ignore-case")[0] == 0
    assert (folder / "table.json").read_text() == table
    page = (folder / "tones.html").read_text()
    assert "onnx:cased" in page
    recipe.write_text(recipe.read_text().replace("onnx:cased", "onnx:cased --mode rnn"))
    code, printed, said = evaluate("--recipe", recipe, "--output", tmp_path / "none")
    assert (code, printed) == (2, "")
    assert "the options of 'Cased' are not valid: --mode has no effect with --transducer; leave it out.\n" in said
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("loads")
def test_networks_that_write_case_and_punctuation(evaluate: Run, cuts: Path, tmp_path: Path) -> None:
    details = tmp_path / "own.json"
    command = ["--cuts", cuts, "--transducer", "onnx:cased", "--details", details]
    assert evaluate(*command)[0] == 0
    plain = json.loads(details.read_text())
    assert {",", "-"} <= {letter for utt in plain["utterances"] for word in utt["words"] for letter in word["text"]}
    assert evaluate(*command, "--ignore-case", "--ignore-punctuation")[0] == 0
    compared = json.loads(details.read_text())
    for before, after in zip(plain["utterances"], compared["utterances"], strict=True):
        assert len(after["words"]) > len(before["words"]) or "-" not in str(before["words"])
        for word in after["words"]:
            assert set(word["text"]) <= {"A", "B"}
            times = [(one["start"], one["end"]) for one in before["words"] if word["text"] in one["text"].upper()]
            assert (word["start"], word["end"]) in times


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "rnn"], "--mode has no effect with --transducer"),
        (["--carry-history"], "--carry-history has no effect with --transducer"),
        (["--workers", "2"], "--workers has no effect with --transducer"),
        (["--confidences"], "--confidences has no effect with --transducer, whose words have them anyway"),
        (["--speaker-statistics"], "--speaker-statistics and --transducer exclude each other"),
        (["--adapt"], "--adapt and --transducer exclude each other"),
        (["--lm-scale", "1"], "--lm-scale has no effect here: there is no language model"),
    ],
)
@pytest.mark.usefixtures("loads")
def test_options_of_an_evaluation_are_refused(
    evaluate: Run, cuts: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    output = tmp_path / "words.jsonl"
    code, printed, said = evaluate("--cuts", cuts, "--transducer", "onnx:toy", "--output", output, *options)
    assert (code, printed) == (2, "")
    assert message in said
    assert not output.exists() or not output.read_text()


def test_evaluations_need_recordings_for_a_transducer(evaluate: Run, tmp_path: Path, cuts: Path) -> None:
    (tmp_path / "words").write_text("a one\n")
    scored = [tmp_path / "words", "--reference", tmp_path / "words"]
    assert "--transducer has no effect without --cuts" in evaluate(*scored, "--transducer", "onnx:toy")[2]
    assert "--beam-size has no effect without --cuts" in evaluate(*scored, "--beam-size", 3)[2]
    assert (
        "--beam-size has no effect without --transducer or --attention-model"
        in evaluate("--cuts", cuts, "--beam-size", 3)[2]
    )
    (tmp_path / "words.txt").write_text("a\n")
    code, _, said = evaluate(
        *("--cuts", cuts, "--transducer", "onnx:toy", "--words", tmp_path / "words.txt"),
        *("--output", tmp_path / "words.txt"),
    )
    assert code == 2 and "words.txt: this is an input of the same command" in said


def attention_model(**options: object) -> ToyAttention:
    assert options.get("language") in (None, "en")
    own = ToyAttention(["▁a", "b", "<blk>", "▁b"], dim=160, end_bias=-3.0)
    own.max_tokens = 12
    return own


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("asr.cli.external.load_attention_model", lambda name, **options: attention_model(**options))

    def transcribe(*arguments: object) -> tuple[int, str, str]:
        code = main(["transcribe", "--attention-model", "transformers:toy", *map(str, arguments)])
        return code, *capsys.readouterr()

    return transcribe


def test_attention_models(attend: Run, recording: Path, arpa: Path) -> None:
    plain = AttentionRecognizer(AttentionDecoder(attention_model()))(recording)[0].text
    assert plain
    assert attend(recording) == (0, f"{recording}: {plain}\n", "")
    settings = {"beam_size": 3, "lm_scale": 1.5, "length_penalty": 0.5, "max_tokens_per_second": 5.0}
    settings["no_speech_threshold"] = 0.5
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    (wanted,) = AttentionRecognizer(AttentionDecoder(attention_model(), ngram=arpa, **settings))(recording, nbest=3)
    code, printed, _ = attend(recording, "--ngram", arpa, *flags, "--nbest", 3, "--jsonl", "--language", "en")
    record = json.loads(printed)
    assert code == 0
    assert record["text"] == wanted.text
    assert [each["text"] for each in record["nbest"]] == [each.text for each in wanted.hypotheses]
    assert all(0.0 < word["confidence"] <= 1.0 for word in record["words"])


def test_a_run_continues_only_with_the_same_language(attend: Run, recording: Path, tmp_path: Path) -> None:
    output = tmp_path / "words.jsonl"
    assert attend(recording, "--output", output)[0] == 0
    code, _, said = attend(recording, "--output", output, "--language", "en")
    assert code == 2
    assert "words.jsonl" in said
    assert attend(recording, "--output", output)[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-symbols-per-frame", "3"], "--max-symbols-per-frame has no effect with --attention-model"),
        (["--transducer", "onnx:x"], "--transducer and --attention-model exclude each other"),
        (["--stream"], "--stream and --attention-model exclude each other"),
        (["--length-penalty", "-1"], "--length-penalty is -1"),
        (["--max-tokens-per-second", "0"], "--max-tokens-per-second is 0"),
    ],
)
def test_options_of_attention_models_are_refused(
    attend: Run, recording: Path, options: list[str], message: str
) -> None:
    code, printed, said = attend(recording, *options)
    assert (code, printed) == (2, "")
    assert message in said


def test_transducers_have_no_options_of_attention_models(run: Run, recording: Path) -> None:
    for option in (["--length-penalty", "1"], ["--language", "en"], ["--task", "translate"], ["--prompt", "x"]):
        code, _, said = run(recording, *option)
        assert code == 2
        assert f"{option[0]} has no effect with --transducer" in said


def test_segments_are_no_longer_than_the_network_reads(
    attend: Run, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyAttention, "max_seconds", 30.0)
    assert attend(recording)[0] == 0
    code, _, said = attend(recording, "--max-segment-seconds", 40)
    assert code == 2
    assert "--max-segment-seconds is 40, but the network reads at most 30 s at a time" in said
