"""Streams give what the same audio gives at once, however it is cut and whoever else is being recognized."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.bundle import Bundle
from asr.decoding.backend import SearchGraph
from asr.decoding.token_passing import TokenPassingDecoder
from asr.errors import AsrError
from asr.models.adaptation import SpeakerTransform
from asr.models.feedforward import FeedForwardNetwork
from asr.models.interface import LOG_PROB_IN_NOISE, UtteranceCmvn
from asr.models.tdnnf import Ensemble, Tdnnf
from asr.models.windows import ChunkedEncoder, RunningNorm, WindowSizes
from asr.recognizer import Recognizer
from asr.serialization import ModelSpec
from asr.streaming import StreamingOptions, StreamingRecognizer, recognize_stream
from asr.testing.tones import PRONUNCIATIONS, RATE, TEXT, tones
from asr.text.lexicon import Lexicon

SENTENCES = [line.split() for line in TEXT[:5]]
# One utterance a stream, whatever its pauses.
ENDLESS = {"silence_before_words": 1e6, "silence_after_words": 1e6, "longest_utterance": 1e6}
QUICK = {"chunk_seconds": 0.3, "left_seconds": 1.0, "right_seconds": 0.2}


@pytest.fixture(scope="module")
def recognizer(tiny_bundle_folder):
    return Recognizer(Bundle.load(tiny_bundle_folder), mode="rnn", decoder="token-passing")


@pytest.fixture(scope="module")
def searching(tiny_bundle_folder):
    """A recognizer whose language model is inside the search."""
    return Recognizer(Bundle.load(tiny_bundle_folder), mode="rnn", decoder="token-passing", lm_fusion="search")


def run(streaming, stream, samples, cuts=()):
    results = []
    for piece in torch.tensor_split(samples, sorted(cuts)):
        streaming.push(stream, piece)
        while streaming.is_ready:
            results += streaming.step()
    streaming.close(stream)
    while streaming.is_ready:
        results += streaming.step()
    return results


def same(one, other):
    assert (one.is_final, one.reason, one.text) == (other.is_final, other.reason, other.text)
    assert (one.begin, one.end) == pytest.approx((other.begin, other.end))
    assert [word.start for word in one.words] == pytest.approx([word.start for word in other.words])
    assert one.total == pytest.approx(other.total, abs=1e-3)


def test_words_and_their_times(recognizer):
    pieces = tones(["PAT", "TO", "KIT"]).split(1000)
    results = list(recognize_stream(recognizer, pieces, options=StreamingOptions(**QUICK)))
    final = results[-1]
    assert final.is_final and final.reason == "end" and final.text == "PAT TO KIT"
    assert [word.start for word in final.words] == pytest.approx([0.1, 0.44, 0.66], abs=0.07)
    assert final.end == pytest.approx(1.0)
    partials = [result.text for result in results[:-1]]
    assert partials and all("PAT TO KIT".startswith(text) for text in partials)
    assert [result.is_final for result in results].count(True) == 1


@pytest.mark.slow
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6))
def test_neither_cuts_nor_neighbours_change_anything(recognizer, seed):
    chooser = random.Random(seed)
    options = StreamingOptions(**QUICK, silence_after_words=0.3)
    waveforms = [
        torch.cat([tones(SENTENCES[0]), torch.zeros(RATE // 2), tones(SENTENCES[1])]),
        tones(SENTENCES[2]),
        torch.zeros(chooser.randrange(3000)),
    ]
    alone = []
    for waveform in waveforms:
        streaming = StreamingRecognizer(recognizer, options)
        alone.append(run(streaming, streaming.open(), waveform))
    together = StreamingRecognizer(recognizer, options)
    found = {together.open(): [], together.open(): []}
    left = dict(zip(found, waveforms, strict=False))
    while left or together.is_ready:
        for stream in list(left):
            size = chooser.choice([0, 7, 160, 3000, 9000])
            together.push(stream, left[stream][:size])
            left[stream] = left[stream][size:]
            if not len(left[stream]):
                together.close(stream)
                del left[stream]
        if len(found) == 2 and chooser.random() < 0.3:
            stream = together.open()
            found[stream], left[stream] = [], waveforms[2]
        for result in together.step():
            found[result.stream].append(result)
    for stream, results in found.items():
        assert len(results) == len(alone[stream])
        for one, other in zip(results, alone[stream], strict=True):
            same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "num_members"), [("agreed", 1), ("stable", 2)])
def test_an_ensemble_drafts_by_its_first_member_until_the_utterance_ends(tiny_bundle_folder, policy, num_members):
    bundle = Bundle.load(tiny_bundle_folder)
    tdnnf = {"num_features": bundle.acoustic_model.network.num_features, "num_tokens": len(bundle.graph.tokens.tokens)}
    small = {"dim": 12, "bottleneck_dim": 4, "num_layers": 2, "prefinal_dim": 8, "small_dim": 8}
    members = [ModelSpec("Tdnnf", {**tdnnf, **small}, Tdnnf(**tdnnf, **small).eval()) for _ in range(2)]
    recognizer = Recognizer(replace(bundle, acoustic_model=Ensemble.of(members)), mode="rnn", decoder="token-passing")
    streaming = StreamingRecognizer(recognizer, StreamingOptions(**QUICK, **ENDLESS, partial_policy=policy))
    asked = [Mock(wraps=member.scores_in_context) for member in recognizer.acoustic_model.members]
    for member, ask in zip(recognizer.acoustic_model.members, asked, strict=True):
        member.scores_in_context = ask
    stream = streaming.open()
    streaming.push(stream, tones(SENTENCES[0]))
    while streaming.is_ready:
        streaming.step()
    assert [ask.called for ask in asked] == [number < num_members for number in range(2)]
    streaming.close(stream)
    while streaming.is_ready:
        streaming.step()
    assert all(ask.called for ask in asked)


@pytest.mark.slow
def test_final_results_are_those_of_decoding_the_utterance_heard_again(recognizer):
    options = StreamingOptions(**QUICK, **ENDLESS)
    streaming = StreamingRecognizer(recognizer, options)
    waveform = torch.cat([tones(words, seed=3) for words in SENTENCES])
    final = run(streaming, streaming.open(), waveform, range(0, len(waveform), 4321))[-1]
    network = ChunkedEncoder(recognizer.acoustic_model, options.window_sizes(streaming.frame_seconds))
    windows = network.open(torch.device("cpu"))
    features, num_frames = recognizer.features(waveform[None], torch.tensor([len(waveform)]))
    windows.push(features[0])
    windows.close()
    chunks = []
    with recognizer.acoustic_arithmetic():
        while windows.is_ready:
            chunks += network.step([windows])
        (log_prob,) = network.utterance_log_probs([windows])
        outputs, num_outputs = recognizer.acoustic_model(features, num_frames)
    assert len(log_prob) == sum(map(len, chunks))
    recognizer.prepare()
    models = recognizer._engines._idle[0].models[0]
    whole = TokenPassingDecoder(recognizer.bundle.graph, recognizer.options).decode(
        log_prob[None], torch.tensor([len(log_prob)]), models.model
    )[0]
    assert whole.best is not None
    assert final.text.split() == list(whole.best.words) and len(whole.best.words) == 13
    assert final.total == pytest.approx(whole.best.total, abs=1e-3)
    # Outputs as many as for the whole, and those of the network itself where a window holds everything.
    assert len(log_prob) == int(num_outputs)
    network = ChunkedEncoder(recognizer.acoustic_model, WindowSizes(10**6, 0, 0, 10**6))
    windows = network.open(torch.device("cpu"))
    windows.push(features[0])
    windows.close()
    assert torch.allclose(network.step([windows])[0], outputs[0], atol=1e-4)
    assert windows.is_done and not windows.is_ready
    assert torch.allclose(network.utterance_log_probs([windows])[0], outputs[0], atol=1e-4)


NINE_WORDS = [word for sentence in SENTENCES[:3] for word in sentence]


def results_at_once(recognizer, **options):
    """Partial results by the best path, and the final one, of nine words."""
    options = StreamingOptions(**QUICK, **ENDLESS, partial_policy="best", **options)
    *partials, final = recognize_stream(recognizer, tones(NINE_WORDS, seed=3).split(1000), options=options)
    return partials, final


def test_words_become_final_at_an_age(tiny_bundle_folder):
    recognizer = Recognizer(Bundle.load(tiny_bundle_folder), mode="ngram")
    never, late, soon = (results_at_once(recognizer, force_commit_seconds=age)[0] for age in (None, 100.0, 0.2))
    assert late == never
    assert sum(result.num_stable for result in soon) > sum(result.num_stable for result in never)
    for result in soon:
        # The word of which a chunk has just shown the end may be younger at the chunk before.
        assert result.num_stable >= sum(word.end < result.end - 0.2 - QUICK["chunk_seconds"] for word in result.words)


def test_limits_of_partial_results_do_not_concern_final_ones(recognizer):
    wide, narrow = (results_at_once(recognizer, partial_max_active_states=most) for most in (1000, 1))
    assert [result.text for result in narrow[0]] != [result.text for result in wide[0]]
    assert narrow[1] == wide[1] and wide[1].text.split() == NINE_WORDS


@pytest.mark.slow
def test_over_the_lattice_the_model_is_asked_when_an_utterance_has_ended(recognizer, searching):
    pieces = [tones(words, seed=3) for words in SENTENCES[:3]]
    found = {}
    for one in (recognizer, searching):
        for beam in (10.0, 0.5):
            options = StreamingOptions(**QUICK, **ENDLESS, partial_search_beam=beam, partial_max_active_states=8)
            streaming = StreamingRecognizer(one, options)
            streams = [streaming.open() for _ in pieces]
            partials = []
            for stream, piece in zip(streams, pieces, strict=True):
                streaming.push(stream, piece)
                while streaming.is_ready:
                    partials += streaming.step()
            assert (streaming.engine.statistics().num_queries > 0) == (one is searching)
            for stream in streams:
                streaming.close(stream)
            finals = streaming.step()
            assert not streaming.is_ready and streaming.engine.statistics().num_queries > 0
            assert partials and any(result.num_stable for result in partials) == (one is searching)
            found[one, beam] = [(result.text, result.total, result.num_stable) for result in finals]
            assert [final.stream for final in finals] == streams
    # The beams of the search for partial results decide nothing.
    assert found[recognizer, 10.0] == found[recognizer, 0.5]
    assert [text.split() for text, _, _ in found[recognizer, 0.5]] == SENTENCES[:3]
    assert found[searching, 10.0] == found[searching, 0.5]
    for one, other in zip(found[recognizer, 10.0], found[searching, 10.0], strict=True):
        # The search has heard the utterance by what was known at each chunk.
        assert one == (other[0], pytest.approx(other[1], abs=0.5), len(other[0].split())) and one[1] != other[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    [
        Tdnnf(num_features=6, num_tokens=5, dim=8, bottleneck_dim=4, num_layers=2, prefinal_dim=8, small_dim=8),
        FeedForwardNetwork(6, 5, num_hidden_layers=2, hidden_dim=8, left_context=4, right_context=7),
    ],
    ids=["tdnnf", "feed-forward"],
)
def test_windows_hold_no_more_than_the_network_sees_and_give_the_outputs_of_the_whole(network, monkeypatch):
    monkeypatch.setattr(RunningNorm, "statistics", lambda self, features: (0.0, 1.0))
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    network.eval()
    features = torch.randn(605, 6)
    encoder = ChunkedEncoder(network, WindowSizes(10, 100, 20, 1000))
    assert 0 < encoder.sizes.left < 20
    stream = encoder.open(torch.device("cpu"))
    stream.push(features)
    stream.close()
    chunks = []
    while stream.is_ready:
        assert len(stream.window()) <= 3 * (10 + encoder.sizes.left + encoder.sizes.right)
        chunks += encoder.step([stream])
    whole = network.forward_normalized(features[None], torch.tensor([605]))[0][-1][0]
    assert len(chunks) > 15 and stream.num_outputs == len(whole) == 202
    torch.testing.assert_close(torch.cat(chunks), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("max_frames", [math.inf, 100.0])
def test_utterances_are_heard_again_by_what_has_been_heard_since(max_frames):
    network = Tdnnf(num_features=6, num_tokens=5, dim=8, bottleneck_dim=4, num_layers=2, prefinal_dim=8, small_dim=8)
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    network.eval()
    encoder = ChunkedEncoder(network, WindowSizes(10, 5, 4, 1000, min_feature_std=0.5), max_frames)
    # The levels change, so that the first windows are normalized by something else than the utterances.
    loud = torch.cat([torch.randn(90, 6), 3.0 * torch.randn(241, 6) + 2.0])
    streams = {name: encoder.open(torch.device("cpu")) for name in ("speech", "noise", "nothing")}
    streams["speech"].push(loud)
    streams["noise"].push(0.1 * torch.randn(60, 6))
    for stream in streams.values():
        stream.close()

    def step() -> None:
        ready = [stream for stream in streams.values() if stream.is_ready]
        encoder.step(ready)

    def by_hand(begin: int, end: int) -> torch.Tensor:
        """Of the features from begin to end as they sound once those to end have been heard."""
        heard = loud[:end]
        std = (heard.double().square().mean(0) - heard.double().mean(0).square()).sqrt().float()
        seen = (loud[begin : end + 12] - heard.mean(0)) / std
        outputs, _ = network.forward_normalized(seen[None], torch.tensor([len(seen)]))
        return outputs[-1][0, : -(-(end - begin) // 3)]

    step()
    step()
    first = encoder.utterance_log_probs(list(streams.values()))
    torch.testing.assert_close(first[0], by_hand(0, 60), atol=1e-4, rtol=1e-4)
    # What has only been noise so far is blank, and nothing is nothing.
    assert torch.equal(first[1], torch.tensor([0.0, *[LOG_PROB_IN_NOISE] * 4]).expand(20, 5))
    assert first[2].shape == (0, 5)
    streams["speech"].begin_utterance()
    step()
    (second,) = encoder.utterance_log_probs([streams["speech"]])
    torch.testing.assert_close(second, by_hand(60, 90), atol=1e-4, rtol=1e-4)
    while streams["speech"].is_ready:
        step()
    (second,) = encoder.utterance_log_probs([streams["speech"]])
    torch.testing.assert_close(second, by_hand(60, 331), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_known", "num_counted"), [(300, 300), (5000, 1000)])
def test_the_frames_of_a_known_speaker_count_like_the_oldest_of_the_stream(num_known, num_counted):
    generator = torch.Generator().manual_seed(1)
    known, heard = (5.0 + 2.0 * torch.randn(num, 3, generator=generator) for num in (num_counted, 40))
    statistics = UtteranceCmvn().statistics(known[None], torch.tensor([num_counted]))._replace(num_frames=num_known)
    norm = RunningNorm(3, 1200, 0.5, torch.device("cpu"), statistics)
    everything = torch.cat([known, heard])
    for _ in range(2):
        mean, std = norm.statistics(heard)
        torch.testing.assert_close(mean, everything.mean(0))
        torch.testing.assert_close(std, everything.std(0, unbiased=False))
    norm.add(heard, True)
    mean, _ = norm.statistics(heard)
    torch.testing.assert_close(mean, torch.cat([everything, heard]).mean(0))
    # No more frames count than in any stream.
    short = RunningNorm(3, 100, 0.5, torch.device("cpu"), statistics)
    mean, _ = short.statistics(heard)
    torch.testing.assert_close(mean, (100 * known.mean(0) + heard.sum(0)) / 140)
    # What is known is of speech, so a quiet beginning is normalized, too.
    quiet = torch.zeros(30, 3)
    assert norm.statistics(quiet) is not None
    assert RunningNorm(3, 100, 0.5, torch.device("cpu")).statistics(quiet) is None


@pytest.mark.slow
def test_streams_of_a_known_speaker_are_normalized_and_transformed_from_the_start(recognizer):
    waveform = tones(["PAT", "TO", "KIT"])
    options = StreamingOptions(**QUICK, **ENDLESS)
    speaker = recognizer.speaker_statistics([0.8 * tones(["TWO", "SICK"])], RATE)
    width = recognizer.acoustic_model.num_features
    identity = SpeakerTransform.identity(width)
    shifted = identity._replace(shift=torch.full((width,), 0.5), scale=torch.full((width,), 1.5))
    totals = {}
    streaming = StreamingRecognizer(recognizer, options)
    for name, known in {"none": None, "identity": identity, "speaker": speaker, "shifted": shifted}.items():
        results = run(streaming, streaming.open(RATE, known), waveform)
        assert results[-1].text == "PAT TO KIT" or name == "shifted"
        totals[name] = results[-1].total
        if known is not None:
            (again,) = (one for one in recognize_stream(recognizer, [waveform], RATE, options, known) if one.is_final)
            assert again.total == pytest.approx(totals[name], abs=1e-3)
    assert totals["none"] == pytest.approx(totals["identity"])
    assert abs(totals["speaker"] - totals["none"]) > 1e-3 and abs(totals["shifted"] - totals["none"]) > 0.1


def test_a_network_that_does_not_normalize_knows_no_speaker(recognizer, monkeypatch):
    speaker = recognizer.speaker_statistics([tones(["PAT"])], RATE)
    streaming = StreamingRecognizer(recognizer, StreamingOptions(**QUICK))
    monkeypatch.setattr("asr.recognizer.NormalizingNetwork", Ensemble)
    with pytest.raises(AsrError, match="its acoustic model has no use for a speaker's statistics"):
        streaming.open(RATE, speaker)
    with pytest.raises(AsrError, match="its acoustic model has no use for a speaker's statistics"):
        recognizer([tones(["PAT"])], RATE, speaker=speaker)
    streaming.open(RATE)


@pytest.mark.slow
def test_live_search_and_second_look_share_the_graph(recognizer, monkeypatch):
    made, make = [], SearchGraph.__init__
    monkeypatch.setattr(SearchGraph, "__init__", lambda self, *args: made.append(self) or make(self, *args))
    StreamingRecognizer(recognizer)
    assert len(made) == 1


def test_pauses_end_utterances(recognizer):
    options = StreamingOptions(**QUICK, silence_after_words=0.4)
    quiet = 0.003 * torch.randn(RATE, generator=torch.Generator().manual_seed(2))
    waveform = torch.cat([part for words in SENTENCES for part in (tones(words, seed=9), quiet)])
    results = list(recognize_stream(recognizer, waveform.split(2000), options=options))
    finals = [result for result in results if result.is_final]
    # What is normal to the toy network it knows only after a few words.
    assert [result.text.split() for result in finals[2:]] == [*SENTENCES[2:], []]
    assert [result.reason for result in finals] == ["pause"] * 5 + ["end"]
    starts = [word.start for result in finals for word in result.words]
    assert starts == sorted(starts) and all(one.end <= two.begin for one, two in itertools.pairwise(finals))
    assert finals[-1].end == pytest.approx(len(waveform) / RATE)


@pytest.mark.slow
@pytest.mark.parametrize("lm_fusion", ["chunks", "search"])
def test_long_utterances_end_in_short_pauses_wherever_chunks_end(tiny_bundle_folder, lm_fusion):
    recognizer = Recognizer(Bundle.load(tiny_bundle_folder), mode="rnn", lm_fusion=lm_fusion)
    quiet = 0.003 * torch.randn(RATE // 5, generator=torch.Generator().manual_seed(2))
    sentences = [(*words, "KIT") for words in SENTENCES * 2]
    spoken = [tones(words, seed=9) for words in sentences]
    waveform = torch.cat([part for samples in spoken for part in (samples, quiet)])
    begins = torch.tensor([0, *(len(samples) + len(quiet) for samples in spoken)]).cumsum(0) / RATE
    options = StreamingOptions(chunk_seconds=0.64, left_seconds=1.0, right_seconds=0.2, longest_utterance=3.0)
    results = list(recognize_stream(recognizer, waveform.split(2000), options=options))
    finals = [result for result in results if result.is_final]
    assert len(finals) > 4 and finals[0].begin == 0.0
    assert all(one.end == two.begin for one, two in itertools.pairwise(finals))
    for result in finals[1:-1]:  # the first one is not normalized yet
        assert float((begins - result.end).abs().min()) < 0.35
        assert all(result.begin <= word.start <= word.end <= result.end for word in result.words)
    heard = " ".join(result.text for result in finals[1:])
    # TO and TWO sound alike.
    assert (
        " ".join(word for words in sentences for word in words)
        .replace("TWO", "TO")
        .endswith(heard.replace("TWO", "TO"))
    )
    again = StreamingRecognizer(recognizer, options)
    for one, two in zip(results, run(again, again.open(), waveform, [777, 50_000]), strict=True):
        same(one, two)


@pytest.mark.slow
def test_pauses_without_words_end_utterances_of_which_nothing_is_told(recognizer):
    options = StreamingOptions(**QUICK, silence_before_words=0.5)
    (final,) = recognize_stream(recognizer, torch.zeros(3 * RATE).split(2000), options=options)
    assert final.reason == "end" and not final.words and final.begin > 2.0


@pytest.mark.slow
def test_partial_results_of_every_kind(recognizer):
    waveform = torch.cat([tones(words, seed=3) for words in SENTENCES])
    waveform = waveform[: 3 * RATE]
    for kind in ("agreed", "best", "stable"):
        options = StreamingOptions(**QUICK, **ENDLESS, partial_policy=kind)
        results = list(recognize_stream(recognizer, waveform.split(1600), options=options))
        assert len(results) > (3 if kind == "best" else 1)
        for one, two in itertools.pairwise(results):
            stable = one.text.split()[: one.num_stable]
            assert two.text.split()[: len(stable)] == stable
            assert kind != "stable" or one.num_stable == len(one.words)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["agreed", "best", "stable"])
def test_words_left_out_as_noise_let_no_later_words_in(tiny_bundle_folder, policy):
    """A partial result is that of a recognizer that takes nothing for noise, without the noise."""
    sentence = tones(["KIT", "TO", "SICK", "TO", "SKIP"])
    quiet = 0.003 * torch.randn(RATE // 2, generator=torch.Generator().manual_seed(0))
    waveform = torch.cat([tones(["TO"], phone_seconds=1.0), quiet, sentence])
    options = StreamingOptions(**QUICK, **ENDLESS, partial_policy=policy)
    found = []
    for longest in (None, 0.13):
        one = Recognizer.from_folder(
            tiny_bundle_folder, mode="ngram", lexicon=Lexicon(PRONUNCIATIONS), options={"max_token_seconds": longest}
        )
        found.append(list(recognize_stream(one, waveform.split(1600), options=options)))
    assert found[1][-1].notes == ("noise",) and len(found[1][-1].words) > 1
    for everything, speech in zip(*found, strict=True):
        assert [word for word in everything.words if word in speech.words] == list(speech.words)
        stable = [word for word in everything.words[: everything.num_stable] if word in speech.words]
        assert speech.num_stable == len(stable)
    assert policy == "stable" or any(one.num_stable < len(one.words) for one in found[1])


@pytest.mark.slow
def test_a_lexicon_tells_exact_times(recognizer, tiny_bundle_folder):
    with_lexicon = Recognizer.from_folder(tiny_bundle_folder, decoder="token-passing", lexicon=Lexicon(PRONUNCIATIONS))
    waveform = tones(["SKIP", "PAT", "TWO"])
    options = StreamingOptions(**QUICK)
    final = list(recognize_stream(with_lexicon, waveform.split(1000), options=options))[-1]
    spans = [(word.start, word.end) for word in final.words]
    assert spans == [pytest.approx(span, abs=0.03) for span in [(0.1, 0.46), (0.56, 0.8), (0.9, 1.02)]]


@pytest.mark.slow
def test_k2_finds_the_same(recognizer):
    pytest.importorskip("k2")
    waveform = torch.cat([tones(words, seed=3) for words in SENTENCES[:2]])
    found = [
        list(recognize_stream(recognizer, waveform.split(4000), options=StreamingOptions(**QUICK, decoder=name)))
        for name in ("token-passing", "k2")
    ]
    assert found[0][-1].text == found[1][-1].text and not found[1][0].is_final
    # k2 searches an utterance once, by the outputs of its windows.
    assert found[0][-1].total == pytest.approx(found[1][-1].total, abs=0.5)


@pytest.mark.slow
def test_memory_does_not_grow(searching):
    streaming = StreamingRecognizer(searching, StreamingOptions(**QUICK, **ENDLESS, cache_bytes=150_000))
    stream = streaming.open()
    sizes = []
    for index in range(6):
        streaming.push(stream, tones(SENTENCES[index % 5], seed=index))
        while streaming.is_ready:
            streaming.step()
        one = streaming._streams[stream]
        assert len(one.windows._features) < 160 and len(one.features._held) < 4000
        sizes.append(streaming._decoder._progress[stream].settled.num_frames)
    assert sizes[-1] > sizes[0] > 0
    engine = streaming.engine
    assert engine is not None and engine.statistics().peak_bytes < 500_000 and engine.statistics().num_evictions > 0


def test_bad_pieces_are_refused_and_the_stream_goes_on(recognizer):
    streaming = StreamingRecognizer(recognizer, StreamingOptions(**QUICK))
    stream = streaming.open()
    waveform = tones(["PAT", "TO", "KIT"])
    streaming.push(stream, waveform[:8000])
    with pytest.raises(AsrError, match=r"stream 0 at 0\.50 s: the piece has samples that are NaN"):
        streaming.push(stream, torch.full((100,), math.nan))
    with pytest.raises(AsrError, match=r"NaN, infinite or beyond 10\^9; it is ignored"):
        streaming.push(stream, torch.full((100,), 1e300, dtype=torch.float64))
    with pytest.raises(AsrError, match=r"NaN, infinite or beyond 10\^9; it is ignored"):
        streaming.push(stream, torch.tensor([0.0, -1e30]))  # its power would be infinite
    with pytest.raises(AsrError, match=r"the piece holds torch.uint8; give floating-point samples"):
        streaming.push(stream, torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(AsrError, match=r"shape \(2, 100\)"):
        streaming.push(stream, torch.zeros(2, 100))
    with pytest.raises(AsrError, match=r"stream 0 at 0\.50 s: the piece is of type list; give a tensor"):
        streaming.push(stream, [0.0, 0.1])
    results = run(streaming, stream, waveform[8000:])
    assert results[-1].text == "PAT TO KIT"
    for call in (lambda: streaming.push(stream, waveform), lambda: streaming.close(stream)):
        with pytest.raises(AsrError, match="stream 0 is not open"):
            call()
    with pytest.raises(AsrError, match="speaker is of type str; give what speaker_statistics"):
        streaming.open(speaker="me")
    with pytest.raises(AsrError, match="chunk_seconds is 0"):
        StreamingOptions(chunk_seconds=0)
    for name in ("chunk_seconds", "left_seconds", "longest_utterance", "force_commit_seconds"):
        for value in (math.inf, 1e308):  # as a number of frames, the latter is infinite
            with pytest.raises(AsrError, match=re.escape(f"{name} is {value}; it must be")):
                StreamingOptions(**{name: value})
    with pytest.raises(AsrError, match=r"force_commit_seconds is 0\.1; it must be from 0\.2 to 10\^9, or None"):
        StreamingOptions(force_commit_seconds=0.1)  # words that sound alike could not be told apart
    with pytest.raises(AsrError, match="no decoder 'k3'"):
        StreamingOptions(decoder="k3")
    of_other_types = {"right_seconds": None, "chunk_seconds": "1", "force_commit_seconds": "5", "cache_bytes": "1"}
    for name, value in {**of_other_types, "partial_max_active_states": 2.5}.items():
        with pytest.raises(AsrError, match=f"streaming: {name} is {value!r}; it must be"):
            StreamingOptions(**{name: value})
    with pytest.raises(AsrError, match="no partial_policy 'all'"):
        StreamingOptions(partial_policy="all")


@pytest.mark.parametrize("fails_in", ["advance", "partial", "finalize"])
def test_a_step_that_fails_ends_all_streams_and_new_ones_can_be_opened(searching, monkeypatch, fails_in):
    waveform = tones(["PAT", "TO", "KIT"])
    streaming = StreamingRecognizer(searching, StreamingOptions(**QUICK))
    expected = run(streaming, streaming.open(), waveform)
    first, second = streaming.open(), streaming.open()
    streaming.push(first, waveform)
    streaming.push(second, waveform[:8000])
    decoder, engine = streaming._decoder, streaming.engine
    usual = getattr(decoder, fails_in)

    def failing(*arguments):
        usual(*arguments)
        raise MemoryError

    monkeypatch.setattr(decoder, fails_in, failing)
    streaming.close(first)
    with pytest.raises(MemoryError):
        while streaming.is_ready:
            streaming.step()
    assert not streaming.is_ready and streaming.step() == []
    for call in (lambda: streaming.push(second, waveform), lambda: streaming.close(second)):
        with pytest.raises(AsrError, match=f"stream {second} is not open; .*a `step` that fails, ends them"):
            call()
    for one, other in zip(run(streaming, streaming.open(), waveform), expected, strict=True):
        same(one, other)
    assert streaming.engine is not engine  # whose caches may be half written


@pytest.mark.parametrize("num_samples", [0, 1, 100, 5000])
def test_streams_that_hardly_begin_or_end_within_a_word(recognizer, num_samples):
    streaming = StreamingRecognizer(recognizer, StreamingOptions(**QUICK))
    (final,) = [one for one in run(streaming, streaming.open(), tones(["SICK"])[:num_samples]) if one.is_final]
    assert final.reason == "end" and final.end == pytest.approx(num_samples / RATE)
    assert len(final.words) <= 1 and not streaming.is_ready
    assert streaming.step() == []


def test_another_sampling_rate(recognizer):
    pieces = tones(["PAT", "TO", "KIT"], rate=44100).split(3000)
    results = list(recognize_stream(recognizer, pieces, 44100, StreamingOptions(**QUICK)))
    assert results[-1].text == "PAT TO KIT"
    assert results[-1].end == pytest.approx(1.0, abs=0.001)
