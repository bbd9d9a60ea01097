"""Every option of recognition: from Python, from the command line and in bundles; without effect it is refused."""

from __future__ import annotations

import argparse
import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch

from asr.bundle import Bundle
from asr.cli.options import add_recognizer_arguments, given_options, recognizer_from
from asr.decoding.settings import MODES, DecodingOptions, ResourceOptions, setting_options
from asr.errors import AsrError
from asr.kernels.linear import has_byte_products
from asr.options import options_of
from asr.recognizer import Recognizer
from asr.results import StageTimes
from asr.streaming import StreamingOptions, StreamingRecognizer
from asr.testing.tones import TEXT, tones

SENTENCES = [line.split() for line in TEXT[:3]]

# For each option a value, the mode and fusion where it acts, and one where it does not.
LATTICE, SEARCH, CHUNKS = "lattice", "search", "chunks"
ACTS = {
    "search_beam": (9.0, ("ngram", LATTICE), None),
    "output_beam": (5.0, ("rnn", LATTICE), None),
    "min_active_states": (3, ("ngram", LATTICE), None),
    "max_active_states": (300, ("ngram", LATTICE), None),
    "am_scale": (0.9, ("ngram", LATTICE), None),
    "graph_scale": (0.9, ("ngram", LATTICE), None),
    "lm_scale": (0.9, ("large_ngram", LATTICE), ("ngram", LATTICE)),
    "word_insertion_penalty": (0.1, ("ngram", LATTICE), None),
    "skip_beam": (4.0, ("rnn", SEARCH), ("ngram", SEARCH)),
    "max_contexts_per_state": (2, ("rnn", SEARCH), ("ngram", LATTICE)),
    "context_beam": (4.0, ("rnn", CHUNKS), ("rnn", SEARCH)),
    "blank_skip_threshold": (0.9, ("ngram", LATTICE), None),
    "chunk_frames": (20, ("rnn", CHUNKS), ("rnn", LATTICE)),
    "lookahead_frames": (5, ("large_ngram", CHUNKS), ("ngram", CHUNKS)),
    "max_token_seconds": (9.0, ("ngram", LATTICE), None),
    "pause_seconds": (1.5, ("ngram", LATTICE), None),
    "sentence_pause_seconds": (0.5, None, ("ngram", LATTICE)),  # the bundle's graph has no tied states
    "mbr_scale": (1.5, ("ngram", LATTICE), None),
    "rnn_weight": (0.3, ("interpolated", LATTICE), ("rnn", LATTICE)),
    "carry_history": (True, ("rnn", LATTICE), ("large_ngram", LATTICE)),
    "second_pass": ("nbest", ("ngram", LATTICE), None),
    "second_pass_mode": ("large_ngram", None, ("rnn", LATTICE)),
    "second_pass_weight": (0.5, None, ("rnn", LATTICE)),
    "second_pass_sentences": (5, None, ("rnn", LATTICE)),
    "hidden_dtype": ("int8", ("rnn", LATTICE), ("large_ngram", LATTICE)),
    "recombination_length": (2, ("rnn", LATTICE), ("large_ngram", LATTICE)),
    "recombination": ("best", None, ("rnn", LATTICE)),
    "recombination_window": (9, None, ("rnn", LATTICE)),
    "history_precision": ("sign", ("interpolated", SEARCH), ("ngram", LATTICE)),
    "hidden_products": ("int8", ("rnn", LATTICE), ("large_ngram", LATTICE)),
}


@pytest.fixture(scope="module")
def bundle(tiny_bundle_folder):
    return Bundle.load(tiny_bundle_folder)


def test_all_options_are_here():
    assert set(ACTS) == set(setting_options())


@pytest.mark.parametrize("name", ACTS)
def test_an_option_acts_or_is_refused(bundle, name):
    value, acting, idle = ACTS[name]
    if acting is not None:
        mode, fusion = acting
        recognizer = Recognizer(bundle, mode, lm_fusion=fusion, options={name: value})
        assert any(getattr(part, name, None) == value for part in recognizer.settings.parts().values())
    if idle is not None:
        mode, fusion = idle
        with pytest.raises(AsrError, match=f"{name} has no effect here: it needs .*; leave it out"):
            Recognizer(bundle, mode, lm_fusion=fusion, options={name: value})


