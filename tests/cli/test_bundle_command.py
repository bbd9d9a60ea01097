from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from asr.audio.fbank import Fbank
from asr.bundle import Bundle
from asr.cli.main import main
from asr.decoding.build import available_modes
from asr.graph.build import build_graph
from asr.lm.ngram.io import load_ngram_lm, save_ngram_lm
from asr.lm.rnn.export import save_network
from asr.recognizer import Recognizer
from asr.testing.tones import tones
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable


@pytest.fixture
def parts(tiny_bundle_folder, tmp_path):
    """The parts of a bundle, as training leaves them."""
    bundle = Bundle.load(tiny_bundle_folder)
    registered = bundle.acoustic_model
    network = {"class_path": f"asr.models.feedforward.{registered.class_name}", "init_args": registered.arguments}
    fbank = {"class_path": "asr.audio.fbank.Fbank", "init_args": bundle.features.arguments}
    recipe = {"model": {"init_args": {"network": network}}, "data": {"init_args": {"fbank": fbank}}}
    (tmp_path / "am.yaml").write_text(json.dumps(recipe))
    state = {f"average.network.{name}": value for name, value in registered.network.state_dict().items()}
    torch.save({"state_dict": state, "tokens": list(bundle.graph.tokens.tokens)}, tmp_path / "am.ckpt")
    torch.save({"state_dict": state, "tokens": ["<blk>", "A", "B", "C", "D"]}, tmp_path / "other.ckpt")
    bundle.graph.save(tmp_path / "graph.safetensors")
    save_ngram_lm(bundle.small_ngram, tmp_path / "small.bin")
    save_network(bundle.rnn_lm.network, tmp_path / "rnn")
    (tmp_path / "decoding.yaml").write_text("rnn: {lm_scale: 0.25}\n")
    (tmp_path / "card.md").write_text("# Card\n")
    return tmp_path


def arguments(parts, output, **changes):
    named = {
        "acoustic-model": parts / "am.ckpt",
        "recipe": parts / "am.yaml",
        "graph": parts / "graph.safetensors",
        "small-ngram": parts / "small.bin",
        "rnn-lm": parts / "rnn",
        "decoding": parts / "decoding.yaml",
        "card": parts / "card.md",
        **changes,
    }
    return ["bundle", str(output), *(text for name, path in named.items() if path for text in (f"--{name}", str(path)))]


@pytest.mark.slow
def test_parts_become_a_bundle_that_recognizes(parts, capsys):
    assert main(arguments(parts, parts / "out")) == 0
    assert json.loads(capsys.readouterr().out)["bundle"] == str(parts / "out")
    recognizer = Recognizer.from_folder(parts / "out", mode="rnn", decoder="token-passing")
    assert recognizer.options.lm_scale == 0.25
    assert recognizer.bundle.card == "# Card\n"
    assert recognizer(tones(["SICK", "SKIP"]))[0].text == "SICK SKIP"


@pytest.mark.parametrize("fbank", [None, {"class_path": "asr.audio.fbank.Fbank", "init_args": None}])
def test_a_recipe_without_filterbank_has_the_default(parts, fbank, capsys):
    """Lightning writes null into its `config.yaml` for what a recipe leaves out; this network reads other features."""
    recipe = json.loads((parts / "am.yaml").read_text())
    recipe["data"]["init_args"]["fbank"] = fbank
    (parts / "config.yaml").write_text(json.dumps(recipe))
    assert main(arguments(parts, parts / "out", recipe=parts / "config.yaml")) == 2
    assert f"features per frame, but there are {Fbank().feature_dim};" in capsys.readouterr().err


def test_a_recipe_with_a_wrong_filterbank_is_one_sentence(parts, capsys):
    recipe = json.loads((parts / "am.yaml").read_text())
    recipe["data"]["init_args"]["fbank"]["init_args"]["mels"] = 40
    (parts / "config.yaml").write_text(json.dumps(recipe))
    assert main(arguments(parts, parts / "out", recipe=parts / "config.yaml")) == 2
    assert "config.yaml: data.init_args.fbank: " in capsys.readouterr().err


