from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import soundfile

import asr
from asr.bundle import Bundle
from asr.cli.evaluation_details import Details
from asr.cli.main import main
from asr.lm.rnn.export import save_network
from asr.testing.tones import RATE, TEXT, tones


@pytest.fixture
def transcripts(tmp_path):
    (tmp_path / "reference").write_text("a one two three\nb four\n")
    (tmp_path / "hypothesis").write_text('{"audio": "x/a.wav", "text": "one too three"}\n{"id": "b", "text": "four"}\n')
    return tmp_path / "hypothesis", tmp_path / "reference"


def test_a_report_for_readers_and_one_for_programs(transcripts, evaluate):
    hypothesis, reference = transcripts
    code, text, _ = evaluate(hypothesis, "--reference", reference)
    assert code == 0
    assert "WER  25.00%" in text
    assert "1 substitutions, 0 insertions, 0 deletions of 4 words" in text
    assert "1 of 2 utterances have errors" in text
    record = json.loads(evaluate(hypothesis, "--reference", reference, "--json")[1])
    assert (record["wer"], record["substitutions"], record["words"]) == (0.25, 1, 4)
    assert record["wer_interval"][0] <= 0.25 <= record["wer_interval"][1]


def test_details_and_another_system(tmp_path, transcripts, evaluate):
    hypothesis, reference = transcripts
    (tmp_path / "other").write_text("a ONE\nb five\n")
    code, text, _ = evaluate(
        *(hypothesis, "--reference", reference, "--compare", tmp_path / "other"),
        *("--details", tmp_path / "details.txt", "--ignore-case"),
    )
    assert code == 0
    assert "the other system: WER 75.00%; the first is better with a probability of 100.0%" in text
    details = (tmp_path / "details.txt").read_text()
    assert "1  TWO -> TOO" in details
    assert "REF: ONE TWO THREE\nHYP: ONE TOO THREE\n         S\n" in details


def test_details_have_the_alignment_whose_errors_were_counted(tmp_path, evaluate):
    """The fewest errors are five substitutions; sclite takes three deletions and three insertions, which cost less."""
    (tmp_path / "ref.trn").write_text("A B C X Y (u)\n")
    (tmp_path / "hyp.trn").write_text("X Y P Q R (u)\n")
    details = tmp_path / "details.txt"
    evaluate(tmp_path / "hyp.trn", "--reference", tmp_path / "ref.trn", "--details", details)
    text = details.read_text()
    assert "u  0 substitutions, 3 insertions, 3 deletions of 5 words" in text
    assert "REF: a b c x y * * *\nHYP: * * * x y p q r\n     D D D     I I I\n" in text
    assert "     1  deleted   a\n" in text and "->" not in text


def test_case_and_punctuation_can_be_ignored(tmp_path, evaluate):
    (tmp_path / "ref").write_text("a WELL KNOWN BOYS' DON'T CAFÉ\nb NAÏVE 3 4\n", "utf-8")
    (tmp_path / "hyp").write_text("a “Well-known” boys’ – don’t, cafe\u0301!\nb naïve... 3/4\n", "utf-8")
    pair = (tmp_path / "hyp", "--reference", tmp_path / "ref", "--json")
    assert json.loads(evaluate(*pair)[1])["wer"] > 0.9
    assert json.loads(evaluate(*pair, "--ignore-case")[1])["wer"] > 0.5
    assert json.loads(evaluate(*pair, "--ignore-punctuation")[1])["substitutions"] == 6
    record = json.loads(evaluate(*pair, "--ignore-case", "--ignore-punctuation")[1])
    assert (record["wer"], record["cer"], record["words"]) == (0.0, 0.0, 8)
    both = (*pair, "--ignore-case", "--ignore-punctuation", "--compare", tmp_path / "hyp")
    assert json.loads(evaluate(*both)[1])["other_wer"] == 0.0


