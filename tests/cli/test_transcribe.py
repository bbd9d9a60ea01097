from __future__ import annotations

import fcntl
import gzip
import importlib.util
import json
import os
import re

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.io import open_audio
from asr.bundle import Bundle
from asr.cli.main import main
from asr.cli.transcribe import transcribe as results_of
from asr.decoding.kaldi_lattice import read_kaldi_lattices
from asr.decoding.slf import read_slf
from asr.recognizer import Recognizer
from asr.testing.tones import RATE, tones
from tests.reference.lattice_oracle import oracle_errors

WORDS = ["PAT", "TO", "KIT"]


def write(path, waveform, rate=RATE, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, waveform.numpy(), rate, **options)
    return path


@pytest.fixture
def transcribe(tiny_bundle_folder, capsys):
    def run(*arguments):
        capsys.readouterr()
        code = main(["transcribe", "--bundle", str(tiny_bundle_folder), *map(str, arguments)])
        captured = capsys.readouterr()
        # The first test after an edit of a loop waits for the compiler, and is told so.
        errors = re.sub(r"^asr: compiling .*\n", "", captured.err, flags=re.MULTILINE)
        return code, captured.out.splitlines(), errors

    return run


def test_short_recordings_do_not_wait_for_a_long_one(tiny_bundle_folder, tmp_path):
    recognizer = Recognizer(Bundle.load(tiny_bundle_folder), mode="ngram")
    paths = [write(tmp_path / f"{name}.wav", tones(WORDS)) for name in "abcd"]
    recognized = []

    def read(path, rate):
        return open_audio(path, rate, whole_seconds=0.5 if path.stem == "c" else 300.0)

    forward = recognizer.forward
    recognizer.forward = lambda audio, **options: recognized.append(len(audio)) or forward(audio, **options)
    outcomes = [outcome.result.text for outcome in results_of(recognizer, paths, read)]
    assert outcomes == ["PAT TO KIT"] * 4 and recognized == [2, 1, 1]


def test_any_format_rate_and_number_of_channels(tmp_path, transcribe):
    files = [
        write(tmp_path / "a.flac", tones(WORDS)),
        write(tmp_path / "b.mp3", tones(WORDS)),
        write(tmp_path / "c.wav", torch.stack([tones(WORDS, rate=44100)] * 2, dim=1), 44100),
        write(tmp_path / "d.wav", tones(WORDS), subtype="FLOAT"),
    ]
    code, lines, _ = transcribe(*files, "--ngram-only")
    assert code == 0
    assert lines == [f"{path}: PAT TO KIT" for path in files]


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--mode", "ngram"], ["--mode", "rnn"], ["--mode", "rnn", "--stream"]])
def test_hot_words_win_over_words_that_sound_alike(tmp_path, transcribe, options):
    path, hot = write(tmp_path / "a.wav", tones(["PAT", "TO", "KIT", "TO", "SKIP"])), tmp_path / "hot.txt"
    options += [path, "--hot-words", hot]
    for content, expected in (
        ("SKIP\n", "PAT TO KIT TO SKIP"),
        ("TWO\n", "PAT TWO KIT TWO SKIP"),
        ("two skip\nNOBODY\n", "PAT TO KIT TWO SKIP"),
        ("TWO SKIP :0.1\n", "PAT TO KIT TO SKIP"),
    ):
        hot.write_text(content)
        code, lines, _ = transcribe(*options)
        assert code == 0 and [line.partition(": ")[2] for line in lines] == [expected]
    assert transcribe(*options, "--hot-word-score", "6")[1][0].endswith(": PAT TO KIT TO SKIP")
    hot.write_text("TWO\n")
    assert "TWO" not in transcribe(*options, "--hot-word-score", "0")[1][0]


def test_hot_words_are_part_of_what_made_an_output(tmp_path, transcribe):
    path, hot, output = write(tmp_path / "a.wav", tones(WORDS)), tmp_path / "hot.txt", tmp_path / "out.jsonl"
    hot.write_text("TWO\n")
    common = path, "--ngram-only", "--hot-words", hot
    assert transcribe(*common, "--output", output)[0] == 0
    assert json.loads(output.read_text())["text"] == "PAT TWO KIT"
    hot.write_text("KENSHO\n")
    code, _, errors = transcribe(*common)
    assert code == 2 and f"--hot-words {hot}: give words of the vocabulary; it does not have 'KENSHO'" in errors
    hot.write_text("TO\n")
    code, _, errors = transcribe(*common, "--output", output)
    assert code == 2 and "was recognized by" in errors
    code, _, errors = transcribe(*common, "--output", hot)
    assert code == 2 and hot.read_text() == "TO\n", errors
    assert transcribe(path, "--hot-words", tmp_path / "none.txt")[0] == 2
    code, _, errors = transcribe(path, "--hot-word-score", "3")
    assert code == 2 and "--hot-word-score has no effect without --hot-words" in errors


