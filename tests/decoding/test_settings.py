"""Options of recognition: what is out of range is refused, and so is what would have no effect."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from asr.decoding.settings import (
    EXTERNAL_MODE,
    NEEDS,
    WHOLE_RECORDINGS,
    DecodingOptions,
    LanguageModelOptions,
    Pass,
    ResourceOptions,
    Settings,
    refuse_unused,
    setting_options,
)
from asr.errors import AsrError
from asr.lm.cached.approximations import CacheOptions

NO_SECOND = LanguageModelOptions()
LATTICE, NBEST = LanguageModelOptions(second_pass="lattice"), LanguageModelOptions(second_pass="nbest")
BEST = CacheOptions(recombination_length=3, recombination="best")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_wrong_lengths_of_segments_and_batches_are_one_sentence(seconds: float) -> None:
    with pytest.raises(AsrError, match=r"max_segment_seconds is .*; give 1 second or more"):
        ResourceOptions(max_segment_seconds=seconds)
    with pytest.raises(AsrError, match=r"batch_seconds is .*; it must be above 0, and finite"):
        ResourceOptions(batch_seconds=seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers is -1; it must be between 0 and 64"),
        ({"num_workers": 65}, "num_workers is 65; it must be between 0 and 64"),
        ({"lm_hidden_device": "nowhere"}, "lm_hidden_device"),
        ({"lm_device_bytes": 1, "lm_output_device": "cpu"}, "lm_device_bytes keeps tables in host memory"),
        ({"lm_device_bytes": 1, "lm_hidden_device": "cpu"}, "lm_device_bytes keeps tables in host memory"),
    ],
)
def test_wrong_resources_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AsrError, match=message):
        ResourceOptions(**options)


def test_what_lies_at_the_limits_is_accepted() -> None:
    for num_workers in (0, 64):
        assert ResourceOptions(num_workers=num_workers, max_segment_seconds=1.0, batch_seconds=0.5)
    for weight in (0.0, 1.0):
        assert LanguageModelOptions(rnn_weight=weight, second_pass_weight=weight, second_pass_sentences=1)
    assert ResourceOptions(lm_device_bytes=1) and ResourceOptions(lm_hidden_device="cpu", lm_output_device="cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"search_beam": 1e-3, "output_beam": 1e-3, "skip_beam": 1e-3, "context_beam": 1e-3, "mbr_scale": 1e-3},
        {"am_scale": 1e6, "graph_scale": 1e6, "lm_scale": 0.0, "word_insertion_penalty": -1e6},
        {"min_active_states": 0, "max_active_states": 1},
        {"min_active_states": 5, "max_active_states": 5},
        {"min_active_states": 2**63 - 1, "max_active_states": 2**63 - 1},
        {"chunk_frames": 1, "lookahead_frames": 0},
        {"chunk_frames": 2**31 - 3, "lookahead_frames": 2},
        {"max_contexts_per_state": 1, "blank_skip_threshold": 1e-3, "max_token_seconds": 1e-3},
        {"blank_skip_threshold": 0.999},
    ],
)
def test_beams_and_scales_at_the_limits_are_accepted_and_kept(options: dict[str, Any]) -> None:
    found = asdict(DecodingOptions(**options))
    assert {name: found[name] for name in options} == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: 0.0}, f"{name} is 0.0; it must be above 0") for name in ("search_beam", "output_beam", "am_scale")),
        *(({name: math.nan}, f"{name} is nan; it must be above 0") for name in ("skip_beam", "context_beam")),
        *(
            ({name: 0.0}, f"{name} is 0.0; it must be above 0")
            for name in ("max_token_seconds", "pause_seconds", "sentence_pause_seconds")
        ),
        ({"mbr_scale": 0.0}, "mbr_scale is 0.0; it must be above 0"),
        ({"sentence_pause_seconds": 61.0}, "sentence_pause_seconds is 61.0; it must be at most 60, or inf"),
        ({"am_scale": 1.1e6}, "am_scale is 1100000.0; it must be a finite number, at most 1e\\+06"),
        ({"lm_scale": -0.5}, "lm_scale is -0.5; it must be 0 or more"),
        ({"graph_scale": -0.5}, "graph_scale is -0.5; it must be 0 or more"),
        ({"graph_scale": -1.1e6}, "graph_scale is -1100000.0; it must be a finite number"),
        ({"lm_scale": math.nan}, "lm_scale is nan; it must be a finite number"),
        ({"word_insertion_penalty": math.inf}, "word_insertion_penalty is inf; it must be a finite number"),
        ({"min_active_states": -1}, "min_active_states is -1 and max_active_states 7000"),
        ({"min_active_states": 0, "max_active_states": 0}, "min_active_states is 0 and max_active_states 0"),
        ({"min_active_states": 6, "max_active_states": 5}, "choose 0 <= min_active_states <= max_active_states"),
        ({"max_active_states": 2**63}, "it must be below 2\\^63"),
        ({"chunk_frames": 2**31 - 3, "lookahead_frames": 3}, "give at least 1 and 0, below 2\\^31 together"),
        ({"max_contexts_per_state": 0}, "max_contexts_per_state is 0; give at least 1"),
        ({"max_contexts_per_state": 2**63}, "max_contexts_per_state is 9223372036854775808; it must be below 2"),
        ({"blank_skip_threshold": 0.0}, "blank_skip_threshold is 0.0; it must be above 0 and below 1"),
        ({"blank_skip_threshold": 1.0}, "blank_skip_threshold is 1.0; it must be above 0 and below 1"),
    ],
)
def test_beams_and_scales_beyond_the_limits_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AsrError, match=f"decoding options: .*{message}"):
        DecodingOptions(**options)


def test_what_is_wider_than_any_score_is_without_a_limit() -> None:
    names = ("search_beam", "output_beam", "skip_beam", "context_beam")
    assert {getattr(DecodingOptions(**{name: 1.1e30}), name) for name in names} == {math.inf}
    assert DecodingOptions(search_beam=1e30).search_beam == 1e30
    assert DecodingOptions(mbr_scale=math.inf).mbr_scale is None and DecodingOptions(mbr_scale=2.0).mbr_scale == 2.0
    assert DecodingOptions(pause_seconds=math.inf).pause_seconds is None
    assert DecodingOptions(sentence_pause_seconds=math.inf).sentence_pause_seconds is None
    assert DecodingOptions(mbr_scale=1e308).mbr_scale is None  # times a score of -10 it would be -inf


def test_numbers_of_other_types_become_those_of_the_option() -> None:
    # Kernels are compiled for the types of their arguments, and not all compile for whole numbers.
    options = DecodingOptions(
        search_beam=20, output_beam=np.float32(8.0), skip_beam=7, min_active_states=np.int64(2), max_active_states=30
    )
    expected = DecodingOptions(
        search_beam=20.0, output_beam=8.0, skip_beam=7.0, min_active_states=2, max_active_states=30
    )
    assert options == expected
    types = ({name: type(value) for name, value in asdict(each).items()} for each in (options, expected))
    assert next(types) == next(types)


@pytest.mark.parametrize(
    "options",
    [{"rnn_weight": -0.1}, {"second_pass_weight": 1.1}, {"rnn_weight": math.nan}, {"second_pass_sentences": 0}],
)
def test_wrong_weights_and_numbers_of_sentences_are_one_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(AsrError, match=f"language model options: {next(iter(options))} is"):
        LanguageModelOptions(**options)


def test_what_a_bundle_leaves_out_has_the_value_it_was_tuned_with() -> None:
    """A bundle stores the options that were tuned; with another default for the others it would find other words."""
    assert asdict(Settings()) == {
        "decoding": {
            "search_beam": 20.0, "output_beam": 8.0, "min_active_states": 30, "max_active_states": 7000,
            "am_scale": 1.0, "graph_scale": 1.0, "lm_scale": 1.0, "word_insertion_penalty": 0.0,
            "skip_beam": None, "max_contexts_per_state": None, "context_beam": 10.0, "blank_skip_threshold": None,
            "chunk_frames": 100, "lookahead_frames": 12, "max_token_seconds": None,
            "pause_seconds": 0.5, "sentence_pause_seconds": 0.25, "mbr_scale": None,
        },
        "language_models": {
            "rnn_weight": 0.5, "carry_history": False, "second_pass": "none", "second_pass_mode": "rnn",
            "second_pass_weight": 1.0, "second_pass_sentences": 1000,
        },
        "cache": {
            "hidden_dtype": "float32", "cache_scores": True, "cache_hidden": True, "cache_history_normalizers": True,
            "cache_group_normalizers": True, "cache_tree_paths": True, "recombination_length": None,
            "recombination": "first", "recombination_window": 50, "history_precision": None,
            "hidden_products": "float32", "capacity_bytes": None, "batching": "frame", "compiled": True,
            "loop_room": 1024, "held_projections": 256,
        },
        "given": frozenset(),
    }  # fmt: skip


def test_by_default_one_batch_is_decoded_after_the_other_within_a_gigabyte() -> None:
    assert asdict(ResourceOptions()) == {
        "max_segment_seconds": 25.0, "batch_seconds": None, "num_workers": 0, "cache_bytes": 2**30,
        "lm_device_bytes": None, "acoustic_precision": "auto", "lm_hidden_device": None, "lm_output_device": None,
    }  # fmt: skip


def test_a_flat_mapping_is_divided_among_the_parts() -> None:
    settings = Settings.of({"search_beam": 7.0, "rnn_weight": 0.25, "recombination_length": 4}, given=["word_beam"])
    assert settings.decoding == DecodingOptions(search_beam=7.0)
    assert settings.models == (LanguageModelOptions(rnn_weight=0.25), CacheOptions(recombination_length=4))
    assert settings.given == {"skip_beam"} and settings == replace(settings, **settings.parts())
    with pytest.raises(AsrError, match="no decoding option 'beam'; there are am_scale"):
        Settings.of({"beam": 3.0})


@pytest.mark.parametrize(
    ("need", "meets", "does_not"),
    [
        ("large model", Pass("large_ngram", "lattice", NO_SECOND, CacheOptions()), ("ngram", "lattice", NO_SECOND)),
        ("large model", Pass("ngram", "search", NBEST, CacheOptions()), ("ngram", "chunks", NO_SECOND)),
        (
            "recurrent model",
            Pass("interpolated", "search", NO_SECOND, CacheOptions()),
            ("large_ngram", "search", NO_SECOND),
        ),
        ("recurrent model", Pass("ngram", "search", LATTICE, CacheOptions()), (EXTERNAL_MODE, "search", NO_SECOND)),
        ("carried history", Pass(EXTERNAL_MODE, "search", NO_SECOND, CacheOptions()), ("rnn", "search", NBEST)),
        ("carried history", Pass("rnn", "search", NO_SECOND, CacheOptions()), ("large_ngram", "search", NO_SECOND)),
        ("recombination length", Pass("rnn", "search", NO_SECOND, BEST), ("rnn", "search", NO_SECOND)),
        ("recombination best", Pass("rnn", "search", NO_SECOND, BEST), ("rnn", "search", NO_SECOND)),
        ("both models", Pass("interpolated", "search", NO_SECOND, CacheOptions()), ("rnn", "search", NO_SECOND)),
        ("rescoring", Pass("rnn", "chunks", NO_SECOND, CacheOptions()), ("rnn", "search", NBEST)),
        ("rescoring", Pass("ngram", "search", LATTICE, CacheOptions()), ("ngram", "lattice", NO_SECOND)),
        ("chunks", Pass("rnn", "chunks", NO_SECOND, CacheOptions()), ("ngram", "chunks", NO_SECOND)),
        ("chunks", Pass(EXTERNAL_MODE, "chunks", NO_SECOND, CacheOptions()), ("rnn", "lattice", NO_SECOND)),
        ("lattice", Pass("ngram", "search", NO_SECOND, CacheOptions(), True), ("ngram", "search", NO_SECOND)),
        ("lattice", Pass("rnn", "search", NBEST, CacheOptions()), ("rnn", "search", NO_SECOND)),
        ("second pass", Pass("rnn", "search", LATTICE, CacheOptions()), ("rnn", "lattice", NO_SECOND)),
        ("second pass nbest", Pass("rnn", "search", NBEST, CacheOptions()), ("rnn", "search", LATTICE)),
        ("rescored lattice", Pass("rnn", "search", LATTICE, CacheOptions()), ("rnn", "search", NBEST)),
    ],
)
def test_an_option_without_effect_is_refused(
    need: str, meets: Pass, does_not: tuple[str, str, LanguageModelOptions]
) -> None:
    needy = [replace(next(iter(setting_options().values())), needs=need)]
    refuse_unused(needy, meets)
    with pytest.raises(
        AsrError, match=f"has no effect here: it needs .*, and this recognizer has the mode {does_not[0]}"
    ):
        refuse_unused(needy, Pass(*does_not, CacheOptions()))


def test_recombination_by_the_first_history_has_no_best_one() -> None:
    _, has_best = NEEDS["recombination best"]
    assert not has_best(Pass("rnn", "search", NO_SECOND, CacheOptions(recombination_length=3)))


def test_every_option_may_be_given_for_whole_recordings() -> None:
    _, has_recordings = NEEDS[WHOLE_RECORDINGS]
    assert has_recordings(Pass("ngram", "search", NO_SECOND, CacheOptions()))
    _, has_lattice = NEEDS["lattice"]
    assert not has_lattice(Pass("ngram", "search", NO_SECOND, CacheOptions()))
