from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.multiprocessing

from asr.bundle import Bundle
from asr.decoding.build import available_modes
from asr.decoding.settings import MODES, DecodingOptions, ResourceOptions
from asr.errors import AsrError
from asr.kernels.jit import has_package
from asr.lm import offload
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.recognizer import Recognizer
from asr.results import Alternative, RecognitionResult, StageTimes, Word, joined
from asr.serialization import ModelSpec
from asr.streaming import StreamingOptions, StreamingRecognizer, recognize_stream
from asr.testing.tones import RATE, TEXT, tones

SENTENCES = [line.split() for line in TEXT[:5]]


@pytest.fixture(scope="module")
def bundle(tiny_bundle_folder):
    return Bundle.load(tiny_bundle_folder)


@pytest.fixture(scope="module")
def recognizer(bundle):
    return Recognizer(bundle)


def words_of(results):
    return [result.text.split() for result in results]


@pytest.mark.parametrize("lm_fusion", ["lattice", "chunks", "search"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_finds_the_words(bundle, mode, lm_fusion):
    recognizer = Recognizer(bundle, mode=mode, decoder="token-passing", lm_fusion=lm_fusion)
    results = recognizer([tones(words, seed=9) for words in SENTENCES])
    assert words_of(results) == SENTENCES
    assert all(result.is_complete for result in results)
    assert bool(results[0].cache) == (mode in ("interpolated", "rnn"))


@pytest.mark.parametrize("none", [[], {}, iter(())], ids=["list", "mapping", "iterator"])
def test_no_hot_words_are_as_none_given(bundle, none):
    assert Recognizer(bundle, "ngram", hot_words=none).hot_words is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rnn", "interpolated", "large_ngram"])
def test_a_device_budget_changes_nothing(bundle, mode, monkeypatch):
    monkeypatch.setattr(offload, "LEAST_PLACES", 4)
    monkeypatch.setattr(offload, "LEAST_PLACES", 4)
    waveforms = [tones(words, seed=9) for words in SENTENCES]

    def with_budget(budget):
        return Recognizer(bundle, mode=mode, decoder="token-passing", resources=ResourceOptions(lm_device_bytes=budget))

    results = [with_budget(budget)(waveforms) for budget in (None, 900)]
    for ours, theirs in zip(*results, strict=True):
        assert ours.words == theirs.words
        # Resident tables are read by loops, which sum in another order.
        assert ours.total == pytest.approx(theirs.total, rel=1e-6)
    with pytest.raises(AsrError, match=r"budget of \d+ bytes is too small"):
        with_budget(30)(waveforms)


@pytest.mark.slow
def test_the_acoustic_model_takes_a_large_batch_in_parts(bundle):
    recognizer = Recognizer(bundle, mode="ngram")
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(int(seconds * RATE), generator=generator) for seconds in (9, 21, 14, 0.1, 33, 8)]
    sizes = []
    hook = recognizer.acoustic_model.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[:2]))
    log_prob, num_frames = recognizer.log_prob(samples, StageTimes())
    hook.remove()
    alone = [recognizer.log_prob([row], StageTimes()) for row in samples]
    frames_per_second = RATE / recognizer.features.frame_shift
    # 33 seconds are too many for one part, but nothing can be done about it.
    assert sorted(rows for rows, _ in sizes) == [1, 1, 2, 2]
    assert all(rows == 1 or rows * frames <= 30 * frames_per_second for rows, frames in sizes)
    assert num_frames.tolist() == [int(frames) for _, frames in alone]
    for row, (own, frames) in zip(log_prob, alone, strict=True):
        torch.testing.assert_close(row[: int(frames)], own[0], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ngram", "interpolated"])
def test_both_decoders_agree(bundle, mode):
    pytest.importorskip("k2")
    waveforms = [tones(words, seed=9) for words in SENTENCES]
    results = [Recognizer(bundle, mode=mode, decoder=name)(waveforms) for name in ("k2", "token-passing")]
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


@pytest.mark.slow
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
    for given, result in zip(recognizer(padded, num_samples=lengths), recognizer(padded), strict=True):
        assert (result.words, result.total, result.duration) == (given.words, given.total, given.duration)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoder", "lm_fusion"),
    [("token-passing", "lattice"), pytest.param("token-passing", "search", marks=pytest.mark.slow), ("k2", "lattice")],
)
def test_any_number_of_workers_finds_the_same(bundle, decoder, lm_fusion):
    if decoder == "k2":
        pytest.importorskip("k2")
    waveforms = [tones(words, seed=index) for index, words in enumerate(SENTENCES * 2)]

    def found_by(num_workers):
        resources = ResourceOptions(batch_seconds=2.5, num_workers=num_workers)
        return Recognizer(bundle, "rnn", decoder=decoder, lm_fusion=lm_fusion, resources=resources)(waveforms)

    expected = found_by(0)
    for num_workers in (1, 2, 4):
        found = found_by(num_workers)
        for one, other in zip(found, expected, strict=True):
            assert one.words == other.words
            assert one.total == pytest.approx(other.total, abs=1e-3)


