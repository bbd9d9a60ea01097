from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from asr.bundle import Bundle
from asr.decoding.build import MODES, available_modes
from asr.errors import AsrError
from asr.lm import offload
from asr.recognizer import Recognizer
from asr.streaming import StreamingRecognizer
from tests.tiny_bundle import RATE, TEXT, tones

SENTENCES = [line.split() for line in TEXT[:5]]


@pytest.fixture(scope="module")
def bundle(tiny_bundle_folder):
    return Bundle.load(tiny_bundle_folder)


@pytest.fixture(scope="module")
def recognizer(bundle):
    return Recognizer(bundle)


def words_of(results):
    return [result.text.split() for result in results]


@pytest.mark.parametrize("first_pass", ["torch", "torch-search"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_finds_the_words(bundle, mode, first_pass):
    recognizer = Recognizer(bundle, mode=mode, first_pass=first_pass)
    results = recognizer([tones(words, seed=9) for words in SENTENCES])
    assert words_of(results) == SENTENCES
    assert all(result.is_complete for result in results)
    assert bool(results[0].cache) == (mode in ("interpolated", "on_the_fly"))


@pytest.mark.parametrize("mode", ["on_the_fly", "interpolated", "large_ngram"])
def test_a_device_budget_changes_nothing(bundle, mode, monkeypatch):
    monkeypatch.setattr(offload, "LEAST_PLACES", 4)
    monkeypatch.setattr(offload, "LEAST_PLACES", 4)
    waveforms = [tones(words, seed=9) for words in SENTENCES]
    results = [
        Recognizer(bundle, mode=mode, first_pass="torch", lm_device_bytes=budget)(waveforms) for budget in (None, 900)
    ]
    for ours, theirs in zip(*results, strict=True):
        assert ours.words == theirs.words
        # Resident tables are read by loops, which sum in another order.
        assert ours.total == pytest.approx(theirs.total, rel=1e-6)
    with pytest.raises(AsrError, match=r"budget of \d+ bytes is too small"):
        Recognizer(bundle, mode=mode, first_pass="torch", lm_device_bytes=30)(waveforms)


@pytest.mark.parametrize("mode", ["ngram", "interpolated"])
def test_both_first_passes_agree(bundle, mode):
    pytest.importorskip("k2")
    waveforms = [tones(words, seed=9) for words in SENTENCES]
    results = [Recognizer(bundle, mode=mode, first_pass=name)(waveforms) for name in ("k2", "torch")]
    for ours, theirs in zip(*results, strict=True):
        assert ours.text == theirs.text
        assert ours.total == pytest.approx(theirs.total, abs=1e-3)


def test_only_the_language_model_tells_homophones_apart(bundle):
    to, two = Recognizer(bundle, mode="ngram")([tones(["PAT", "TO", "KIT"]), tones(["PAT", "TWO"])])
    assert (to.text, two.text) == ("PAT TO KIT", "PAT TWO")


def test_words_lie_where_they_were_spoken(recognizer):
    (result,) = recognizer(tones(["PAT", "TO", "KIT"]))
    starts = [word.start for word in result.words]
    assert starts == pytest.approx([0.1, 0.44, 0.66], abs=0.05)
    assert all(word.start < word.end <= result.duration + 1e-6 for word in result.words)
    assert result.duration == pytest.approx(1.0)
    assert set(result.times.stages) >= {"features", "acoustic model", "search"}


def test_a_batch_is_its_recordings_one_by_one(bundle):
    recognizer = Recognizer(bundle, mode="ngram")
    waveforms = [tones(words, seed=3) for words in SENTENCES]
    together = recognizer(waveforms)
    for waveform, result in zip(waveforms, together, strict=True):
        (alone,) = recognizer(waveform)
        assert alone.words == result.words
        assert alone.total == pytest.approx(result.total, abs=1e-3)
    padded = torch.nn.utils.rnn.pad_sequence(waveforms, batch_first=True)
    lengths = torch.tensor([len(waveform) for waveform in waveforms])
    assert words_of(recognizer(padded, num_samples=lengths)) == SENTENCES


@pytest.mark.parametrize("first_pass", ["torch", "torch-search", "k2"])
def test_any_number_of_workers_finds_the_same(bundle, first_pass):
    if first_pass == "k2":
        pytest.importorskip("k2")
    waveforms = [tones(words, seed=index) for index, words in enumerate(SENTENCES * 2)]
    arguments = {"mode": "on_the_fly", "first_pass": first_pass, "batch_seconds": 2.5}
    expected = Recognizer(bundle, **arguments)(waveforms)
    for num_workers in (1, 2, 4):
        found = Recognizer(bundle, **arguments, num_workers=num_workers)(waveforms)
        for one, other in zip(found, expected, strict=True):
            assert one.words == other.words
            assert one.total == pytest.approx(other.total, abs=1e-3)
    with pytest.raises(AsrError, match="no first pass 'k3'; it is one of auto, k2, torch, torch-search"):
        Recognizer(bundle, first_pass="k3")
    with pytest.raises(AsrError, match="number of workers is -1"):
        Recognizer(bundle, num_workers=-1)


def test_any_sampling_rate_and_stereo(recognizer):
    words = ["PAT", "TO", "KIT"]
    (from_44k,) = recognizer(tones(words, rate=44100), sampling_rate=44100)
    assert from_44k.text.split() == words
    stereo = torch.stack([tones(words, seed=1), tones(words, seed=2)])
    assert words_of(recognizer([stereo])) == [words]


def test_long_recordings_are_cut_at_pauses(bundle):
    recognizer = Recognizer(bundle, mode="ngram", max_segment_seconds=1.5)
    sentences = SENTENCES[:3] * 2
    long = torch.cat([tones(words, seed=4) for words in sentences])
    (result,) = recognizer(long)
    assert result.text.split() == [word for words in sentences for word in words]
    assert result.duration == pytest.approx(len(long) / RATE)
    starts = [word.start for word in result.words]
    assert starts == sorted(starts)
    assert starts[-1] > result.duration - 1.0


@pytest.mark.parametrize(
    ("waveform", "message"),
    [
        (torch.zeros(0), "utterance 0 has no samples"),
        ([torch.zeros(100), torch.full((100,), float("nan"))], "utterance 1 has samples that are NaN or infinite"),
        (torch.zeros(100, dtype=torch.int16), "give floating-point samples"),
        (torch.zeros(2, 2, 100), r"the waveform has the shape \(2, 2, 100\)"),
        (torch.zeros(100).numpy(), r"the waveform is a ndarray; give a tensor .* torch.from_numpy"),
        ([torch.zeros(100).numpy()], "the waveform is a list; give a tensor or a list of tensors"),
        ("talk.wav", "the waveform is a str; give a tensor"),
    ],
)
def test_bad_waveforms_are_one_sentence(recognizer, waveform, message):
    with pytest.raises(AsrError, match=message):
        recognizer(waveform)


@pytest.mark.parametrize("rate", [0, -16000, 16000.5, math.nan, "16000", 1, 2**40])
def test_sampling_rates_that_are_none_are_refused(recognizer, rate):
    with pytest.raises(AsrError, match=r"the sampling rate is .*; give a whole number of Hz"):
        recognizer(torch.zeros(100), sampling_rate=rate)
    with pytest.raises(AsrError, match=r"the sampling rate is .*; give a whole number of Hz"):
        StreamingRecognizer(recognizer).open(rate)


def test_sampling_rates_may_be_of_any_type_of_number(recognizer):
    waveform = tones(["PAT", "TO", "KIT"], rate=8000)
    assert words_of(recognizer(waveform, 8000.0)) == words_of(recognizer(waveform, np.int64(8000)))


@pytest.mark.parametrize("lengths", [[100], [100, 101], [100, -1]])
def test_lengths_that_are_not_those_of_the_batch_are_refused(recognizer, lengths):
    with pytest.raises(AsrError, match=r"lengths \(num_samples\) for 2 utterances|utterance 1 has 100 samples, and"):
        recognizer(torch.zeros(2, 100), num_samples=torch.tensor(lengths))


def test_copies_recognize_the_same(recognizer):
    waveform = tones(["PAT", "TO", "KIT"])
    before = words_of(recognizer(waveform))
    for copied in (copy.deepcopy(recognizer), pickle.loads(pickle.dumps(recognizer))):
        assert words_of(copied(waveform)) == before
    assert words_of(recognizer(waveform)) == before


@pytest.mark.parametrize("num_samples", [1, 79, 80, 400])
def test_a_blink_of_audio_has_a_result(recognizer, num_samples):
    (result,) = recognizer(torch.zeros(num_samples))
    assert result.duration == num_samples / RATE
    assert len(result.words) <= num_samples // 160


def test_caches_stay_within_what_they_may_take(bundle):
    waveforms = [tones(words, seed=5) for words in SENTENCES]
    small = Recognizer(bundle, mode="on_the_fly", first_pass="torch-search", cache_bytes=20_000)
    large = Recognizer(bundle, mode="on_the_fly", first_pass="torch-search")
    for _ in range(2):
        assert words_of(small(waveforms)) == words_of(large(waveforms))
    cache = small(waveforms)[0].cache
    assert cache["num_evictions"] + cache["num_dropped_rows"] > 0
    assert cache["peak_bytes"] <= 20_000 < large(waveforms)[0].cache["peak_bytes"]
    queries, hits = (large(waveforms)[0].cache[name] for name in ("num_queries", "num_edges"))
    assert queries > 10 * hits


def test_a_bundle_without_language_models_still_recognizes(bundle):
    bare = Bundle(bundle.name, bundle.features, bundle.acoustic_model, bundle.graph)
    assert available_modes(bare) == ["ngram"]
    assert Recognizer(bare).mode == "ngram"
    with pytest.raises(AsrError, match="the mode 'on_the_fly' is not available; it has ngram"):
        Recognizer(bare, mode="on_the_fly")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 3}, "no decoding option 'beam'; there are am_scale"),
        ({"search_beam": -1.0}, "search_beam is -1.0; it must be above 0"),
        ({"rnn_weight": 1.5}, "weight is 1.5; it lies between 0 and 1"),
        ({"am_scale": math.inf}, "am_scale is inf; it must be a finite number"),
        ({"max_active_states": 10**20}, "max_active_states 100000000000000000000; choose"),
    ],
)
def test_wrong_options_are_one_sentence(bundle, options, message):
    with pytest.raises(AsrError, match=message):
        Recognizer(bundle, options=options)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_wrong_lengths_of_pieces_and_batches_are_one_sentence(bundle, seconds):
    with pytest.raises(AsrError, match=r"max_segment_seconds is .*; give 1 second or more"):
        Recognizer(bundle, max_segment_seconds=seconds)
    with pytest.raises(AsrError, match=r"batch_seconds is .*; it must be above 0, and finite"):
        Recognizer(bundle, batch_seconds=seconds)


