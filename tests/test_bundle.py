from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from asr.bundle import Bundle, all_bundle_folders, read_rnn_lm
from asr.cli.main import main
from asr.decoding.build import available_modes, chosen_mode, language_models
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.rnn.export import save_network
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.recognizer import Recognizer
from asr.serialization import ModelSpec
from asr.text.symbols import SPECIAL_WORDS, UNK_ID, TokenTable, Vocabulary


@pytest.fixture
def folder(tiny_bundle_folder, tmp_path):
    return shutil.copytree(tiny_bundle_folder, tmp_path / "tones")


def edit(folder, change):
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest.pop("checksum", None)  # or every change would be taken for damage
    change(manifest)
    (folder / "bundle.json").write_text(json.dumps(manifest))


@pytest.mark.slow
@pytest.mark.parametrize("compress_ngrams", [False, True])
def test_saved_and_loaded_again_is_the_same(folder, tmp_path, compress_ngrams):
    bundle = Bundle.load(folder)
    bundle.save(tmp_path / "again", half_precision=False, compress_ngrams=compress_ngrams)
    again = Bundle.load(tmp_path / "again")
    for part in ("acoustic_model", "rnn_lm"):
        state, state_again = getattr(bundle, part).network.state_dict(), getattr(again, part).network.state_dict()
        assert state.keys() == state_again.keys()
        assert all(torch.equal(tensor, state_again[name]) for name, tensor in state.items())
    assert torch.equal(bundle.graph.score, again.graph.score)
    assert bundle.small_ngram.vocabulary == again.small_ngram.vocabulary
    tensors, tensors_again = bundle.small_ngram.arrays.tensors(), again.small_ngram.arrays.tensors()
    assert all(torch.equal(tensor, tensors_again[name]) for name, tensor in tensors.items())
    sizes = [(path / "small_ngram.bin").stat().st_size for path in (folder, tmp_path / "again")]
    assert (sizes[1] < sizes[0]) == compress_ngrams
    assert bundle.decoding == again.decoding == json.loads((folder / "bundle.json").read_text())["decoding"]
    assert again.card == "# Tones\n"


def test_the_parts_share_one_vocabulary(folder):
    bundle = Bundle.load(folder)
    assert bundle.graph.vocabulary is bundle.small_ngram.vocabulary is bundle.large_ngram.vocabulary


def test_word_vectors_are_stored_as_bytes(folder, tmp_path):
    bundle = Bundle.load(folder)
    bundle.save(tmp_path / "bytes", half_precision=False, byte_matrices=True)
    stored = load_file(tmp_path / "bytes" / "rnn_lm.safetensors")
    vectors = bundle.rnn_lm.network.embedding.weight
    assert stored["embedding.weight"].dtype == torch.int8 and "output.rows.weight" not in stored
    found = Bundle.load(tmp_path / "bytes").rnn_lm.network
    half_step = vectors.abs().amax(1, keepdim=True) / 254
    assert bool(((found.embedding.weight - vectors).abs() <= 1.001 * half_step).all())
    assert found.output.rows.weight.data_ptr() == found.embedding.weight.data_ptr()


def test_half_precision_halves_the_weights_and_loads_as_float32(folder, tmp_path):
    bundle = Bundle.load(folder)
    bundle.save(tmp_path / "half", half_precision=True)
    file = "acoustic_model.safetensors"
    assert (tmp_path / "half" / file).stat().st_size < 0.65 * (folder / file).stat().st_size
    for parameter in Bundle.load(tmp_path / "half").acoustic_model.network.parameters():
        assert parameter.dtype == torch.float32


def test_files_are_readable_by_whom_the_user_lets(folder, tmp_path):
    Bundle.load(folder).save(tmp_path / "again")
    (tmp_path / "other").write_text("")
    wanted = (tmp_path / "other").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "again").iterdir()} == {wanted}


def test_tied_weights_are_stored_once_and_stay_tied(folder):
    network = Bundle.load(folder).rnn_lm.network
    assert network.config.embedding_size != network.config.hidden_size
    names = [name for name, tensor in network.state_dict().items() if tensor.shape == network.embedding.weight.shape]
    assert len(names) >= 2
    assert len({network.state_dict()[name].data_ptr() for name in names}) == 1


def test_a_graph_file_is_copied_as_it_is(folder, tmp_path):
    bundle = Bundle.load(folder)
    bundle.save(tmp_path / "copy", graph_file=folder / "graph.safetensors")
    assert (tmp_path / "copy" / "graph.safetensors").read_bytes() == (folder / "graph.safetensors").read_bytes()