def test_wrong_names_and_numbers_are_one_sentence(bundle):
    with pytest.raises(AsrError, match="no decoder 'k3'; choose one of auto, token-passing, k2"):
        Recognizer(bundle, decoder="k3")
    with pytest.raises(AsrError, match="no fusion 'late' of the language model; choose auto or one of lattice, "):
        Recognizer(bundle, lm_fusion="late")
    with pytest.raises(AsrError, match="k2 does not support lm_fusion search"):
        Recognizer(bundle, decoder="k2", lm_fusion="search")
    with pytest.raises(AsrError, match="num_workers is -1; it must be between 0 and 64"):
        ResourceOptions(num_workers=-1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda own: Recognizer(own.bundle, options=DecodingOptions()),
            "options is of type DecodingOptions; give option",
        ),
        (
            lambda own: Recognizer(own.bundle, resources={"num_workers": 2}),
            "resources is of type dict; give asr.Resource",
        ),
        (
            lambda own: StreamingRecognizer(own, {"chunk_seconds": 1}),
            "options is of type dict; give asr.StreamingOptions",
        ),
        (
            lambda own: own(tones(["PAT"]), RATE, speaker="Ann"),
            "speaker is of type str; give what speaker_statistics or",
        ),
        (lambda own: own(tones(["PAT"]), RATE, nbest="2"), "nbest is of type str; give a whole number"),
        (lambda own: own(tones(["PAT"]), RATE, nbest=2.5), "nbest is of type float; give a whole number"),
    ],
)
def test_arguments_of_other_types_are_one_sentence(recognizer, call, message):
    with pytest.raises(AsrError, match=message):
        call(recognizer)


def test_any_sampling_rate_and_stereo(recognizer):
    words = ["PAT", "TO", "KIT"]
    (from_44k,) = recognizer(tones(words, rate=44100), sampling_rate=44100)
    assert from_44k.text.split() == words
    stereo = torch.stack([tones(words, seed=1), tones(words, seed=2)])
    assert words_of(recognizer([stereo])) == [words]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rnn", "ngram"])
def test_the_best_of_n_sentences_is_the_result(bundle, mode):
    options = {"search_beam": 40.0, "output_beam": 30.0}
    recognizer = Recognizer(bundle, mode=mode, decoder="token-passing", options=options)
    waveforms = [tones(words, seed=9) for words in SENTENCES[:3]]
    plain = recognizer(waveforms)
    for result, alone in zip(recognizer(waveforms, nbest=8), plain, strict=True):
        assert alone.hypotheses == () and result.lattices == ()
        assert 1 < len(result.hypotheses) <= 8
        first, totals = result.hypotheses[0], [one.total for one in result.hypotheses]
        assert first.text == result.text == alone.text
        assert first.total == pytest.approx(alone.total, abs=1e-3)
        assert totals == sorted(totals, reverse=True)
        assert len({one.text for one in result.hypotheses}) == len(totals)
    with pytest.raises(AsrError, match="nbest is 0; ask for 1"):
        recognizer(waveforms, nbest=0)