@pytest.mark.slow
def test_one_bad_file_among_many_is_reported_and_the_others_done(tmp_path, transcribe):
    folder = tmp_path / "recordings"
    for index in range(12):
        write(folder / f"good{index:02d}.wav", tones(["PAT", "TWO"], seed=index))
    nan = tones(WORDS)
    nan[100] = float("nan")
    write(folder / "nan.wav", nan, subtype="FLOAT")
    write(folder / "none.wav", torch.zeros(0))
    (folder / "empty.flac").touch()
    (folder / "text.wav").write_text("these are words")
    whole = write(folder / "cut.wav", tones(WORDS)).read_bytes()
    (folder / "cut.wav").write_bytes(whole[: len(whole) // 2])
    code, lines, errors = transcribe(folder, tmp_path / "nowhere.wav", "--jsonl", "--ngram-only")
    records = {record["audio"].rsplit("/", 1)[-1]: record for record in map(json.loads, lines)}
    assert code == 1
    assert len(records) == 18
    assert all(records[f"good{index:02d}.wav"]["text"] == "PAT TWO" for index in range(12))
    for name, reason in {
        "nan.wav": "NaN, infinite or",
        "none.wav": "no samples",
        "empty.flac": "empty",
        "text.wav": "cannot be decoded",
        "cut.wav": "cut short",
        "nowhere.wav": "no such audio file",
    }.items():
        assert reason in records[name]["error"]
        assert sum(name in line and reason in line for line in errors.splitlines()) == 1
    assert "12 of 18 files transcribed, 6 failed." in errors


def test_files_that_do_not_exist_are_told_before_a_bundle_is_loaded(tmp_path, monkeypatch, capsys):
    def load(args):
        raise AssertionError("a bundle is loaded")

    monkeypatch.setattr("asr.cli.transcribe.any_recognizer_from", load)
    files = [f"{tmp_path}/{name}.wav" for name in ("nowhere", "neither")]
    assert main(["transcribe", *files, "--jsonl"]) == 1
    lines, told = (text.splitlines() for text in capsys.readouterr())
    errors = [f"{name}: there is no such audio file." for name in files]
    records = [{"audio": name, "error": error} for name, error in zip(files, errors, strict=True)]
    assert [*map(json.loads, lines)] == records
    assert told == [*(f"asr: {error}" for error in errors), "0 of 2 files transcribed, 2 failed."]
    (tmp_path / "there.wav").touch()
    with pytest.raises(AssertionError):
        main(["transcribe", *files, f"{tmp_path}/there.wav"])


@pytest.mark.slow
def test_json_has_times_and_scores(tmp_path, transcribe):
    path = write(tmp_path / "a.wav", tones(WORDS))
    code, (line,), _ = transcribe(path, "--jsonl", "--mode", "rnn")
    record = json.loads(line)
    assert code == 0
    assert record["audio"] == str(path)
    assert [word["word"] for word in record["words"]] == WORDS
    assert record["words"][0]["start"] == pytest.approx(0.1, abs=0.05)
    assert record["scores"]["lm"] != 0.0


@pytest.mark.slow
def test_the_n_best_sentences_are_a_field(tmp_path, transcribe):
    path = write(tmp_path / "a.wav", tones(WORDS))
    code, (line,), _ = transcribe(path, "--jsonl", "--mode", "rnn", "--nbest", "4", "--output-beam", "30")
    record = json.loads(line)
    assert code == 0
    assert 1 < len(record["nbest"]) <= 4
    assert record["nbest"][0]["text"] == record["text"]
    assert record["nbest"][0]["scores"] == pytest.approx(record["scores"], abs=1e-2)
    for wrong, reason in {("--nbest", "4"): "needs --jsonl", ("--nbest", "0", "--jsonl"): "give 1 or more"}.items():
        code, _, errors = transcribe(path, *wrong)
        assert code != 0 and reason in errors


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path, transcribe):
    for index in range(3):
        write(tmp_path / "in" / f"{index}.wav", tones(["PAT", "TWO"], seed=index))
    output = tmp_path / "words.jsonl"
    assert transcribe(tmp_path / "in", "--output", output, "--ngram-only")[:2] == (0, [])
    first = output.read_text()
    lines = first.splitlines(keepends=True)
    failed = json.dumps({"audio": str(tmp_path / "in" / "1.wav"), "error": "was damaged"})
    output.write_text(lines[0] + failed + "\n" + lines[2][:20])
    code, _, errors = transcribe(tmp_path / "in", "--output", output, "--ngram-only")
    assert code == 0
    assert "1 of 3 files are already in" in errors
    done = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(record["audio"] for record in done if "error" not in record) == sorted(
        json.loads(line)["audio"] for line in lines
    )
    before = output.read_text()
    assert transcribe(tmp_path / "in", "--output", output, "--ngram-only")[0] == 0
    assert transcribe(tmp_path / "in", "--output", output)[0] == 2  # in another mode
    assert output.read_text() == before


@pytest.mark.slow
def test_statistics(tmp_path, transcribe):
    path = write(tmp_path / "a.wav", tones(WORDS))
    _, _, errors = transcribe(path, "--statistics", "--mode", "interpolated")
    assert "mode interpolated" in errors
    assert "real-time factor" in errors
    assert "answered from the cache of scores" in errors
    _, _, errors = transcribe(path, "--statistics", "--mode", "interpolated", "--stream")
    assert "answered from the cache of scores" in errors
    _, _, errors = transcribe(path, "--statistics", "--ngram-only")
    assert errors.count("\n") == 1 and "cache" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "rnn", "--ngram-only"], "exclude each other"),
        (["--device", "nonsense"], "there is no such device"),
        (["--device", "cuda:99"], "GPUs here"),
        (["--device", "mps"], "there is no such device"),
        (["--search-beam", "-3"], "must be above 0"),
        (["--cache-mb", "nan"], "--cache-mb nan: give a number of MB"),
        (["--lm-device-mb", "inf"], "--lm-device-mb inf: give a number of MB"),
        (["--cache-mb", "0"], "--cache-mb 0.0: give a number of MB above 0"),
        (["--lm-device-mb", "1e-6", "--mode", "large_ngram"], "budget of 1 bytes is too small"),
        (["--bundle", "nowhere"], "nowhere: there is no bundle here"),
        (["--rnn-lm", "nowhere"], "nowhere: there is no file, folder or bundle of this name; checkpoints/ has: an4"),
        (["--stream", "--speaker-statistics"], "--speaker-statistics and --stream exclude each other"),
        (["--stream", "--adapt"], "--adapt and --stream exclude each other"),
    ],
)
def test_a_wrong_request_is_one_sentence(tmp_path, transcribe, arguments, message):
    path = write(tmp_path / "a.wav", torch.from_numpy(np.zeros(100, dtype=np.float32)))
    code, lines, errors = transcribe(path, *arguments)
    assert code == 2
    assert lines == []
    assert message in errors
    assert errors.startswith("asr: error: ")
    assert len(errors.splitlines()) == 1