def test_alternatives_stay_when_punctuation_is_ignored(tmp_path, evaluate):
    (tmp_path / "ref.trn").write_text("I'm { gonna / going-to } { @ / uh } { -- / um } go (u)\n")
    options = (tmp_path / "hyp.trn", "--reference", tmp_path / "ref.trn", "--ignore-punctuation", "--json")
    for heard in ("I’m going to go.", "I'm, gonna; um, go"):
        (tmp_path / "hyp.trn").write_text(f"{heard} (u)\n", "utf-8")
        assert json.loads(evaluate(*options)[1])["wer"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to score"),
        (["hyp", "--cuts", "c.jsonl"], "--cuts has its own reference"),
        (["hyp", "--reference", "ref", "--output", "out"], "--output and --resume are for the results of --cuts"),
        (["hyp", "--reference", "ref", "--resume"], "--output and --resume are for the results of --cuts"),
        (["hyp", "--reference", "ref", "--search-beam", "3"], "--search-beam has no effect without --cuts"),
        (["hyp", "--reference", "ref", "--workers", "2"], "--workers has no effect without --cuts"),
        (["hyp", "--reference", "ref", "--cache-mb", "9"], "--cache-mb has no effect without --cuts"),
        (["nowhere", "--reference", "nowhere"], "nowhere: the transcript file cannot be read"),
    ],
)
def test_a_wrong_request_is_one_sentence(evaluate, arguments, message):
    code, _, errors = evaluate(*arguments)
    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_utterances_of_one_side_only(tmp_path, transcripts, evaluate):
    hypothesis, reference = transcripts
    reference.write_text(reference.read_text() + "c five\n")
    told = evaluate(hypothesis, "--reference", reference)[2]
    assert "1 of 3 utterances have no hypothesis, first 'c'" in told and "(--missing-is-empty)." in told
    code, text, _ = evaluate(hypothesis, "--reference", reference, "--missing-is-empty")
    assert code == 0
    assert "1 deletions of 5 words" in text


def test_failed_recordings_are_told_and_count_as_deleted(tmp_path, transcripts, evaluate):
    hypothesis, reference = transcripts
    hypothesis.write_text('{"audio": "a.wav", "text": "one two three"}\n{"audio": "b.wav", "error": "cut short"}\n')
    code, text, errors = evaluate(hypothesis, "--reference", reference, "--json")
    assert (code, json.loads(text)["deletions"], json.loads(text)["failed"]) == (1, 1, 1)
    assert "1 recordings failed, such as 'b'; all their words count as deleted" in errors


def test_a_reference_without_words_has_no_rate(tmp_path, transcripts, evaluate):
    hypothesis, reference = transcripts
    reference.write_text("a\nb\n")
    code, text, _ = evaluate(hypothesis, "--reference", reference, "--compare", hypothesis, "--json")
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (code, record["wer"], record["other_wer"], record["insertions"]) == (0, None, None, 4)


@pytest.mark.slow
def test_a_manifest_is_recognized_and_scored(tmp_path, cuts, evaluate, tiny_bundle_folder):
    code, text, errors = evaluate(
        *("--cuts", cuts, "--bundle", tiny_bundle_folder, "--mode", "interpolated"),
        *("--output", tmp_path / "words.jsonl", "--json"),
    )
    record = json.loads(text)
    assert code == 0
    assert record["wer"] == 0.0
    assert record["mode"] == "interpolated"
    assert record["cache"]["num_queries"] > 0
    assert "real-time factor" in errors
    assert [json.loads(line)["text"] for line in (tmp_path / "words.jsonl").read_text().splitlines()] == TEXT[:3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bundle", "nowhere"], "nowhere: there is no bundle here"),
        (["--compare", "nowhere"], "nowhere: the transcript file cannot be read"),
        (["--compare", "/dev/null"], "3 of 3 utterances have no hypothesis"),
        (["--details", "nowhere/details"], "the folder nowhere is not there"),
        (["--lm-device-mb", "1e-6", "--mode", "large_ngram"], "budget of 1 bytes is too small"),
    ],
)
def test_a_wrong_request_costs_no_results(tmp_path, cuts, evaluate, tiny_bundle_folder, arguments, message):
    output, earlier = tmp_path / "words.jsonl", '{"id": "u0", "text": "hours of work"}\n'
    output.write_text(earlier)
    options = ("--cuts", cuts, "--bundle", tiny_bundle_folder, "--output", output)
    code, _, errors = evaluate(*options, "--resume", *arguments)
    assert (code, output.read_text()) == (2, earlier)
    assert message in errors and "real-time factor" not in errors