def test_a_checkpoint_of_other_filterbanks_is_refused(parts, capsys):
    """Only dither, which is for training, may differ; checkpoints of earlier versions do not say."""
    content = torch.load(parts / "am.ckpt")
    trained = Fbank(**json.loads((parts / "am.yaml").read_text())["data"]["init_args"]["fbank"]["init_args"]).arguments
    torch.save({**content, "fbank": {**trained, "high_freq": 5600.0}}, parts / "am.ckpt")
    assert main(arguments(parts, parts / "out")) == 2
    error = capsys.readouterr().err
    assert "am.ckpt: it was trained on filterbanks with high_freq 5600.0, but " in error
    assert f"am.yaml has {trained['high_freq']}; give data.init_args.fbank the arguments of its training." in error
    torch.save({**content, "fbank": {**trained, "dither": 1.0}}, parts / "am.ckpt")
    assert main(arguments(parts, parts / "out")) == 0


@pytest.mark.slow
def test_the_acoustic_model_of_another_bundle(parts, tiny_bundle_folder):
    changes = {"acoustic-model": tiny_bundle_folder, "recipe": None, "rnn-lm": tiny_bundle_folder}
    command = [text for text in arguments(parts, parts / "out", **changes) if "decoding" not in text]
    assert main(command) == 0
    one, other = Bundle.load(parts / "out"), Bundle.load(tiny_bundle_folder)
    assert one.decoding == other.decoding
    assert one.rnn_lm.arguments == other.rnn_lm.arguments
    assert one.features.arguments == other.features.arguments
    for name, value in other.acoustic_model.network.state_dict().items():
        assert torch.equal(one.acoustic_model.network.state_dict()[name], value.half().to(value.dtype))


@pytest.mark.slow
def test_a_bundle_can_be_made_anew_from_its_own_parts(parts, capsys):
    assert main(arguments(parts, parts / "out")) == 0
    own = {"acoustic-model": parts / "out", "recipe": None, "graph": parts / "out" / "graph.safetensors"}
    own |= {"small-ngram": parts / "out" / "small_ngram.bin", "rnn-lm": parts / "out"}
    assert main(arguments(parts, parts / "out", **own)) == 0
    recognizer = Recognizer.from_folder(parts / "out", mode="rnn", decoder="token-passing")
    assert recognizer(tones(["SICK", "SKIP"]))[0].text == "SICK SKIP"


@pytest.mark.slow
def test_pronunciations_keep_the_stress_that_the_graph_has(parts):
    """Words have no exact times if their phones are not those of the graph."""
    lines = ["PAT AH0 T", "KIT K T", "SICK AH1 K", "SKIP AH1 K AH0", "TO T", "TWO T"]
    (parts / "lexicon").write_text("".join(f"{line}\n" for line in lines))
    checkpoint = torch.load(parts / "am.ckpt")
    tokens = TokenTable(["AH0", "AH1", "K", "T"])
    torch.save({**checkpoint, "tokens": list(tokens.tokens)}, parts / "am.ckpt")
    lexicon = Lexicon.from_file(parts / "lexicon", keep_stress=True)
    build_graph(lexicon, load_ngram_lm(parts / "small.bin"), tokens).save(parts / "graph.safetensors")
    assert main([*arguments(parts, parts / "out"), "--lexicon", str(parts / "lexicon")]) == 0
    assert dict(Bundle.load(parts / "out").lexicon.pronunciations) == dict(lexicon.pronunciations)
    assert main(arguments(parts, parts / "without")) == 0
    given = Recognizer.from_folder(parts / "without", mode="ngram", lexicon=parts / "lexicon").bundle.lexicon
    assert dict(given.pronunciations) == dict(lexicon.pronunciations)


@pytest.mark.slow
def test_the_default_mode_must_be_one_that_the_parts_allow(parts, capsys):
    assert main([*arguments(parts, parts / "out"), "--default-mode", "ngram"]) == 0
    assert Recognizer.from_folder(parts / "out").mode == "ngram"
    assert main([*arguments(parts, parts / "out"), "--default-mode", "large_ngram"]) == 2
    assert "the mode 'large_ngram' is not available; it has rnn" in capsys.readouterr().err
    assert Bundle.load(parts / "out").default_mode == "ngram"


def test_a_folder_that_cannot_be_made_is_one_sentence(parts, capsys):
    assert main(arguments(parts, parts / "card.md")) == 2
    assert "card.md: the folder cannot be written (File exists); name another one" in capsys.readouterr().err