def test_the_second_pass_makes_its_options_act(bundle):
    second = {"second_pass": "nbest", "second_pass_mode": "interpolated", "second_pass_sentences": 5}
    recognizer = Recognizer(bundle, "ngram", options={**second, "rnn_weight": 0.3, "history_precision": "sign"})
    assert recognizer.settings.language_models.second_pass_sentences == 5
    with pytest.raises(AsrError, match="second_pass_sentences has no effect"):
        Recognizer(bundle, "ngram", options={**second, "second_pass": "lattice"})
    with pytest.raises(AsrError, match="context_beam has no effect"):
        Recognizer(bundle, "ngram", options={**second, "context_beam": 3.0})
    with pytest.raises(AsrError, match="mbr_scale has no effect"):
        Recognizer(bundle, "ngram", options={**second, "mbr_scale": 1.0})
    tuned = replace(bundle, decoding={"interpolated": {"mbr_scale": 1.0}})
    assert Recognizer(tuned, "ngram", options=second).final_options.mbr_scale is None
    assert Recognizer(tuned, "interpolated").final_options.mbr_scale == 1.0
    both = {"recombination_length": 2, "recombination": "best", "recombination_window": 9}
    assert Recognizer(bundle, "rnn", options=both).settings.cache.recombination_window == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"skip_beam": -1.0}}, "skip_beam is -1.0; it must be above 0"),
        ({"options": {"hidden_dtype": "int4"}}, "hidden_dtype is 'int4'; it must be one of float32, float16"),
        ({"options": {"hidden_products": "int4"}}, "hidden_products is 'int4'; it must be one of float32, int8"),
        ({"options": {"history_precision": 2}}, "history_precision is 2; it must be one of round-2, round-1, sign"),
        ({"options": {"recombination_length": 0}}, "recombination_length is 0; it must be between 1 and 1,000"),
        ({"options": {"recombination_length": 10**9}}, "recombination_length is 1000000000; it must be between"),
        ({"options": {"recombination_length": 10**30}}, "recombination_length is 10*; it must be below 2\\^63"),
        ({"options": {"recombination_window": -1}}, "recombination_window is -1; it must be 0 or more"),
        ({"options": {"max_contexts_per_state": 10**30}}, "max_contexts_per_state is 10*; it must be below 2\\^63"),
        ({"options": {"second_pass": "nbest", "second_pass_sentences": 10**30}}, "second_pass_sentences is 10*; it"),
        ({"options": {"max_active_states": 30.5}}, "max_active_states is 30.5; it must be a whole number"),
        ({"options": {"second_pass": "nbest", "second_pass_weight": 1.5}}, "second_pass_weight is 1.5; it must be be"),
        ({"options": {"second_pass": "nbest", "second_pass_sentences": 0}}, "second_pass_sentences is 0; give 1"),
        ({"options": {"second_pass": "nbest", "second_pass_mode": "big"}}, "second_pass_mode is 'big'; it must be"),
        ({"resources": {"lm_hidden_device": "tpu"}}, "lm_hidden_device tpu: there is no such device"),
        ({"resources": {"lm_output_device": "cuda:99"}}, "lm_output_device cuda:99: torch sees .* GPUs"),
        ({"mode": "large_ngram", "resources": {"cache_bytes": 10**6}}, "cache_bytes has no effect here"),
        ({"mode": "ngram", "resources": {"lm_hidden_device": "cpu"}}, "lm_hidden_device has no effect here"),
    ],
)
def test_a_wrong_value_is_one_sentence(bundle, arguments, message):
    with pytest.raises(AsrError, match=message):
        resources = ResourceOptions(**arguments.get("resources", {}))
        Recognizer(bundle, arguments.get("mode", "rnn"), options=arguments.get("options"), resources=resources)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("mode", "asr.load(..., mode=...)"),
        ("hot_words", "asr.load(..., hot_words=...)"),
        ("search_beam", "asr.load(..., options={'search_beam': ...})"),
        ("batch_seconds", "resources=asr.ResourceOptions(batch_seconds=...)"),
        ("sampling_rate", "recognizer(samples, 8000)"),
    ],
)
def test_what_a_built_recognizer_cannot_change_is_refused(bundle, name, cure):
    built = Recognizer(bundle, "rnn")
    for recognizer in (built, copy.deepcopy(built), pickle.loads(pickle.dumps(built)), built.half().float()):
        with pytest.raises(AsrError, match=f"^{name} cannot be set once a recognizer is built; ") as error:
            setattr(recognizer, name, "ngram")
        assert cure in str(error.value)
        assert recognizer.mode == "rnn"
        recognizer.load_state_dict(recognizer.state_dict())
        recognizer.acoustic_model = recognizer.acoustic_model  # networks may be replaced, such as by compiled ones
        recognizer.keep_lattices, recognizer.calibration, recognizer.mine = True, None, 1