@pytest.mark.slow
def test_results_are_never_replaced(tmp_path, cuts, evaluate, tiny_bundle_folder):
    output = tmp_path / "words.jsonl"
    options = ("--cuts", cuts, "--bundle", tiny_bundle_folder, "--output", output, "--mode", "ngram")
    for earlier, message in (
        ('{"id": "u0", "text": "hours of work"}\n', "there are results in it; continue with --resume"),
        ("hours of work\n", "words.jsonl:1"),
    ):
        output.write_text(earlier)
        code, _, errors = evaluate(*options)
        assert (code, message in errors, output.read_text()) == (2, True, earlier)
    output.write_text('{"id": "u0", "error": "the disk was not there"}\n')
    assert evaluate(*options)[0] == 0
    assert len(output.read_text().splitlines()) == 4


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_and_a_bad_recording_counts_as_deleted(
    tmp_path, cuts, evaluate, tiny_bundle_folder
):
    output = tmp_path / "words.jsonl"
    arguments = ("--cuts", cuts, "--bundle", tiny_bundle_folder, "--mode", "ngram", "--output", output, "--json")
    assert evaluate(*arguments)[0] == 0
    first, second, _ = output.read_text().splitlines(keepends=True)
    output.write_text(first.replace(TEXT[0], "SKIP") + second + '{"id": "u2", "te')
    (tmp_path / "u2.wav").write_bytes(b"no audio")
    code, text, errors = evaluate(*arguments, "--resume")
    record = json.loads(text)
    assert code == 1
    assert "2 of 3 recordings are already in" in errors
    assert f"asr: u2: {tmp_path}/u2.wav: the audio cannot be decoded" in errors
    words = [len(line.split()) for line in TEXT[:3]]
    assert (record["failed"], record["words"]) == (1, sum(words))
    # What was there is taken as it is, and not recognized again.
    assert record["substitutions"] + record["deletions"] == words[0] + words[2]
    assert "error" in json.loads(output.read_text().splitlines()[-1])
    (tmp_path / "u2.wav").unlink()  # fails again
    code, text, errors = evaluate(*arguments, "--resume", "--details", tmp_path / "details.json")
    assert (code, json.loads(text)["real_time_factor"]) == (1, None)
    assert "nothing was recognized" in errors
    # A report of all parts has the times of all.
    summary = json.loads((tmp_path / "details.json").read_text())["summary"]
    records = [json.loads(line) for line in (first, second)]
    seconds = sum(sum(record["seconds"].values()) for record in records)
    factor = seconds / sum(record["duration"] for record in records)
    assert summary["real_time_factor"] == pytest.approx(factor, abs=1e-4)
    assert sum(summary["seconds"].values()) == pytest.approx(seconds, abs=2e-3)
    code, _, errors = evaluate("--cuts", cuts, "--bundle", tiny_bundle_folder, "--resume")
    assert (code, "--resume needs --output, the file to continue" in errors) == (2, True)