@pytest.mark.slow
def test_wrong_parts_are_one_sentence(parts, capsys):
    (parts / "other.arpa").write_text(
        "\\data\\\nngram 1=4\n\n\\1-grams:\n-1 <unk>\n-99 <s>\n-1 </s>\n-1 UNHEARD\n\n\\end\\\n"
    )

    def decoding(text):
        path = parts / f"{len(list(parts.iterdir()))}.yaml"
        path.write_text(text)
        return path

    for changes, message in (
        ({"graph": parts / "none.safetensors"}, "none.safetensors"),
        ({"small-ngram": parts / "none.arpa"}, "none.arpa: the n-gram model cannot be read"),
        ({"decoding": parts / "card.md"}, "does not contain a mapping of names to values"),
        ({"decoding": decoding("a: [")}, "this is not valid YAML or JSON"),
        ({"decoding": decoding("on_fly: {lm_scale: 1}")}, "there is no mode 'on_fly'; there are rnn"),
        ({"decoding": decoding("ngram: 3")}, "the decoding options of ngram are 3; give names and numbers"),
        ({"decoding": decoding("ngram: {search_beam: wide}")}, "search_beam is 'wide'; it must be a number"),
        ({"decoding": decoding("ngram: {rnn_weight: x}")}, "rnn_weight is 'x'; it must be a number"),
        (
            {"acoustic-model": parts / "none.ckpt"},
            f"{parts / 'none.ckpt'}: there is no file, folder or bundle of this name; checkpoints/ has: an4",
        ),
        ({"rnn-lm": parts / "none"}, f"{parts / 'none'}: there is no file, folder or bundle of this name"),
        (
            {"large-ngram": parts / "other.arpa"},
            f"The language model {parts / 'other.arpa'} ('UNHEARD', ...) has none of",
        ),
        ({"acoustic-model": parts / "card.md"}, "card.md: no Lightning checkpoint can be read there"),
        ({"acoustic-model": parts / "rnn"}, "--recipe has no effect with a bundle"),
        # As many tokens, but others.
        (
            {"acoustic-model": parts / "other.ckpt"},
            "was built for other tokens: token 1 is 'K' in the graph and 'A' in the",
        ),
    ):
        assert main(arguments(parts, parts / "out", **changes)) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    assert (
        main(
            [*arguments(parts, parts / "out"), "--acoustic-model", *map(str, [parts / "am.ckpt", parts / "other.ckpt"])]
        )
        == 2
    )
    assert "other.ckpt: the checkpoint has other tokens than" in capsys.readouterr().err
    without_recipe = [
        text for text in arguments(parts, parts / "out") if text not in ("--recipe", str(parts / "am.yaml"))
    ]
    assert main(without_recipe) == 2
    assert "a checkpoint needs --recipe" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["recipe", "small-ngram", "denominator"])
def test_parts_that_an_external_network_cannot_use_are_refused(tmp_path, capsys, option):
    command = ["bundle", str(tmp_path / "out"), "--acoustic-model", "onnx:model.onnx", f"--{option}", "file"]
    assert main(command) == 2
    assert f"--{option} cannot be used with onnx:model.onnx" in capsys.readouterr().err


def test_a_folder_cannot_be_refreshed(tiny_bundle_folder, capsys):
    assert main(["bundle", "fetch", str(tiny_bundle_folder), "--refresh"]) == 2
    assert f"--refresh has no effect on {tiny_bundle_folder}" in capsys.readouterr().err


def test_info_lists_the_modes_that_the_parts_allow(tiny_bundle_folder, tmp_path, capsys):
    bundle = Bundle.load(tiny_bundle_folder)
    decoding = {"on_the_fly": {"search_beam": 9.0}, "interpolated": {}, "ngram": {"search_beam": 8.0}}
    for default_mode in ("rnn", None):
        whole = replace(bundle, decoding=decoding, default_mode=default_mode)
        whole.save(tmp_path / "whole")
        assert main(["bundle", "info", str(tmp_path / "whole"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["modes"] == available_modes(whole) and found["modes"][0] == (default_mode or "interpolated")
        assert found["decoding"]["rnn"] == {"search_beam": 9.0}
    replace(bundle, rnn_lm=None, large_ngram=None, decoding=decoding).save(tmp_path / "ngrams")
    assert main(["bundle", "info", str(tmp_path / "ngrams")]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("mode")]
    assert lines == ["mode ngram        search_beam 8.0"]


@pytest.mark.slow
def test_info_lists_the_part_for_adaptation(capsys):
    assert main(["bundle", "info", "librispeech", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["denominator"].endswith(" MB")
