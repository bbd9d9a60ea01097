"""`asr lm rnn measure`: perplexities of a network, of an n-gram model and of both, as the command prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asr.bundle import read_rnn_lm
from asr.cli.main import main
from asr.lm.rnn.export import save_network
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary

WORDS = "THE A CAT DOG SAT RAN FAR".split()
TEXT = "\n".join(["THE CAT SAT", "A DOG RAN FAR", "THE DOG SAT", "A CAT RAN"] * 20)


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    torch.manual_seed(1)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "list.txt").write_text("\n".join(WORDS))
    config = RNNLMConfig(embedding_size=8, hidden_size=8, maxent_order=3, maxent_size=97)
    save_network(RNNLanguageModel(Vocabulary.from_file(tmp_path / "list.txt"), config), tmp_path / "lm")
    ngram = ["lm", "ngram", "--text", str(tmp_path / "text.txt"), "--vocabulary", str(tmp_path / "list.txt")]
    assert main([*ngram, "--order", "2", "--binary", str(tmp_path / "2gram")]) == 0
    capsys.readouterr()
    return tmp_path


@pytest.mark.slow
def test_both_interpolations_are_at_least_as_good_as_the_better_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["lm", "rnn", "measure", str(folder / "lm"), "--text", str(folder / "text.txt")]
    assert main([*command, "--ngram", str(folder / "2gram"), "--log-linear-words", "100"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["words"] == TEXT.count(" ") + TEXT.count("\n") + 1
    assert report["interpolated_perplexity"] <= min(report["perplexity"], report["ngram_perplexity"]) + 1e-6
    log_linear = report["log_linear"]
    # The text repeats itself, so what is tuned on one part holds for the other.
    assert log_linear["perplexity"] <= min(log_linear["network_perplexity"], log_linear["ngram_perplexity"]) * 1.01


def test_the_normaliser_in_int8_is_near_float32(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["lm", "rnn", "measure", str(folder / "lm"), "--text", str(folder / "text.txt")]
    found = []
    for precision in ("float32", "int8"):
        assert main([*command, "--normalizer-precision", precision]) == 0
        found.append(json.loads(capsys.readouterr().out)["perplexity"])
    assert abs(found[1] / found[0] - 1) < 1e-3


@pytest.mark.slow
def test_a_bundles_network_is_measured_as_its_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = Path(__file__).parents[3] / "checkpoints" / "an4"
    network = read_rnn_lm(bundle).network
    assert isinstance(network, RNNLanguageModel)
    save_network(network, tmp_path / "lm", half_precision=False)
    (tmp_path / "text.txt").write_text("YES\nGO\nTWO FIVE ONE\n")
    found = []
    for model in (bundle, tmp_path / "lm"):
        assert main(["lm", "rnn", "measure", str(model), "--text", str(tmp_path / "text.txt")]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["unknown_words"] == 0


def test_what_does_not_fit_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["lm", "rnn", "measure", str(folder / "lm"), "--ngram", str(folder / "2gram")]
    assert main(command) != 0
    assert "--text" in capsys.readouterr().err
    short = [*command, "--text", str(folder / "text.txt"), "--log-linear-words", "1000"]
    assert main(short) != 0
    assert "lower --log-linear-words" in capsys.readouterr().err
    assert main([*command, "--text", str(folder / "text.txt"), "--log-linear-words", "-5"]) == 2
    assert "--log-linear-words -5: give a number of words" in capsys.readouterr().err
    for weight in ("2", "nan", "-0.1"):
        assert main([*command, "--text", str(folder / "text.txt"), "--ngram-weight", weight]) == 2
        assert "give a number from 0 to 1" in capsys.readouterr().err
    alone = ["lm", "rnn", "measure", str(folder / "lm"), "--text", str(folder / "text.txt")]
    for option, value in (("--ngram-weight", "0.5"), ("--log-linear-words", "100")):
        assert main([*alone, option, value]) == 2
        assert f"{option} combines the network with an n-gram model" in capsys.readouterr().err
    config = RNNLMConfig(embedding_size=8, hidden_size=8, output="class")
    save_network(RNNLanguageModel(Vocabulary(WORDS), config), folder / "classes")
    assert main([*alone[:3], str(folder / "classes"), *alone[4:], "--normalizer-precision", "int8"]) == 2
    assert "--normalizer-precision has no effect" in capsys.readouterr().err
    config = RNNLMConfig(embedding_size=8, hidden_size=8)
    save_network(RNNLanguageModel(Vocabulary(reversed(WORDS)), config), folder / "lm")
    assert main([*command, "--text", str(folder / "text.txt")]) != 0
    assert "word list differs" in capsys.readouterr().err