def test_a_header_with_an_absurd_rate_is_named(tmp_path, transcribe):
    path = write(tmp_path / "a.wav", torch.zeros(RATE), rate=7)
    code, lines, errors = transcribe(path)
    assert (code, lines) == (1, [])
    assert "a.wav: the header is damaged: the sampling rate is 7" in errors


def test_a_folder_without_audio(tmp_path, transcribe):
    code, _, errors = transcribe(tmp_path)
    assert code == 2
    assert "there are no audio files in this folder" in errors


def test_an_output_of_something_else_is_not_touched(tmp_path, transcribe):
    path = write(tmp_path / "a.wav", tones(WORDS))
    (tmp_path / "notes.txt").write_text("my notes\n")
    code, _, errors = transcribe(path, "--output", tmp_path / "notes.txt")
    assert code == 2
    assert "notes.txt:1: this line is not output of this command" in errors
    assert (tmp_path / "notes.txt").read_text() == "my notes\n"


@pytest.mark.parametrize("content", [b"my notes\nand more\n", b"my notes", b"\x00\x80\n", b'{"audio": "a.wav"}\n'])
def test_no_other_file_is_taken_for_an_output(tmp_path, transcribe, content):
    path = write(tmp_path / "a.wav", tones(WORDS))
    (tmp_path / "notes").write_bytes(content)
    code, _, errors = transcribe(path, "--output", tmp_path / "notes")
    assert (code, (tmp_path / "notes").read_bytes()) == (2, content)
    assert "notes:1: this line is not output of this command; choose another --output" in errors


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_a_full_disk_is_one_sentence(tmp_path, transcribe, options):
    code, _, errors = transcribe(write(tmp_path / "a.wav", tones(WORDS)), "--output", "/dev/full", *options)
    # The first test that streams may have to compile loops, and says so.
    (error,) = (line for line in errors.splitlines() if not line.startswith("asr: compiling"))
    assert code == 2
    assert error.startswith("asr: error: /dev/full: the output cannot be written (No space left on device)")


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"latin\xe9.wav", "line\u2028break.wav".encode()])
def test_strange_names(tmp_path, transcribe, name):
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"in", name))  # noqa: PTH118
    waveform = write(tmp_path / "in" / "a.wav", tones(WORDS))
    waveform.rename(path)
    assert transcribe(tmp_path / "in")[1][-1].endswith(": PAT TO KIT")
    assert transcribe(tmp_path / "in", "--stream")[1][-1].endswith(": PAT TO KIT")
    output = tmp_path / "words.jsonl"
    assert transcribe(tmp_path / "in", "--output", output, "--lattices", tmp_path / "slf")[0] == 0
    assert json.loads(output.read_text().rstrip("\n"))["audio"] == path
    again = transcribe(tmp_path / "in", "--output", output, "--lattices", tmp_path / "slf")
    assert again[0] == 0 and "1 of 1 files are already in" in again[2]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--stream"]], ids=["whole", "stream"])