def test_no_bundle_is_one_sentence(tmp_path):
    with pytest.raises(AsrError, match="there is no bundle here"):
        Bundle.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="else"), "is not a bundle of this program"),
        (lambda m: m.update(version=99), "has version 99 and this program reads 1"),
        (lambda m: m.update(name="clear\x1b[2J"), r"the bundle's name 'clear\\x1b\[2J' is empty or cannot be printed"),
        (lambda m: m["files"].pop("graph.safetensors"), "graph.safetensors: the bundle has no checksum for this file"),
        (lambda m: m.pop("graph"), "the field 'graph' is missing"),
        (lambda m: m.update(default_mode=["rnn"]), "'default_mode' is missing or of the wrong kind"),
        (lambda m: m["acoustic_model"].update({"class": "os.system"}), "'os.system' is not one that files may name"),
        (lambda m: m["acoustic_model"]["arguments"].update(depth=3), "does not take the arguments"),
        (lambda m: m["acoustic_model"]["arguments"].update(hidden_dim=31), "weights do not fit the network"),
        (lambda m: m["features"]["arguments"].update(num_mel_bins=21), "per frame, but there are 21"),
        (
            lambda m: m["features"]["arguments"].update(sampling_rate=16000.5),
            r"bundle\.json: Fbank: sampling_rate is 16000\.5; give a whole number of Hz",
        ),
        (
            lambda m: m["features"].update({"class": "Samples", "arguments": {"sampling_rate": 16000.5}}),
            r"bundle\.json: Samples: sampling_rate is 16000\.5; give a whole number of Hz",
        ),
    ],
)
def test_a_wrong_description_is_one_sentence(folder, change, message):
    edit(folder, change)
    with pytest.raises(AsrError, match=message) as caught:
        Bundle.load(folder)
    assert "\n" not in str(caught.value)


def test_unfinished_bundles_are_not_chosen(tmp_path):
    for name in (".0123456789abcdef.new.an4", "an4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bundle.json").touch()
    assert all_bundle_folders(tmp_path) == [tmp_path / "an4"]


def test_wrong_decoding_options_are_told_with_bundle_and_mode(folder):
    edit(folder, lambda m: m.update(decoding={"ngram": {"search_beam": "wide"}}))
    with pytest.raises(
        AsrError, match=r"bundle tones: the decoding options of ngram are wrong: .*search_beam is 'wide'"
    ):
        Recognizer.from_folder(folder, mode="ngram")