def test_the_old_name_is_taken(bundle):
    assert Recognizer(bundle, "rnn", options={"word_beam": 4.0}).options.skip_beam == 4.0
    with pytest.warns(FutureWarning, match="word_beam is now skip_beam"):
        assert DecodingOptions(word_beam=3.0).skip_beam == 3.0
    tuned = replace(bundle, decoding={"rnn": {"word_beam": 6.0}})
    assert Recognizer(tuned, "rnn").options.skip_beam == 6.0
    assert Recognizer(tuned, "rnn", options={"skip_beam": 5.0}).options.skip_beam == 5.0


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_recognizer_arguments(parser)
    return parser.parse_args([*map(str, arguments)])


def test_the_command_line_has_every_option(tiny_bundle_folder, capsys):
    settings = {name: value for name, (value, _, _) in ACTS.items()}
    resources = {"cache_bytes": 3_000_000, "num_workers": 1, "lm_hidden_device": "cpu", "batch_seconds": 9.0}
    resources |= {
        "acoustic_precision": "float32",
        "max_segment_seconds": 8.0,
        "lm_device_bytes": 5_000_000,
        "lm_output_device": "cpu",
    }
    assert set(resources) == set(options_of(ResourceOptions))
    arguments = []
    for name, one in (setting_options() | options_of(ResourceOptions)).items():
        value = {**settings, **resources}[name]
        arguments += [one.flag] if one.kind is bool else [one.flag, value / 1e6 if one.unit else value]
    args = parsed(*arguments)
    assert given_options(args, setting_options()) == settings
    assert given_options(args, options_of(ResourceOptions)) == resources
    assert given_options(parsed("--no-carry-history"), setting_options()) == {"carry_history": False}
    assert given_options(parsed(), setting_options()) == {}
    args = parsed("--bundle", tiny_bundle_folder, "--word-beam", 4, "--mode", "rnn", "--cache-mb", 3)
    assert "--word-beam is now --skip-beam" in capsys.readouterr().err
    recognizer = recognizer_from(args)
    assert (recognizer.options.skip_beam, recognizer.resources.cache_bytes) == (4.0, 3_000_000)
    with pytest.raises(AsrError, match=r"--output-beam has no effect here: it needs a lattice \(--lm-fusion"):
        recognizer_from(parsed("--bundle", tiny_bundle_folder, "--ngram-only", "--output-beam", 4))
    # Minimum Bayes risk reads the lattice.
    args = parsed("--bundle", tiny_bundle_folder, "--ngram-only", "--output-beam", 4, "--mbr-scale", 1)
    assert recognizer_from(args).options.output_beam == 4.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_beam": 5.0}, "output_beam has no effect here"),
        ({"second_pass": "nbest", "second_pass_mode": "large_ngram"}, "streams have no second pass"),
    ],
)
def test_streams_refuse_what_they_cannot_do(bundle, options, message):
    recognizer = Recognizer(bundle, "rnn", decoder="token-passing", lm_fusion="search", options=options)
    with pytest.raises(AsrError, match=message):
        StreamingRecognizer(recognizer)