def test_segments_join_to_the_best_sentences_of_the_recording():
    """Two lists of three: the best five of nine pairs, times of the second segment moved."""

    def segment(text, totals):
        sentences = tuple(Alternative((Word(f"{text}{i}", 0.5, 1.0),), t, 0.0, 0.0, t) for i, t in enumerate(totals))
        return RecognitionResult(sentences[0].words, 0.0, 0.0, 0.0, totals[0], True, StageTimes(), hypotheses=sentences)

    one, other = segment("a", [-1.0, -2.0, -4.0, -9.0, -9.5]), segment("b", [-1.0, -1.5, -4.0, -9.0, -9.5])
    whole = joined([one, other], [0.0, 10.0])
    pairs = {
        f"a{i} b{j}": x.total + y.total for i, x in enumerate(one.hypotheses) for j, y in enumerate(other.hypotheses)
    }
    assert [found.text for found in whole.hypotheses] == sorted(pairs, key=pairs.__getitem__, reverse=True)[:5]
    assert [word.start for word in whole.hypotheses[0].words] == [0.5, 10.5]
    unfinished = RecognitionResult((Word("c", 0.0, 1.0),), 0.0, 0.0, 0.0, -3.0, False, StageTimes())
    assert [found.text for found in joined([one, unfinished], [0.0, 10.0]).hypotheses] == [f"a{i} c" for i in range(5)]


def test_long_recordings_are_cut_at_pauses(bundle):
    recognizer = Recognizer(bundle, mode="ngram", resources=ResourceOptions(max_segment_seconds=1.5))
    sentences = SENTENCES[:3] * 2
    long = torch.cat([tones(words, seed=4) for words in sentences])
    (result,) = recognizer(long)
    assert result.text.split() == [word for words in sentences for word in words]
    assert result.duration == pytest.approx(len(long) / RATE)
    starts = [word.start for word in result.words]
    assert starts == sorted(starts)
    assert starts[-1] > result.duration - 1.0


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_long_files_are_read_while_they_are_recognized(bundle, tmp_path, num_workers):
    """Words and times are those of the whole in memory, and only some batches are ahead of the recognition."""
    audio_io = pytest.importorskip("asr.audio.io")
    import soundfile

    waveform = torch.cat([tones(words, seed=seed) for seed, words in enumerate(SENTENCES * 8)])
    soundfile.write(str(tmp_path / "a.wav"), waveform.numpy(), RATE, subtype="FLOAT")
    resources = ResourceOptions(batch_seconds=1.0, max_segment_seconds=1.0, num_workers=num_workers)
    recognizer = Recognizer(bundle, resources=resources)
    num_read, ahead = [0], []

    class SmallPieces(audio_io.AudioFile):
        def __iter__(self):
            for piece in waveform.split(1000):
                num_read[0] += len(piece)
                yield piece

    score = recognizer._score

    def counted(samples, **settings):
        ahead.append(num_read[0] - sum(ahead_of))
        ahead_of.append(sum(map(len, samples)))
        return score(samples, **settings)

    ahead_of = []
    recognizer._score = counted
    (expected,) = recognizer([waveform])
    (of_file,) = recognizer(tmp_path / "a.wav")
    ahead.clear()
    ahead_of.clear()
    (of_pieces, again) = recognizer([SmallPieces(tmp_path / "a.wav", RATE), waveform[: 3 * RATE]])
    assert len(expected.words) > 90
    for result in (of_file, of_pieces):
        assert result.text == expected.text and result.duration == expected.duration
        assert [(word.start, word.end) for word in result.words] == [(word.start, word.end) for word in expected.words]
    assert again.text == recognizer([waveform[: 3 * RATE]])[0].text
    assert max(ahead) < 12 * RATE < len(waveform) / 2