def test_a_card_that_is_a_link_is_not_read(folder, tmp_path, capsys):
    (tmp_path / "secret").write_text("secret \x1b[2J")
    (folder / "card.md").unlink(missing_ok=True)
    (folder / "card.md").symlink_to(tmp_path / "secret")
    assert Bundle.load(folder).card == ""
    (folder / "card.md").unlink()
    (folder / "card.md").write_text("open \x1b[2J\n")
    assert main(["bundle", "info", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("\n\nopen \ufffd[2J\n")


def test_a_language_model_of_other_words_is_refused(folder, tmp_path):
    other = RNNLanguageModel(Vocabulary(["pat", "kit"]), RNNLMConfig(embedding_size=4, hidden_size=4))
    save_network(other, tmp_path / "rnn")
    bundle = Bundle.load(folder)
    with pytest.raises(
        AsrError, match=r"\('kit', ...\) has none of the \d+ words asked for .* language and letter case"
    ):
        bundle.with_language_models(rnn_lm=tmp_path / "rnn")
    with pytest.raises(AsrError, match="has none of"):
        replace(bundle, rnn_lm=read_rnn_lm(tmp_path / "rnn")).save(tmp_path / "bundle")


def test_a_folder_of_transformers_is_told_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        AsrError, match=rf"{tmp_path}: this is a folder of transformers; name it transformers:{tmp_path}"
    ):
        read_rnn_lm(tmp_path)


def test_words_that_a_given_language_model_lacks_are_told_once(folder, tmp_path, caplog, monkeypatch):
    bundle = Bundle.load(folder)
    words = bundle.graph.vocabulary.words[len(SPECIAL_WORDS) :]
    fewer = RNNLanguageModel(Vocabulary(words[1:]), RNNLMConfig(embedding_size=4, hidden_size=4))
    save_network(fewer, tmp_path / "rnn")
    compared, map_to = [], Vocabulary.map_to
    monkeypatch.setattr(Vocabulary, "map_to", lambda own, other: compared.append(len(other)) or map_to(own, other))
    found = bundle.with_language_models(rnn_lm=tmp_path / "rnn")
    language_models(found, "rnn", 1.0, torch.device("cpu"))
    told = f"The language model {tmp_path / 'rnn'} lacks 1 of {len(words)} words; they share the probability"
    assert [record.message.partition(" of its")[0] for record in caplog.records] == [told]
    # Once to see whether the words fit, once for the search.
    assert compared.count(len(fewer.vocabulary)) == 2


def test_words_that_a_bundles_models_lack_get_a_quarter_of_their_unknown(folder, caplog):
    bundle = Bundle.load(folder)
    graph = bundle.small_ngram
    start, first = graph.start(1), torch.tensor([len(SPECIAL_WORDS)])
    fewer = Vocabulary(graph.vocabulary.words[len(SPECIAL_WORDS) + 1 :])
    network = RNNLanguageModel(fewer, RNNLMConfig(embedding_size=4, hidden_size=4))
    changed = replace(bundle, rnn_lm=ModelSpec("RnnLm", {}, network))
    model = language_models(changed, "rnn", 1.0, torch.device("cpu")).model
    engine = CachedRNNLM(network)
    unknown, _ = engine.score(engine.start(1), torch.tensor([UNK_ID]))
    of_graph, _ = graph.score(start, first)
    found, _ = model.score(model.start(1), first)
    torch.testing.assert_close(found, unknown + math.log(0.25) - of_graph)
    assert "lacks" not in caplog.text  # the user of a bundle need not know

    external = language_models(bundle, "external", 1.0, torch.device("cpu"), external=engine).model
    torch.testing.assert_close(external.score(external.start(1), first)[0], found)
    assert f"lacks 1 of {len(fewer) - len(SPECIAL_WORDS) + 1} words" in caplog.text


def test_the_default_mode_is_kept_and_chosen_unless_a_given_language_model_needs_another(folder, tmp_path):
    bundle = replace(Bundle.load(folder), default_mode="ngram")
    assert chosen_mode(bundle, "auto") == "ngram"
    assert chosen_mode(bundle, "rnn") == "rnn"
    assert available_modes(bundle) == [
        "ngram",
        *(mode for mode in available_modes(Bundle.load(folder)) if mode != "ngram"),
    ]
    bundle.save(tmp_path / "copy")
    assert Bundle.load(tmp_path / "copy").default_mode == "ngram"
    other = bundle.with_language_models(rnn_lm=folder)
    assert chosen_mode(other, "auto") == chosen_mode(Bundle.load(folder), "auto") != "ngram"
    with pytest.raises(AsrError, match="the mode 'large_ngram' is not available; it has"):
        chosen_mode(replace(bundle, default_mode="large_ngram", large_ngram=None), "auto")


@pytest.mark.parametrize(
    ("default", "given", "expected"),
    [
        ("rnn", ["rnn_lm"], "rnn"),
        ("interpolated", ["rnn_lm", "large_ngram"], "interpolated"),
        ("large_ngram", ["large_ngram"], "large_ngram"),
        ("rnn", ["large_ngram"], "interpolated"),
        ("rnn", ["rnn_lm", "large_ngram"], "interpolated"),
        ("ngram", ["rnn_lm"], "interpolated"),
        (None, ["rnn_lm"], "interpolated"),
    ],
)
def test_the_default_mode_stays_if_it_uses_the_given_language_models(folder, default, given, expected):
    bundle = replace(Bundle.load(folder), default_mode=default)
    paths = {"rnn_lm": folder, "large_ngram": folder / "large_ngram.bin"}
    other = bundle.with_language_models(**{name: paths[name] for name in given})
    assert chosen_mode(other, "auto") == expected


def test_a_description_that_is_no_json(folder):
    (folder / "bundle.json").write_text("{")
    with pytest.raises(AsrError, match=r"bundle\.json: the bundle's description is damaged"):
        Bundle.load(folder)


@pytest.mark.parametrize("file", ["acoustic_model.safetensors", "graph.safetensors", "small_ngram.bin"])
def test_damaged_files_are_named(folder, file):
    path = folder / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(AsrError, match=rf"{file}: the checksum is not the one"):
        Bundle.load(folder)
    path.write_bytes(content[:100])
    with pytest.raises(AsrError, match=rf"{file}: the file has 100 bytes where the bundle names"):
        Bundle.load(folder)
    path.unlink()
    with pytest.raises(AsrError, match=rf"{file}: the bundle names this file, but it is missing"):
        Bundle.load(folder)


def test_a_graph_for_other_tokens_is_refused(folder, tmp_path):
    bundle = Bundle.load(folder)
    graph = bundle.graph
    tokens = TokenTable([*graph.tokens.tokens, "X"])
    bundle.graph = DecodingGraph(**{**vars(graph), "tokens": tokens})
    with pytest.raises(AsrError, match="has 5 outputs and the decoding graph reads 6 tokens"):
        bundle.save(tmp_path / "misfit")