def test_a_name_cannot_begin_a_line_or_move_the_cursor(tmp_path, transcribe, options):
    write(tmp_path / "a: one\nb.wav", tones(WORDS))
    (tmp_path / "c\x1b[2J\r.wav").write_bytes(b"")
    code, lines, errors = transcribe("--ngram-only", tmp_path, *options)
    assert code == 1
    assert len(lines) == 1 and lines[0].startswith(f"{tmp_path}/a: one\\nb.wav")
    assert f"asr: {tmp_path}/c\\x1b[2J\\r.wav: the audio file is empty" in errors
    assert "\x1b" not in errors and "\r" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--nbest", "2"], ["--lattices", "slf"]])
def test_results_that_lack_what_is_asked_for_are_told(tmp_path, transcribe, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.wav", tones(WORDS))
    assert transcribe(path, "--output", "words.jsonl")[0] == 0
    code, _, errors = transcribe(path, "--output", "words.jsonl", *more)
    assert code == 2 and "choose another --output, or delete this file" in errors
    assert transcribe(path, "--output", "more.jsonl", *more)[0] == 0
    assert transcribe(path, "--output", "more.jsonl", *more)[0] == 0


def test_a_fusion_without_a_model_is_told(tmp_path, transcribe):
    code, _, errors = transcribe(write(tmp_path / "a.wav", tones(WORDS)), "--ngram-only", "--lm-fusion", "search")
    assert code == 2 and "--lm-fusion search has no effect in the mode ngram" in errors


def test_a_folder_may_have_a_folder_called_like_audio(tmp_path, transcribe):
    path = write(tmp_path / "in" / "talk.wav" / "a.wav", tones(WORDS))
    assert transcribe(tmp_path / "in") == (0, [f"{path}: PAT TO KIT"], "")


@pytest.mark.slow
@pytest.mark.parametrize("packing", [["--no-lattice-gzip"], []])
@pytest.mark.parametrize("lattice_format", ["kaldi", "slf"])
def test_an_interrupted_run_keeps_its_lattices(tmp_path, transcribe, lattice_format, packing):
    files = [write(tmp_path / "in" / folder / "x.wav", tones(WORDS, seed=ord(folder))) for folder in "abc"]
    files.insert(2, write(tmp_path / "in" / "b" / "x.2.wav", tones(["KIT"])))
    lattices, output, gz = tmp_path / "lattices", tmp_path / "words.jsonl", "" if packing else ".gz"
    arguments = (tmp_path / "in", "--lattices", lattices, "--lattice-format", lattice_format, "--output", output)

    def texts():
        contents = {path.name: path.read_bytes() for path in lattices.iterdir()}
        return {
            name: (gzip.decompress(content) if name.endswith(".gz") else content).decode()
            for name, content in contents.items()
        }

    assert transcribe(*arguments, *packing)[0] == 0
    whole = texts()
    if lattice_format == "slf":
        assert sorted(whole) == sorted([".lattices", *(f"{name}.slf{gz}" for name in ("x.2", "x.3", "x.4", "x"))])
    # The third is cut short, of the fourth there is nothing.
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:2]))
    archive = f"lattices.txt{gz}"
    if lattice_format == "kaldi":
        entries = whole[archive].split("\n\n")
        begun = "\n\n".join([*entries[:2], entries[2][:50]]).encode()
        # A packed part that has been cut has no end.
        third = gzip.compress(begun)[:-12] if gz else begun
        (lattices / archive).write_bytes(third)
    else:
        for name in ("x.3.slf", "x.4.slf"):
            (lattices / f"{name}{gz}").write_text("")
    # A plain archive is gone on with, whatever the default is.
    assert transcribe(*arguments, *([] if lattice_format == "kaldi" else packing))[0] == 0
    # Scores may differ in their last digit: the batch is another one.
    again = texts()
    for name, text in whole.items():
        assert again[name].count("\n") == text.count("\n")
    if lattice_format == "kaldi":
        assert again[archive].split("\n\n")[:2] == entries[:2]
        names = [entry.split("\n")[0] for entry in again[archive].split("\n\n")]
        assert names == ["x ", "x.2 ", "x.3 ", "x.4 ", ""]
    else:
        assert all(again[f"{name}{gz}"] == whole[f"{name}{gz}"] for name in ("x.slf", "x.2.slf"))