def test_the_bundles_options_and_the_users(bundle):
    recognizer = Recognizer(bundle, mode="interpolated", options={"search_beam": 7.5})
    assert (recognizer.options.lm_scale, recognizer.rnn_weight, recognizer.options.search_beam) == (0.5, 0.1, 7.5)


def test_loading_and_recognizing_need_neither_lightning_nor_lhotse_nor_k2(tiny_bundle_folder):
    program = f"""
import sys
for name in ("pytorch_lightning", "lightning", "lhotse", "k2", "torchaudio", "jsonargparse", "kaldifst", "soundfile"):
    sys.modules[name] = None
import torch
from asr.recognizer import Recognizer
print(repr(Recognizer.from_folder({str(tiny_bundle_folder)!r})(torch.zeros(8000))[0].text))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "''"


def test_counts_of_the_caches_are_the_latest(bundle):
    sentences = [["PAT", "TWO"], *(3 * list(SENTENCES)), ["SICK", "SKIP"]]
    recognizer = Recognizer(bundle, mode="on_the_fly", first_pass="torch", batch_seconds=1.5)
    recording = torch.cat([tones(words, seed=9) for words in sentences])
    recognizer.max_segment_seconds = 1.2
    (result,) = recognizer(recording)
    engine = recognizer._engines._idle[0][0].engine
    assert result.cache["num_queries"] == engine.statistics().num_queries > 0