@pytest.mark.slow
def test_a_users_own_language_models_take_the_place_of_the_bundles(
    tmp_path, cuts, evaluate, tiny_bundle_folder, caplog
):
    (tmp_path / "text").write_text("KIT TO SICK\n" * 3 + "PAT\n")
    options = ["--order", "2", "--binary", str(tmp_path / "own")]
    assert main(["lm", "ngram", "--text", str(tmp_path / "text"), *options]) == 0
    arguments = ("--cuts", cuts, "--bundle", tiny_bundle_folder, "--decoder", "token-passing", "--json")
    code, text, _ = evaluate(*arguments, "--large-ngram", tmp_path / "own", "--mode", "large_ngram")
    assert (code, json.loads(text)["mode"]) == (0, "large_ngram")
    assert "lacks 2 of 6 words" in caplog.text
    network = Bundle.load(tiny_bundle_folder).rnn_lm.network
    save_network(network, tmp_path / "rnn", half_precision=False)
    code, text, _ = evaluate(*arguments, "--rnn-lm", tmp_path / "rnn", "--mode", "rnn")
    assert (code, json.loads(text)["wer"]) == (0, 0.0)
    code, text, _ = evaluate(*arguments, "--rnn-lm", tiny_bundle_folder, "--mode", "rnn")
    assert (code, json.loads(text)["wer"]) == (0, 0.0)
    code, _, errors = evaluate(*arguments, "--large-ngram", tmp_path / "nowhere")
    assert (code, "nowhere: the n-gram model cannot be read" in errors) == (2, True)


@pytest.mark.slow
def test_lattices_are_kept_by_errors_that_count(tmp_path, cuts, evaluate, tiny_bundle_folder, monkeypatch):
    cuts.write_bytes(
        gzip.compress(gzip.decompress(cuts.read_bytes()).replace(TEXT[0].encode(), TEXT[0].lower().encode()))
    )
    found = []
    monkeypatch.setattr(Details, "add", lambda self, name, result, num_errors: found.append(num_errors))
    arguments = ("--cuts", cuts, "--bundle", tiny_bundle_folder, "--mode", "ngram")
    assert evaluate(*arguments)[0] == evaluate(*arguments, "--ignore-case")[0] == 0
    assert sum(found[:3]) > 0 and found[3:] == [0, 0, 0]


