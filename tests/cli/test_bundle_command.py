from __future__ import annotations

import json

import pytest

from asr.bundle import Bundle
from asr.cli.main import main
from asr.lm.ngram.file import save_ngram_lm
from asr.lm.rnn.network_file import save_network
from asr.recognizer import Recognizer
from asr.registered_network import save_weights
from tests.tiny_bundle import tones


@pytest.fixture
def parts(tiny_bundle_folder, tmp_path):
    """The exported parts, as training leaves them."""
    bundle = Bundle.load(tiny_bundle_folder)
    am = tmp_path / "am"
    am.mkdir()
    registered = bundle.acoustic_model
    description = {"class": registered.class_name, "arguments": registered.arguments}
    (am / "am.json").write_text(json.dumps({**description, "features": bundle.features.arguments}))
    save_weights(registered.network, am / "acoustic_model.safetensors", half_precision=True)
    bundle.graph.tokens.save(am / "tokens.txt")
    bundle.graph.save(tmp_path / "graph.safetensors")
    save_ngram_lm(bundle.small_ngram, tmp_path / "small.bin")
    save_network(bundle.rnn_lm.network, tmp_path / "rnn")
    (tmp_path / "decoding.yaml").write_text("on_the_fly: {lm_scale: 0.25}\n")
    (tmp_path / "card.md").write_text("# Card\n")
    return tmp_path


def arguments(parts, output, **changes):
    named = {
        "acoustic-model": parts / "am",
        "graph": parts / "graph.safetensors",
        "small-ngram": parts / "small.bin",
        "rnn-lm": parts / "rnn",
        "decoding": parts / "decoding.yaml",
        "card": parts / "card.md",
        **changes,
    }
    return ["bundle", str(output), *(text for name, path in named.items() for text in (f"--{name}", str(path)))]


def test_parts_become_a_bundle_that_recognizes(parts, capsys):
    assert main(arguments(parts, parts / "out")) == 0
    assert json.loads(capsys.readouterr().out)["bundle"] == str(parts / "out")
    recognizer = Recognizer.from_folder(parts / "out", mode="on_the_fly", first_pass="torch")
    assert recognizer.options.lm_scale == 0.25
    assert recognizer.bundle.card == "# Card\n"
    assert recognizer(tones(["SICK", "SKIP"]))[0].text == "SICK SKIP"


def test_wrong_parts_are_one_sentence(parts, capsys):
    (parts / "tokens.txt").write_text("<blk>\nA\nB\nC\nD\n")
    for changes, message in (
        ({"graph": parts / "none.safetensors"}, "none.safetensors"),
        ({"small-ngram": parts / "none.arpa"}, "none.arpa: the n-gram model cannot be read"),
        ({"decoding": parts / "card.md"}, "holds no mapping"),
        ({"acoustic-model": parts / "card.md"}, "a checkpoint needs --recipe"),
    ):
        assert main(arguments(parts, parts / "out", **changes)) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    (parts / "am" / "tokens.txt").write_text("<blk>\nA\nB\nC\nD\n")
    assert main(arguments(parts, parts / "out")) == 2
    assert "was built for other tokens" in capsys.readouterr().err
