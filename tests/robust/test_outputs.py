"""No output destroys an input, mixes results of two recognizers, or is written by two processes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import soundfile

from asr.bundle import Bundle
from asr.cli.main import main
from asr.cli.output import ResultsFile
from asr.errors import AsrError
from asr.lm.rnn.export import load_network, save_network
from asr.testing.tones import TEXT, tones
from asr.text.symbols import Vocabulary
from scripts.benchmarks.robust_targets import _cut_of as cut_of


@pytest.fixture
def folder(tmp_path: Path, tiny_bundle_folder: Path, monkeypatch) -> Path:
    """Audio, texts and models of every kind."""
    for name, words in (("a", ["SICK", "SKIP"]), ("b", ["PAT", "KIT"])):
        soundfile.write(str(tmp_path / f"{name}.wav"), tones(words).numpy(), 16000, subtype="FLOAT")
    (tmp_path / "text").write_text("\n".join(TEXT) + "\n")
    (tmp_path / "lexicon").write_text("PAT P T\nKIT K T\nSICK S K\nSKIP S K P\nTO T\nTWO T\n")
    (tmp_path / "ref").write_text("a SICK SKIP\nb PAT KIT\n")
    (tmp_path / "hyp").write_text("a SICK SKIP\nb PAT TO\n")
    assert (
        main(["lm", "ngram", "--text", str(tmp_path / "text"), "--order", "2", "--arpa", str(tmp_path / "2.arpa")]) == 0
    )
    monkeypatch.chdir(tmp_path)
    Path("link-to-text").symlink_to("text")
    os.link("ref", "other-ref")
    for name, lines in (("words_text", "a-1 SICK\n"), ("ac_cost", "a-1 10\n"), ("lm_cost", "a-1 3\n")):
        (tmp_path / "lists").mkdir(exist_ok=True)
        (tmp_path / "lists" / name).write_text(lines)
    os.link("lists/ac_cost", "linked")
    (tmp_path / "trn").mkdir()
    for name in ("hyp", "ref"):
        (tmp_path / "trn" / f"{name}.trn").write_text("sick  skip (a)\n")
    shutil.copytree(tiny_bundle_folder, tmp_path / "tones")
    shutil.copy("a.wav", "rnn_lm_words.wav")
    shutil.copy("lexicon", "a.txt")
    shutil.copy("tones/graph.safetensors", "a.slf")
    (tmp_path / "lm").mkdir()
    shutil.copy("text", "lm/words.txt")
    (tmp_path / "cuts.jsonl").write_text(json.dumps(cut_of("file", str(tmp_path / "a.wav"))) + "\n")
    return tmp_path


COMMANDS = {
    "transcripts": ["evaluate", "hyp", "--reference", "ref", "--details", "ref"],
    "transcripts, hard link": ["evaluate", "hyp", "--reference", "ref", "--details", "other-ref"],
    "details over hypotheses": ["evaluate", "hyp", "--reference", "ref", "--details", "./hyp"],
    "n-gram": ["lm", "ngram", "--text", "text", "--arpa", "text"],
    "n-gram, link": ["lm", "ngram", "--text", "text", "--arpa", "link-to-text"],
    "n-gram from ARPA": ["lm", "ngram", "--from-arpa", "2.arpa", "--binary", "2.arpa"],
    "n-gram vocabulary": ["lm", "ngram", "--text", "text", "--vocabulary", "lexicon", "--write-vocabulary", "lexicon"],
    "vocabulary": ["lm", "vocabulary", "text", "--text", "text"],
    "graph over lexicon": ["graph", "--lexicon", "lexicon", "--arpa", "2.arpa", "--output", "lexicon"],
    "graph over ARPA": ["graph", "--lexicon", "lexicon", "--arpa", "2.arpa", "--output", "2.arpa"],
    "transcribe": ["transcribe", "--bundle", "{bundle}", "a.wav", "--output", "a.wav"],
    "stream": ["transcribe", "--bundle", "{bundle}", "--stream", "a.wav", "--output", "a.wav"],
    "stream over text": ["transcribe", "--bundle", "{bundle}", "--stream", "a.wav", "--output", "text"],
    "transcribe over text": ["transcribe", "--bundle", "{bundle}", "a.wav", "--output", "text"],
    "rescored over a list": ["rescore", "lists", "--ngram", "2.arpa", "--output", "lists/words_text"],
    "rescored over a list, hard link": ["rescore", "lists", "--ngram", "2.arpa", "--output", "linked"],
    "rescored over a bundle": ["rescore", "lists", "--bundle", "tones", "--output", "tones/bundle.json"],
    "details over a bundle": [
        *("evaluate", "--cuts", "cuts.jsonl", "--bundle", "tones", "--details", "tones/graph.safetensors")
    ],
    "exported transcripts": ["evaluate", "trn/hyp.trn", "--reference", "trn/ref.trn", "--export", "trn"],
    "exported network": ["export", "tones", "--format", "torchscript", "--output", "tones/bundle.json"],
    "graph over a bundle": [
        *(
            "graph",
            "--lexicon",
            "lexicon",
            "--arpa",
            "2.arpa",
            "--tokens",
            "tones",
            "--output",
            "tones/graph.safetensors",
        )
    ],
    "files over a lexicon": [
        *(
            "transcribe",
            "--bundle",
            "tones",
            "a.wav",
            "--lexicon",
            "a.txt",
            "--output-dir",
            ".",
            "--output-format",
            "txt",
        )
    ],
    "files over a bundle": [
        *("transcribe", "--bundle", "tones", "rnn_lm_words.wav", "--output-dir", "tones", "--output-format", "txt,srt")
    ],
    "lattices over a graph": [
        *("transcribe", "--bundle", "tones", "a.wav", "--graph", "a.slf", "--lattices", ".", "--output", "new")
    ],
    "exported model over its checkpoint": ["lm", "rnn", "export", "lm/words.txt", "lm"],
    "details over a recording": ["evaluate", "--cuts", "cuts.jsonl", "--bundle", "tones", "--details", "a.wav"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_output_destroys_an_input(folder: Path, tiny_bundle_folder: Path, command: list[str], capsys) -> None:
    if "--cuts" in command:
        pytest.importorskip("lhotse")
    before = contents(folder)
    assert main([part.format(bundle=tiny_bundle_folder) for part in command]) == 2
    error = capsys.readouterr().err
    assert "is an input of the same command" in error or "is not output of this command" in error
    assert error.count("\n") == 1
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def transcribe(bundle: Path, *arguments: str) -> int:
    return main(["transcribe", "--bundle", str(bundle), "a.wav", "b.wav", "--output", "out", *arguments])


def records(path: str = "out") -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.slow
def test_results_of_another_recognizer_are_not_mixed(folder: Path, tiny_bundle_folder: Path, capsys) -> None:
    assert transcribe(tiny_bundle_folder, "--mode", "ngram") == 0
    found = records()
    assert [record["text"] for record in found] == ["SICK SKIP", "PAT KIT"]
    assert len({record["made_by"] for record in found}) == 1
    assert transcribe(tiny_bundle_folder, "--mode", "ngram", "--batch-seconds", "3") == 0  # changes no words
    Path("out").write_text(json.dumps(found[0]) + "\n")
    for other in (["--mode", "rnn"], ["--mode", "ngram", "--search-beam", "7"], ["--mode", "ngram", "--stream"]):
        capsys.readouterr()
        assert transcribe(tiny_bundle_folder, *other) == 2
        assert "was recognized by 'tones ngram" in capsys.readouterr().err
        assert records() == found[:1]
    assert transcribe(tiny_bundle_folder, "--mode", "ngram") == 0
    assert [record["audio"] for record in records()] == ["a.wav", "b.wav"]


@pytest.mark.slow
def test_a_failure_is_written_once(folder: Path, tiny_bundle_folder: Path) -> None:
    (folder / "b.wav").write_text("no audio")
    for _ in range(3):
        assert transcribe(tiny_bundle_folder) == 1
    assert [("error" in record, record["audio"]) for record in records()] == [(False, "a.wav"), (True, "b.wav")]
    soundfile.write("b.wav", tones(["PAT", "KIT"]).numpy(), 16000, subtype="FLOAT")
    assert transcribe(tiny_bundle_folder) == 0
    assert records()[-1]["text"] == "PAT KIT"


@pytest.mark.slow
def test_two_processes_do_not_write_to_one_output(folder: Path, tiny_bundle_folder: Path, capsys) -> None:
    with ResultsFile(Path("out"), "audio") as other:
        assert transcribe(tiny_bundle_folder) == 2
        assert "another process is writing to this output" in capsys.readouterr().err
        other.add({"audio": "a.wav", "text": "MINE"})
    assert transcribe(tiny_bundle_folder) == 0
    assert [record["text"] for record in records()] == ["MINE", "PAT KIT"]


def test_an_exported_network_is_replaced_as_a_whole(tmp_path: Path, tiny_bundle_folder: Path, monkeypatch) -> None:
    network = Bundle.load(tiny_bundle_folder).rnn_lm.network  # type: ignore[union-attr]
    save_network(network, tmp_path / "lm")  # type: ignore[arg-type]
    before = contents(tmp_path)
    monkeypatch.setattr("asr.lm.rnn.export.save_weights", full_disk)
    with pytest.raises(AsrError, match="No space left on device"):
        save_network(network, tmp_path / "lm")  # type: ignore[arg-type]
    assert contents(tmp_path) == before
    load_network(tmp_path / "lm")


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_words_of_an_n_gram_are_replaced_as_a_whole(folder: Path, monkeypatch, capsys) -> None:
    Path("words").write_text("BEFORE\n")
    before = contents(Path())

    def half(self: Vocabulary, path: Path) -> None:
        Path(path).write_text("SI")
        full_disk()

    monkeypatch.setattr(Vocabulary, "save", half)
    assert main(["lm", "ngram", "--text", "text", "--write-vocabulary", "words"]) == 2
    assert "asr: error: words: the file cannot be written (No space left on device)" in capsys.readouterr().err
    assert contents(Path()) == before


def test_an_unfinished_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"audio": "a", "text": "X"}\n{"audio": "b", "te')
    with ResultsFile(path, "audio") as output:
        assert list(output.done) == ["a"]
        output.add({"audio": "b", "text": "Y"})
    assert path.read_text() == '{"audio": "a", "text": "X"}\n{"audio": "b", "text": "Y"}\n'
    path.write_text("my thesis")
    with pytest.raises(AsrError, match="this line is not output"):
        ResultsFile(path, "audio")
    assert path.read_text() == "my thesis"
    with pytest.raises(AsrError, match=r"the output cannot be written \(Is a directory\); name another one\."):
        ResultsFile(tmp_path, "audio")


def test_loops_that_an_earlier_version_compiled_are_compiled_again(tmp_path: Path, monkeypatch) -> None:
    numba = pytest.importorskip("numba")
    from asr.kernels.jit import _forgive_stale_cache

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for _ in range(2):
        compiled = numba.njit(cache=True)(add_one)
        _forgive_stale_cache(compiled._cache)
        assert compiled(1) == 2
        (index,) = tmp_path.rglob("*.nbi")
        index.write_bytes(index.read_bytes()[:60] + b"?" * 50)


def add_one(value: int) -> int:
    return value + 1


@pytest.mark.slow
def test_a_single_hyphen_is_standard_output(folder: Path, tiny_bundle_folder: Path, capsys) -> None:
    command = ["transcribe", "--bundle", str(tiny_bundle_folder), "--ngram-only", "a.wav"]
    for arguments in (["--nbest", "2"], ["--stream"]):
        assert main([*command, "--output", "-", *arguments]) == 0
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert records[-1]["text"] == "SICK SKIP"
    assert main([*command, "--output", "-", "--output-format", "srt"]) == 2
    assert "--output always writes JSON Lines" in capsys.readouterr().err
    rescore = ["rescore", "lists", "--ngram", "2.arpa"]
    assert main(rescore) == 0
    printed = capsys.readouterr().out
    assert main([*rescore, "--output", "-"]) == 0
    assert capsys.readouterr().out == printed != ""
    assert not Path("-").exists()


FILES_ONLY = {
    "n-gram": ["lm", "ngram", "--text", "text", "--arpa", "-"],
    "binary n-gram": ["lm", "ngram", "--text", "text", "--binary", "-"],
    "words of an n-gram": ["lm", "ngram", "--text", "text", "--write-vocabulary", "-"],
    "vocabulary": ["lm", "vocabulary", "-", "--text", "text"],
    "recurrent model": ["lm", "rnn", "export", "checkpoint", "-"],
    "graph": ["graph", "--lexicon", "lexicon", "--arpa", "2.arpa", "--output", "-"],
    "network": ["export", "tones", "--format", "torchscript", "--output", "-"],
    "bundle": ["bundle", "-", "--acoustic-model", "tones"],
    "fetched bundle": ["bundle", "fetch", "tones", "--output", "-"],
    "corpus": ["prepare", "kaldi", "--corpus", ".", "--output", "-"],
    "chain": ["chain", "--corpora", "a:train=.", "--lexicon", "lexicon", "--bundle", "tones", "--output", "-"],
    "page": ["report", "a.json", "--output", "-"],
    "details": ["evaluate", "hyp", "--reference", "ref", "--details", "-"],
    "exported transcripts": ["evaluate", "hyp", "--reference", "ref", "--export", "-"],
    "evaluation": ["evaluate", "--bundle", "tones", "--cuts", "cuts.jsonl", "--output", "-"],
    "transcripts": ["transcribe", "--bundle", "tones", "a.wav", "--output-dir", "-"],
    "lattices": ["transcribe", "--bundle", "tones", "a.wav", "--lattices", "-"],
}


@pytest.mark.parametrize("command", FILES_ONLY.values(), ids=FILES_ONLY)
def test_other_outputs_cannot_be_standard_output(folder: Path, command: list[str], capsys) -> None:
    pytest.importorskip("lhotse")
    assert main(command) == 2
    assert "-: this output cannot go to standard output" in capsys.readouterr().err
    assert not Path("-").exists()


@pytest.mark.slow
def test_streams_of_other_options_do_not_mix(folder: Path, tiny_bundle_folder: Path, capsys) -> None:
    command = ["transcribe", "--bundle", str(tiny_bundle_folder), "--mode", "rnn", "--stream", "--output", "out"]
    assert main([*command, "a.wav"]) == 0
    for change in (["--right-seconds", "0.3"], ["--partials", "best"], ["--longest-utterance", "20"]):
        assert main([*command, "b.wav", *change]) == 2
        assert "a.wav was recognized by" in capsys.readouterr().err
    # Memory and the number of streams affect no words.
    assert main([*command, "b.wav", "--cache-mb", "100", "--streams", "2"]) == 0
    makers = {json.loads(line)["made_by"] for line in Path("out").read_text().splitlines()}
    assert len(makers) == 1