@pytest.mark.slow
def test_details_for_a_report(tmp_path, cuts, evaluate, tiny_bundle_folder, capsys):
    details = tmp_path / "mine.json"
    arguments = ("--cuts", cuts, "--bundle", tiny_bundle_folder, "--mode", "interpolated", "--json")
    code, text, _ = evaluate(*arguments, "--details", details, "--confidences")
    assert code == 0
    record = json.loads(details.read_text())
    assert record["summary"] == json.loads(text)
    assert record["system"]["mode"] == "interpolated" and "search_beam" in record["system"]["options"]
    first = record["utterances"][0]
    assert [word["text"] for word in first["words"]] == first["reference"] == TEXT[0].split()
    assert all(word["start"] < word["end"] and 0 < word["confidence"] <= 1 for word in first["words"])
    assert first["audio"]["path"] == str(tmp_path / "u0.wav") and first["audio"]["end"] == first["duration"]
    assert record["cache"][-1]["num_queries"] == record["summary"]["cache"]["num_queries"]
    assert record["cache"][-1]["audio_seconds"] == pytest.approx(sum(u["duration"] for u in record["utterances"]))
    assert sorted(record["lattices"]) == ["u0", "u1", "u2"]
    assert {word[0] for word in record["lattices"]["u0"]["words"]} >= set(TEXT[0].split())

    def report(*more):
        code = main(["report", *map(str, more)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    code, text, _ = report(details, "--audio", "2", "--link-audio")
    made = json.loads(text)
    assert (code, made["utterances"], made["audio_embedded"], made["audio_linked"]) == (0, 3, 2, 1)
    page = (tmp_path / "mine.html").read_text()
    assert made["bytes"] == len(page.encode())
    for section in ("systems", "time", "confidence", "cache", "pictures", "utterances"):
        assert f'<section id="{section}"' in page
    assert [path.suffix for path in (tmp_path / "mine.audio").iterdir()] == [".mp3"]
    for wrong, message in (
        ((tmp_path / "nowhere.json",), "nowhere.json"),
        ((details, "--audio", "many"), "--audio many: give a number of utterances, or all"),
        ((details, "--output", details), "mine.json"),
    ):
        code, _, errors = report(*wrong)
        assert code == 2 and message in errors and len(errors.splitlines()) == 1


def test_details_of_a_file_of_transcripts(tmp_path, transcripts, evaluate):
    hypothesis, reference = transcripts
    soundfile.write(tmp_path / "a.wav", tones(TEXT[0].split()).numpy(), RATE)
    word = {"word": "one", "start": 0.5, "end": 1.0, "confidence": 0.9}
    rest = {"text": "one", "duration": 2.0, "words": [word], "seconds": {"search": 0.5}, "made_by": "x"}
    lines = [{"audio": str(tmp_path / "a.wav"), **rest}, {"audio": "/no\u2028where/b.wav", **rest}]
    hypothesis.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    assert evaluate(hypothesis, "--reference", reference, "--details", tmp_path / "d.json")[0] == 0
    record = json.loads((tmp_path / "d.json").read_text())
    assert record["summary"]["real_time_factor"] == 0.25 and record["summary"]["seconds"] == {"search": 1.0}
    assert [one.get("audio", {}).get("path") for one in record["utterances"]] == [str(tmp_path / "a.wav"), None]
    assert record["utterances"][0]["words"] == [{"text": "one", "start": 0.5, "end": 1.0, "confidence": 0.9}]
    message = "--confidences needs --cuts"
    assert message in evaluate(hypothesis, "--reference", reference, "--confidences")[2]


@pytest.mark.slow
def test_adaptation_is_refused_where_it_cannot_be(cuts, evaluate, transcripts, tiny_bundle_folder):
    hypothesis, reference = transcripts
    assert "--adapt needs --cuts" in evaluate(hypothesis, "--reference", reference, "--adapt")[2]
    message = "--speaker-statistics needs --cuts"
    assert message in evaluate(hypothesis, "--reference", reference, "--speaker-statistics")[2]
    code, _, errors = evaluate("--cuts", cuts, "--bundle", tiny_bundle_folder, "--adapt")
    assert code == 2 and "it cannot adapt to speakers because it has no denominator graph" in errors


@pytest.mark.slow
@pytest.mark.one_stack
@pytest.mark.parametrize(
    "option, learn", [("--adapt", "speaker_transform"), ("--speaker-statistics", "speaker_statistics")]
)
def test_each_speakers_voice_is_learned_from_that_speakers_recordings(tmp_path, evaluate, option, learn):
    lhotse = pytest.importorskip("lhotse")
    clips = sorted((Path(__file__).resolve().parents[2] / "scripts" / "demo_clips").glob("*.flac"))[:3]
    made = []
    for index, path in enumerate(clips):
        recording = lhotse.Recording.from_file(path)
        speaker = "AB"[index % 2]
        supervision = lhotse.SupervisionSegment(
            path.stem, recording.id, 0, recording.duration, text="A", speaker=speaker
        )
        made.append(lhotse.MonoCut(path.stem, 0, recording.duration, 0, [supervision], recording=recording))
    lhotse.CutSet.from_cuts(made).to_file(tmp_path / "cuts.jsonl.gz")
    arguments = ("--cuts", tmp_path / "cuts.jsonl.gz", "--bundle", "librispeech", "--mode", "ngram", option)
    assert evaluate(*arguments, "--output", tmp_path / "words.jsonl")[0] == 0
    lines = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    recognizer = asr.load("librispeech", mode="ngram")
    for own in (clips[::2], clips[1::2]):
        speaker = getattr(recognizer, learn)(own)
        for path, result in zip(own, recognizer(own, speaker=speaker), strict=True):
            record = next(line for line in lines if line["id"] == path.stem)
            assert record["text"] == result.text
            assert record["scores"]["total"] == pytest.approx(result.total, abs=1e-2)
    if option == "--adapt":  # takes long; below, the options differ in nothing
        return
    # A run that goes on learns the same voices, from all of the recordings.
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:1]))
    assert evaluate(*arguments, "--output", tmp_path / "words.jsonl", "--resume")[0] == 0
    again = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    assert {one["id"]: one["text"] for one in again} == {one["id"]: one["text"] for one in lines}
    code, _, errors = evaluate(*arguments[:-1], "--output", tmp_path / "words.jsonl", "--resume")
    assert code == 2 and "words.jsonl" in errors