@pytest.mark.parametrize(
    ("waveform", "message"),
    [
        (torch.zeros(0), "recording 0 has no samples"),
        ([torch.zeros(100), torch.full((100,), float("nan"))], "recording 1 has samples that are NaN, infinite or"),
        (torch.tensor([0.1, -1e30]), r"recording 0 has samples that are NaN, infinite or beyond 10\^9"),
        (
            torch.zeros(100, dtype=torch.uint8),
            r"recording 0 holds torch.uint8; give floating-point samples in \[-1, 1\]",
        ),
        (torch.zeros(2, 2, 2, 100), r"the waveform has the shape \(2, 2, 2, 100\); give \(samples,\)"),
        (
            [torch.zeros(2, 2, 100)],
            r"recording 0 has the shape \(2, 2, 100\); give \(samples,\) or \(channels, samples\)",
        ),
        (np.array(["PAT"]), "recording 0 holds <U3; give floating-point samples"),
        ([[0.0, 0.1]], "recording 0 is of type list; give a tensor or a NumPy array"),
        ((torch.zeros(400), 16000), "recording 1 is of type int; .* and their sampling rate as an argument of its own"),
        (7, "the recording is of type int; give the path of a file, a tensor"),
        ("talk.wav", "talk.wav: there is no such audio file"),
    ],
)
def test_bad_waveforms_are_one_sentence(recognizer, waveform, message):
    with pytest.raises(AsrError, match=message):
        recognizer(waveform)


@pytest.mark.parametrize("rate", [0, -16000, 16000.5, math.nan, "16000", 1, 2**40])
def test_invalid_sampling_rates_are_refused(recognizer, rate):
    with pytest.raises(AsrError, match=r"the sampling rate is .*; give a whole number of Hz"):
        recognizer(torch.zeros(100), sampling_rate=rate)
    with pytest.raises(AsrError, match=r"the sampling rate is .*; give a whole number of Hz"):
        StreamingRecognizer(recognizer).open(rate)


def test_sampling_rates_may_be_of_any_type_of_number(recognizer):
    waveform = tones(["PAT", "TO", "KIT"], rate=8000)
    assert words_of(recognizer(waveform, 8000.0)) == words_of(recognizer(waveform, np.int64(8000)))


@pytest.mark.parametrize("lengths", [[100], [100, 101], [100, -1], [1.0, 0.5], [100.0, float("nan")]])
def test_lengths_that_are_not_those_of_the_batch_are_refused(recognizer, lengths):
    with pytest.raises(AsrError, match=r"lengths \(num_samples\) for 2 recordings|recording 1 has 100 samples, but"):
        recognizer(torch.zeros(2, 100), num_samples=torch.tensor(lengths))


@pytest.mark.slow
def test_copies_recognize_the_same(recognizer):
    waveform = tones(["PAT", "TO", "KIT"])
    before = words_of(recognizer(waveform))
    for copied in (copy.deepcopy(recognizer), pickle.loads(pickle.dumps(recognizer))):
        assert words_of(copied(waveform)) == before
    assert words_of(recognizer(waveform)) == before


@pytest.mark.slow
@pytest.mark.parametrize("part", ["itself", "bundle", "graph", "language model"])
def test_other_processes_get_copies(bundle, part):
    """torch moves tensors that it sends to shared memory, while loops have arrays of the memory where they were."""
    lm = CachedRNNLM(bundle.rnn_lm.network)
    recognizer = Recognizer(bundle, language_model=lm, lm_fusion="search")
    waveform = tones(["PAT", "TO", "KIT"])
    before = recognizer(waveform)[0]
    sent = {"itself": recognizer, "bundle": bundle, "graph": bundle.graph, "language model": lm}[part]
    received = pickle.loads(ForkingPickler.dumps(sent))
    shared = [*recognizer.parameters(), *recognizer.buffers(), *bundle.small_ngram.arrays.tensors().values()]
    assert len(shared) > 10 and not any(tensor.is_shared() for tensor in shared)
    assert recognizer(waveform)[0].total == before.total
    if part == "itself":
        assert received(waveform)[0].total == before.total