@pytest.mark.slow
@pytest.mark.parametrize("lattice_format", ["kaldi", "slf"])
def test_a_recording_without_its_lattices_is_not_done(tmp_path, transcribe, lattice_format):
    files = [write(tmp_path / "in" / f"{name}.wav", tones([word])) for name, word in (("a", "KIT"), ("b", "PAT"))]
    output, lattices, other = tmp_path / "words.jsonl", tmp_path / "lattices", tmp_path / "other"
    arguments = (tmp_path / "in", "--lattice-format", lattice_format, "--ngram-only", "--output", output)

    def names(folder):
        if lattice_format == "slf":
            return sorted(path.name for path in folder.glob("*.slf.gz"))
        text = gzip.decompress((folder / "lattices.txt.gz").read_bytes()).decode()
        return [f"{entry.split()[0]}.slf.gz" for entry in text.split("\n\n")[:-1]]

    assert transcribe(*arguments, "--lattices", lattices)[0] == 0
    words = output.read_bytes()
    code, _, errors = transcribe(*arguments, "--lattices", lattices)
    assert (code, errors) == (0, f"2 of 2 files are already in {output}.\n")
    if lattice_format == "slf":
        (lattices / "b.slf.gz").unlink()
    else:
        archive = lattices / "lattices.txt.gz"
        archive.write_bytes(archive.read_bytes()[:-12])  # the last one is cut short
    code, _, errors = transcribe(*arguments, "--lattices", lattices)
    assert code == 0 and "1 of 2 files are already in" in errors
    assert f"1 of 2 files are in {output}, but not all of their lattices are in {lattices}" in errors
    assert names(lattices) == ["a.slf.gz", "b.slf.gz"]
    files[1].write_bytes(b"damaged")  # which does not harm its words in the output
    code, _, errors = transcribe(*arguments, "--lattices", other)
    assert code == 1 and f"2 of 2 files are in {output}, but not all of their lattices are in {other}" in errors
    assert names(other) == ["a.slf.gz"]
    assert output.read_bytes() == words