@pytest.mark.slow
def test_streams_whose_words_are_decided_early_have_the_model_in_the_search(bundle):
    recognizer = Recognizer(bundle, "rnn", decoder="token-passing", options={"context_beam": 5.0})
    StreamingRecognizer(recognizer)
    for options in (StreamingOptions(partial_policy="stable"), StreamingOptions(force_commit_seconds=5.0)):
        with pytest.raises(AsrError, match="context_beam has no effect here"):
            StreamingRecognizer(recognizer, options)
    recognizer = Recognizer(bundle, "rnn", decoder="token-passing", options={"mbr_scale": 1.0})
    with pytest.raises(AsrError, match="mbr_scale has no effect here: the words of the live search are final"):
        StreamingRecognizer(recognizer, StreamingOptions(partial_policy="stable"))
    tuned = replace(bundle, decoding={"rnn": {"mbr_scale": 1.0}})  # a bundle's own value is left out
    StreamingRecognizer(Recognizer(tuned, "rnn"), StreamingOptions(partial_policy="stable"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("ngram", {"second_pass": "nbest", "second_pass_mode": "interpolated"}),
        ("ngram", {"second_pass": "lattice", "second_pass_mode": "large_ngram"}),
        ("large_ngram", {"second_pass": "lattice", "second_pass_weight": 0.7}),
        ("rnn", {"hidden_dtype": "int8", "recombination_length": 2}),
        ("rnn", {"hidden_products": "int8"}),
        ("interpolated", {"mbr_scale": 0.8}),
        ("ngram", {"mbr_scale": 0.8, "second_pass": "lattice", "second_pass_mode": "large_ngram"}),
    ],
)
def test_the_words_are_found_in_every_way(bundle, mode, options):
    recognizer = Recognizer(bundle, mode, decoder="token-passing", options=options)
    waveforms = [tones(words, seed=9) for words in SENTENCES]
    results = recognizer(waveforms)
    assert [result.text.split() for result in results] == SENTENCES
    if "second_pass" in options:
        listed = recognizer(waveforms[:1], nbest=3)[0]
        assert listed.hypotheses[0].text == listed.text == results[0].text
        assert 1 < len(listed.hypotheses) <= 3
        assert bool(results[0].cache) == (options.get("second_pass_mode") != "large_ngram")


@pytest.mark.slow
def test_near_histories_share_hidden_states(bundle):
    waveforms = [tones(words, seed=9) for words in SENTENCES]
    wide = {"output_beam": 30.0, "context_beam": math.inf}
    options = {**wide, "history_precision": "sign"}
    shared = Recognizer(bundle, "rnn", decoder="token-passing", options=options)(waveforms)[0].cache
    exact = Recognizer(bundle, "rnn", decoder="token-passing", options=wide)(waveforms)[0].cache
    assert shared["num_shared_rows"] > 0 == exact["num_shared_rows"]
    assert shared["num_hidden_rows"] < exact["num_hidden_rows"]


def test_help_names_modes_and_choices(capsys):
    parser = argparse.ArgumentParser()
    add_recognizer_arguments(parser)
    text = " ".join(parser.format_help().split())
    for name in (*MODES, "--skip-beam", "--second-pass {none,lattice,nbest}", "--history-precision {round-2"):
        assert name in text
    assert "--word-beam" not in text


@pytest.mark.skipif(not has_byte_products(), reason="needs numba and AVX2")
def test_acoustic_precision(bundle):
    waveform = torch.sin(torch.arange(16000) / 7.0) * torch.linspace(0.0, 0.5, 16000)
    rough, exact = (
        Recognizer(bundle, "ngram", resources=ResourceOptions(acoustic_precision=precision))
        for precision in ("auto", "float32")
    )
    with torch.no_grad():
        features = exact._features([waveform], StageTimes())
        found, wanted = (each._log_prob(*features, StageTimes(), None)[0] for each in (rough, exact))
        assert torch.equal(wanted, bundle.acoustic_model.network(*features)[0])
    assert 0.0 < float((found - wanted).abs().max()) < 0.3
    with pytest.raises(AsrError, match="acoustic_precision is 'int4'"):
        ResourceOptions(acoustic_precision="int4")