def test_the_recurrent_model_is_a_part_like_the_acoustic_model(bundle):
    recognizer = Recognizer(bundle, mode="interpolated")
    own = {name for name in recognizer.state_dict() if name.startswith("recurrent_model.")}
    assert len(own) == len(bundle.rnn_lm.network.state_dict())
    fusion = "chunks" if has_package("numba") and recognizer.decoder_name == "token-passing" else "lattice"
    assert f"mode=interpolated, decoder={recognizer.decoder_name}, lm_fusion={fusion}" in repr(recognizer)
    assert "lm_fusion=lattice" in repr(Recognizer(bundle, mode="ngram"))  # there is nothing to combine
    assert "large_ngram=" in repr(recognizer)
    copied = copy.deepcopy(recognizer)
    assert copied.recurrent_model is copied.bundle.rnn_lm.network is not recognizer.recurrent_model
    # Neither where no mode asks it, nor where its tables stay on the host.
    placed = ResourceOptions(lm_device_bytes=3000)
    second = {"second_pass": "nbest", "second_pass_mode": "rnn"}
    assert Recognizer(bundle, mode="large_ngram").recurrent_model is None
    assert Recognizer(bundle, mode="rnn", resources=placed).recurrent_model is None
    assert Recognizer(bundle, mode="ngram", options=second).recurrent_model is bundle.rnn_lm.network


@pytest.mark.slow
def test_stages_take_no_longer_than_the_call(bundle):
    """What a language model takes is no part of the search, within which it is queried."""
    config = {"embedding_size": 256, "hidden_size": 1024}
    network = RNNLanguageModel(bundle.small_ngram.vocabulary, RNNLMConfig(**config)).eval()
    recognizer = Recognizer(replace(bundle, rnn_lm=ModelSpec("RnnLm", config, network)), mode="rnn")
    recognizer.prepare()
    waveforms = [tones(words, seed=7) for words in SENTENCES]
    begin = time.perf_counter()
    results = recognizer(waveforms)
    seconds = time.perf_counter() - begin
    for result in results:
        assert list(result.times.stages) == ["features", "acoustic model", "search", "language model"]
        assert min(result.times.stages.values()) > 0.0
    assert sum(result.times.total for result in results) <= seconds
    assert [result.duration for result in results] == [len(waveform) / RATE for waveform in waveforms]


@pytest.mark.slow
def test_the_best_sentences_of_a_second_pass_have_its_scores(bundle):
    options = {"second_pass": "nbest", "second_pass_mode": "rnn", "second_pass_sentences": 4}
    for words in SENTENCES[:2]:
        (result,) = Recognizer(bundle, mode="ngram", options=options)(tones(words, seed=9), nbest=3)
        totals = [one.total for one in result.hypotheses]
        assert len(totals) >= 2 and totals == sorted(totals, reverse=True)
        assert (result.hypotheses[0].text, totals[0]) == (result.text, result.total)


def test_a_pause_begins_and_ends_half_its_length_from_anything_loud(bundle):
    recognizer = Recognizer(bundle, mode="ngram", options={"pause_seconds": 0.5})
    assert recognizer.pause_margin * recognizer.features.frame_shift == pytest.approx(0.25 * RATE, abs=80)


@pytest.mark.parametrize("num_samples", [1, 79, 80, 400])
def test_a_blink_of_audio_has_a_result(recognizer, num_samples):
    (result,) = recognizer(torch.zeros(num_samples))
    assert result.duration == num_samples / RATE
    assert len(result.words) <= num_samples // 160
    assert words_of(recognizer([tones(SENTENCES[0], seed=9), torch.zeros(num_samples)]))[0] == SENTENCES[0]


@pytest.mark.slow
def test_caches_stay_within_what_they_may_take(bundle):
    waveforms = [tones(words, seed=5) for words in SENTENCES]
    arguments = {"mode": "rnn", "decoder": "token-passing", "lm_fusion": "search"}
    small = Recognizer(bundle, **arguments, resources=ResourceOptions(cache_bytes=20_000))
    large = Recognizer(bundle, **arguments)
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
    with pytest.raises(AsrError, match="the mode 'rnn' is not available; it has ngram"):
        Recognizer(bare, mode="rnn")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 3}, "no decoding option 'beam'; there are am_scale"),
        ({"search_beam": -1.0}, "search_beam is -1.0; it must be above 0"),
        ({"rnn_weight": 1.5}, "weight is 1.5; it must be between 0 and 1"),
        ({"am_scale": math.inf}, "am_scale is inf; it must be a finite number"),
        ({"max_active_states": 10**20}, "max_active_states is 100000000000000000000; it must be below"),
    ],
)
def test_wrong_options_are_one_sentence(bundle, options, message):
    with pytest.raises(AsrError, match=message):
        Recognizer(bundle, options=options)