@pytest.mark.slow
def test_a_recording_that_is_mended_later_overwrites_no_lattice(tmp_path, transcribe):
    first, second = tmp_path / "in" / "a" / "x.wav", write(tmp_path / "in" / "b" / "x.wav", tones(WORDS))
    first.parent.mkdir()
    first.write_bytes(b"damaged")
    lattices, output = tmp_path / "lattices", tmp_path / "words.jsonl"
    arguments = (tmp_path / "in", "--lattices", lattices, "--output", output, "--ngram-only")
    assert transcribe(*arguments)[0] == 1
    before = {path.name: path.read_bytes() for path in lattices.glob("*.slf.gz")}
    assert list(before) == ["x.2.slf.gz"]
    write(first, tones(["KIT"]))
    assert transcribe(*arguments)[0] == 0
    done = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["audio"], record.get("text")) for record in done[1:]] == [
        (str(second), "PAT TO KIT"),
        (str(first), "KIT"),
    ]
    after = {path.name: path.read_bytes() for path in lattices.glob("*.slf.gz")}
    assert sorted(after) == ["x.2.slf.gz", "x.slf.gz"]
    assert after["x.2.slf.gz"] == before["x.2.slf.gz"]


@pytest.mark.slow
def test_lattices_that_cannot_be_written_are_one_sentence(tmp_path, transcribe):
    (tmp_path / "lattices").mkdir()
    (tmp_path / "lattices" / "a.slf.gz").symlink_to("/dev/full")
    path = write(tmp_path / "a.wav", tones(WORDS))
    code, _, errors = transcribe(path, "--lattices", tmp_path / "lattices", "--output", tmp_path / "words.jsonl")
    assert code == 2
    assert "lattices: lattices cannot be written there (No space left on device)" in errors
    assert (tmp_path / "words.jsonl").read_text() == ""


def test_lattices_of_k2_are_not_packed(tmp_path, transcribe):
    path = write(tmp_path / "a.wav", tones(WORDS))
    arguments = ("--lattices", tmp_path / "lattices", "--lattice-format", "k2", "--lattice-gzip")
    code, _, errors = transcribe(path, *arguments)
    assert code == 2
    assert "--lattice-gzip is for the formats slf and kaldi" in errors
    assert not (tmp_path / "lattices").exists()


@pytest.mark.skipif(importlib.util.find_spec("k2") is not None, reason="k2 is here")
def test_without_k2_its_lattices_are_refused_before_anything_is_written(tmp_path, transcribe):
    path = write(tmp_path / "a.wav", tones(WORDS))
    code, lines, errors = transcribe(path, "--lattices", tmp_path / "lattices", "--lattice-format", "k2")
    assert (code, lines) == (2, []) and "k2 cannot be imported" in errors
    assert not (tmp_path / "lattices").exists()


@pytest.mark.slow
@pytest.mark.parametrize("lattice_format", ["kaldi", "slf", "k2"])
def test_lattices(tmp_path, transcribe, tiny_bundle_folder, lattice_format):
    if lattice_format == "k2":
        pytest.importorskip("k2")
    files = [write(tmp_path / f"{name}.wav", tones(WORDS, seed=index)) for index, name in enumerate(["a b", "c"])]
    folder = tmp_path / "lattices"
    code, lines, _ = transcribe(*files, "--lattices", folder, "--lattice-format", lattice_format, "--jsonl")
    assert code == 0
    records = list(map(json.loads, lines))
    assert all(0.0 < word["confidence"] <= 1.0 for record in records for word in record["words"])
    graph = Bundle.load(tiny_bundle_folder).graph
    if lattice_format == "kaldi":
        found = dict(read_kaldi_lattices(folder / "lattices.txt.gz", len(graph.vocabulary)))
    elif lattice_format == "slf":
        names = sorted(path.name.removesuffix(".slf.gz") for path in folder.glob("*.gz"))
        found = {name: read_slf(folder / f"{name}.slf.gz", graph.vocabulary, graph.tokens) for name in names}
    else:
        from asr.decoding.k2_lattice import load_k2_lattice

        found = {path.stem: load_k2_lattice(path) for path in sorted(folder.glob("*.pt"))}
    if lattice_format != "slf":  # its words are not numbers
        assert (folder / "words.txt").read_text().splitlines()[4:6] == [
            f"{graph.vocabulary.words[4]} 4",
            f"{graph.vocabulary.words[5]} 5",
        ]
    assert list(found) == ["a_b", "c"]
    reference = graph.vocabulary.ids_of(WORDS)
    for lattice in found.values():
        assert oracle_errors(lattice, [int(word_id) for word_id in reference]) == 0