def test_the_bundles_options_and_the_users(bundle):
    recognizer = Recognizer(bundle, mode="interpolated", options={"search_beam": 7.5})
    assert (
        recognizer.options.lm_scale,
        recognizer.settings.language_models.rnn_weight,
        recognizer.options.search_beam,
    ) == (0.5, 0.1, 7.5)


@pytest.mark.slow
def test_loading_and_recognizing_need_neither_lightning_nor_lhotse_nor_k2(tiny_bundle_folder):
    program = f"""
import sys
from dataclasses import replace
for name in ("pytorch_lightning", "lightning", "lhotse", "k2", "torchaudio", "jsonargparse", "kaldifst", "soundfile"):
    sys.modules[name] = None
import torch
from asr.recognizer import Recognizer, ResourceOptions
from asr.results import Alternative, RecognitionResult, StageTimes, Word, joined
print(repr(Recognizer.from_folder({str(tiny_bundle_folder)!r})(torch.zeros(8000))[0].text))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "''"


@pytest.mark.slow
def test_counts_of_the_caches_are_the_latest(bundle):
    sentences = [["PAT", "TWO"], *(3 * list(SENTENCES)), ["SICK", "SKIP"]]
    resources = ResourceOptions(batch_seconds=1.5, max_segment_seconds=1.2)
    recognizer = Recognizer(bundle, mode="rnn", decoder="token-passing", resources=resources)
    recording = torch.cat([tones(words, seed=9) for words in sentences])
    (result,) = recognizer(recording)
    engine = recognizer._engines._idle[0].models[0].engine
    assert result.cache["num_queries"] == engine.statistics().num_queries > 0


CALIBRATION = {"bias": 0.5, "terms": {"word_posterior": {"knots": [-9.0, 9.0], "values": [-3.0, 2.0]}}}


def calibrated(bundle, **changes):
    decoding = {"ngram": {**bundle.decoding.get("ngram", {}), **changes}}
    confidence = dict.fromkeys(MODES, CALIBRATION)
    return replace(bundle, confidence=confidence, decoding={**bundle.decoding, **decoding})


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_words_of_a_calibrated_bundle_always_have_confidences(bundle, mode):
    recognizer = Recognizer(calibrated(bundle), mode=mode, decoder="token-passing")
    results = recognizer([tones(words, seed=9) for words in SENTENCES])
    assert words_of(results) == SENTENCES and not any(result.lattices for result in results)
    told = [word.confidence for result in results for word in result.words]
    # Posteriors near 1 become 1 / (1 + exp(-2.5)); TO and TWO sound alike.
    assert all(0.1 < one < 0.925 for one in told) and sum(told) > 0.7 * len(told) and max(told) > 0.9
    with_lattices = Recognizer(calibrated(bundle), mode=mode, decoder="token-passing", keep_lattices=True)
    again = with_lattices([tones(words, seed=9) for words in SENTENCES])
    assert told == pytest.approx([word.confidence for result in again for word in result.words])
    recognizer.calibration = None
    without = recognizer([tones(words, seed=9) for words in SENTENCES])
    assert words_of(without) == SENTENCES
    assert all(word.confidence is None for result in without for word in result.words)


def test_streams_of_a_calibrated_bundle_have_confidences(bundle):
    recognizer = Recognizer(calibrated(bundle), mode="rnn", decoder="token-passing")
    options = StreamingOptions(chunk_seconds=0.3, left_seconds=1.0, right_seconds=0.2)
    streamed = list(recognize_stream(recognizer, tones(["PAT", "TO", "KIT"]).split(3000), options=options))
    assert streamed[-1].text == "PAT TO KIT" and streamed[-1].is_complete
    told = [word.confidence for word in streamed[-1].words if word.text != "TO"]
    assert all(0.8 < one < 0.925 for one in told)
    assert all(word.confidence is None for result in streamed[:-1] for word in result.words)
    assert not any(result.num_stable for result in streamed[:-1])  # the second search may find other words
    stable = replace(options, partial_policy="stable")
    nine_words = tones([word for sentence in SENTENCES[:3] for word in sentence], seed=3)
    *partials, final = recognize_stream(recognizer, nine_words.split(3000), options=stable)
    assert partials and all(0 < len(result.words) == result.num_stable for result in partials)
    assert len(final.words) == 9 and all(word.confidence is not None for word in final.words)


def test_a_damaged_calibration_is_refused_when_a_recognizer_is_made(bundle):
    damaged = replace(bundle, confidence={"rnn": {"bias": "high"}, "ngram": CALIBRATION})
    assert Recognizer(damaged, mode="ngram").calibration.bias == 0.5
    with pytest.raises(AsrError, match="confidence of rnn: this is not a calibration"):
        Recognizer(damaged, mode="rnn")


def test_a_calibration_of_an_earlier_version_is_left_out_with_a_warning(bundle, caplog):
    terms = {"posterior": CALIBRATION["terms"]["word_posterior"]}
    old = replace(bundle, confidence={"ngram": {"bias": 0.5, "terms": terms}})
    recognizer = Recognizer(old, mode="ngram")
    assert recognizer.calibration is None and "calibrate it again with 'asr calibrate'" in caplog.text
    (result,) = recognizer([tones(["PAT"])])
    assert result.text == "PAT"


def test_a_sustained_tone_is_no_word(bundle):
    held = torch.sin(2 * math.pi * 400.0 * torch.arange(3 * RATE) / RATE) * 0.4
    waveform = torch.cat([torch.zeros(RATE // 10), held, tones(["TWO"])])
    # As loud as the softest frames, most of the tone would count as a pause.
    alone = partial(Recognizer, mode="ngram", decoder="token-passing", options={"pause_seconds": math.inf})
    plain = alone(bundle)([waveform])[0]
    assert plain.text and not plain.notes
    limited = alone(calibrated(bundle, max_token_seconds=0.5))
    (result,) = limited([waveform])
    assert result.text == "" and result.notes == ("noise",) and result.as_dict()["notes"] == ["noise"]
    assert limited([tones(SENTENCES[0])])[0].text.split() == SENTENCES[0]
    # Now everything lasts too long.
    strict = Recognizer(calibrated(bundle, max_token_seconds=0.01), mode="ngram", decoder="token-passing")
    (final,) = (one for one in recognize_stream(strict, [tones(SENTENCES[0])]) if one.is_final)
    assert final.text == "" and final.notes == ("noise",)


def test_the_best_sentences_of_noise_are_one_without_words(bundle):
    improbable = replace(bundle, confidence={"rnn": {"bias": -4.0, "terms": {}}})
    options = {"output_beam": 20.0, "max_token_seconds": 0.5}
    recognizer = Recognizer(improbable, mode="rnn", decoder="token-passing", options=options)
    recognizer.calibration, calibration = None, recognizer.calibration
    (speech,) = recognizer([tones(SENTENCES[0])], nbest=5)
    assert len(speech.hypotheses) > 1
    recognizer.calibration = calibration
    (noise,) = recognizer([tones(SENTENCES[0])], nbest=5)
    assert noise.text == "" and noise.notes == ("noise",) and noise.total == speech.total
    (empty,) = noise.hypotheses
    assert empty.text == "" and empty.total == speech.hypotheses[0].total


def test_what_remains_of_the_best_sentences_is_distinct(bundle):
    held = torch.sin(2 * math.pi * 400.0 * torch.arange(3 * RATE) / RATE) * 0.4
    waveform = torch.cat([tones(SENTENCES[0]), torch.zeros(RATE // 2), held])
    options = {"output_beam": 20.0, "max_token_seconds": 0.5}
    recognizer = Recognizer(bundle, mode="ngram", decoder="token-passing", options=options)
    (result,) = recognizer([waveform], nbest=20)
    texts = [one.text for one in result.hypotheses]
    assert result.notes == ("noise",) and texts[0] == result.text != ""
    assert 1 < len(texts) == len(set(texts))


def test_unlikely_words_are_noted(bundle):
    unlikely = {"bias": -4.0, "terms": {}}
    recognizer = Recognizer(replace(bundle, confidence={"rnn": unlikely}), mode="rnn")
    assert recognizer([tones(SENTENCES[0])])[0].notes == ("unsure",)