@pytest.mark.slow
def test_a_given_language_model_is_used_or_refused(tmp_path, tiny_bundle_folder, capsys):
    bundle = Bundle.load(tiny_bundle_folder)
    bundle.default_mode = "rnn"
    bundle.save(tmp_path / "tones")
    audio = write(tmp_path / "a.wav", tones(WORDS))
    command = ["transcribe", "--bundle", str(tmp_path / "tones"), str(audio), "--statistics"]
    network, ngram = str(tmp_path / "tones"), str(tmp_path / "tones" / "large_ngram.bin")
    assert main([*command, "--rnn-lm", network]) == 0
    errors = capsys.readouterr().err
    assert "mode rnn, " in errors and "hint" not in errors
    assert main([*command, "--large-ngram", ngram]) == 0
    errors = capsys.readouterr().err
    assert "mode interpolated, " in errors
    assert "hint: the mode is interpolated, because the bundle's default, rnn, does not use the given" in errors
    assert main([*command, "--large-ngram", ngram, "--mode", "interpolated"]) == 0
    assert "hint" not in capsys.readouterr().err
    second = ["--mode", "large_ngram", "--second-pass", "nbest", "--second-pass-mode", "rnn"]
    assert main([*command, "--rnn-lm", network, *second]) == 0
    capsys.readouterr()
    for unused in (["--rnn-lm", network, "--ngram-only"], ["--large-ngram", ngram, "--mode", "rnn"]):
        assert main([*command, *unused]) == 2
        assert f"{unused[0]} has no effect in the mode" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--workers", "99"], "--workers is 99; it must be between 0 and 64"),
        (["--search-beam", "-1"], "--search-beam is -1.0; it must be above 0"),
        (["--lm-device-mb", "1", "--lm-hidden-device", "cpu"], "--lm-device-mb keeps tables in host memory"),
        (["--mode", "ngram", "--rnn-weight", "0.5"], "--rnn-weight has no effect here"),
    ],
)
def test_errors_name_the_options_that_were_given(given, message, tiny_bundle_folder, tmp_path, capsys):
    (tmp_path / "a.wav").touch()
    assert main(["transcribe", "--bundle", str(tiny_bundle_folder), f"{tmp_path}/a.wav", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("lattice_format", ["kaldi", "slf"])
def test_jobs_that_share_a_folder_of_lattices(tmp_path, transcribe, tiny_bundle_folder, lattice_format):
    """Recordings of one name in two jobs, utterance ids with dots, and lattices of other recordings are all kept."""
    for folder in "ab":
        write(tmp_path / "in" / folder / "x.wav", tones(WORDS, seed=ord(folder)))
    folder = tmp_path / "lattices"
    options = ("--lattices", folder, "--lattice-format", lattice_format, "--no-lattice-gzip")
    for job in ("1/2", "2/2", "1/2"):
        assert transcribe(tmp_path / "in", *options, "--shard", job)[0] == 0
    (tmp_path / "wav.scp").write_text(f"u.1 {tmp_path}/in/a/x.wav\nu.2 {tmp_path}/in/b/x.wav\n")
    assert transcribe(tmp_path / "wav.scp", *options)[0] == 0
    assert transcribe(write(tmp_path / "other.wav", tones(WORDS)), *options)[0] == 0
    if lattice_format == "slf":
        assert sorted(path.stem for path in folder.glob("*.slf")) == ["other", "u.1", "u.2", "x", "x.2"]
        return
    num_words = len(Bundle.load(tiny_bundle_folder).graph.vocabulary)
    names = {path.name: [name for name, _ in read_kaldi_lattices(path, num_words)] for path in folder.glob("lattices*")}
    assert names == {"lattices.1.txt": ["x"], "lattices.2.txt": ["x.2"], "lattices.txt": ["u.1", "u.2", "other"]}


@pytest.mark.slow
def test_two_processes_do_not_write_to_one_archive_of_lattices(tmp_path, transcribe):
    path = write(tmp_path / "a.wav", tones(WORDS))
    options = ("--lattices", tmp_path / "lattices", "--lattice-format", "kaldi")
    assert transcribe(path, *options)[0] == 0
    archive = tmp_path / "lattices" / "lattices.txt.gz"
    before = archive.read_bytes()
    with archive.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, _, errors = transcribe(path, *options)
    assert code == 2 and "lattices.txt.gz: another process is writing to this output" in errors
    assert archive.read_bytes() == before
