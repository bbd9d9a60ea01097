"""k2's pass in chunks of any size gives what it gives for the whole; skipped where there is no k2."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr.decoding.online import EndpointRules
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.lm.combine import Difference, Interpolated
from tests.decoding.random_graphs import random_graph, random_log_prob
from tests.reference.lattice_paths import all_sentences
from tests.reference.table_lm import TableLM

pytest.importorskip("k2")
from asr.decoding.k2 import K2Decoder
from asr.decoding.k2_online import K2StreamingDecoder


def fed(decoder, log_prob, cuts):
    (stream,) = decoder.start()
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(log_prob)]):
        decoder.advance([stream], log_prob[None, begin:end], torch.tensor([end - begin]))
    return stream


def same(one, other):
    assert one.reached_final == other.reached_final
    assert (one.best is None) == (other.best is None)
    if one.best is not None and other.best is not None:
        assert one.best.word_ids == other.best.word_ids
        for name in ("am_score", "graph_score", "lm_score", "total"):
            assert getattr(one.best, name) == pytest.approx(getattr(other.best, name), abs=2e-3), name
        assert one.best.start_frames == other.best.start_frames


@settings(max_examples=6)
@given(
    seed=st.integers(0, 10**6),
    with_lm=st.booleans(),
    skip=st.sampled_from([None, 0.5]),
    cuts=st.lists(st.integers(0, 10), max_size=6),
    output_beam=st.sampled_from([3.0, 8.0]),
)
def test_any_chunking_equals_the_whole(seed, with_lm, skip, cuts, output_beam):
    graph = random_graph(seed, num_states=8, num_arcs=30)
    options = DecodingOptions(
        search_beam=12.0,  # above the output beam: what the search prunes depends on the chunks, in k2 too
        output_beam=output_beam,
        min_active_states=2,
        max_active_states=1000,
        am_scale=0.7,
        graph_scale=1.3,
        lm_scale=0.6,
        word_insertion_penalty=-0.4,
        blank_skip_threshold=skip,
    )
    lm = TableLM(graph.vocabulary, seed) if with_lm else None
    log_prob = random_log_prob(seed, 1, 10)[0]
    whole = K2Decoder(graph, options, keep_lattice=True).decode(log_prob[None], torch.tensor([10]), lm)[0]
    decoder = K2StreamingDecoder(graph, options, lm, keep_lattice=True)
    found = decoder.finalize(fed(decoder, log_prob, cuts))
    same(found, whole)
    assert (found.lattice is None) == (whole.lattice is None)
    if found.lattice is not None and whole.lattice is not None:
        ours, theirs = all_sentences(found.lattice, options), all_sentences(whole.lattice, options)
        limit = max(theirs.values()) - output_beam + 1e-3
        assert {words for words, total in ours.items() if total > limit} == {
            words for words, total in theirs.items() if total > limit
        }


def test_words_of_an_unfinished_stream_stand_where_they_were_before_blanks_were_skipped():
    graph, log_prob = random_graph(2, num_states=20, num_arcs=60, final_prob=0.0), random_log_prob(2, 1, 10)
    log_prob[0, 1:5] = torch.tensor([5.0, 0.0, 0.0, 0.0]).log_softmax(0)
    options = DecodingOptions(search_beam=6.0, min_active_states=0, blank_skip_threshold=0.5)
    whole = K2Decoder(graph, options).decode(log_prob, torch.tensor([10]))[0]
    assert not whole.reached_final and whole.num_frames == 7 and whole.best.start_frames[-1] > 6
    decoder = K2StreamingDecoder(graph, options)
    found = decoder.finalize(fed(decoder, log_prob[0], [3, 6]))
    same(found, whole)
    assert torch.equal(found.original_frame, whole.original_frame) and found.num_frames == 7


@pytest.mark.parametrize("cuts", [[], [3], [3, 6]])
@pytest.mark.parametrize("frame", [1, 5])
def test_a_stream_in_which_no_path_survives_has_no_words(frame, cuts):
    graph, log_prob = random_graph(3, num_states=8, num_arcs=30), random_log_prob(3, 1, 8)[0]
    log_prob[frame] = -math.inf
    options = DecodingOptions(search_beam=50.0, min_active_states=0)
    decoder = K2StreamingDecoder(graph, options, keep_lattice=True, inputs="scores")
    stream = fed(decoder, log_prob, cuts)
    assert decoder.partial(stream) is None
    found = decoder.finalize(stream)
    assert found.hypotheses == () and not found.reached_final and found.lattice is None


@pytest.mark.slow
def test_a_model_that_forgets_keeps_what_other_streams_hold():
    graph, log_prob = random_graph(2, num_states=8, num_arcs=30), random_log_prob(2, 2, 20)
    lm, partials = TableLM(graph.vocabulary, 2), []
    mixed = Interpolated([lm, TableLM(graph.vocabulary, seed=1)], [0.5, 0.5])
    small = TableLM(graph.vocabulary, seed=3)
    for own in (Difference(mixed, small), Difference(mixed, small, forget_from=1)):
        decoder = K2StreamingDecoder(graph, lm=own)
        first, second = decoder.start(2)
        decoder.advance([first, second], log_prob[:, :10], torch.tensor([10, 10]))
        decoder.finalize(second)
        decoder.advance([first], log_prob[:1, 10:], torch.tensor([10]))
        partials.append(decoder.partial(first))
    assert partials[0] == partials[1]


@pytest.mark.slow
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 10), max_size=5))
def test_partial_results_follow_the_lattice(seed, cuts):
    graph = random_graph(seed, num_states=8, num_arcs=30)
    wide = DecodingOptions(
        search_beam=math.inf, output_beam=1e9, context_beam=None, min_active_states=0, max_active_states=10**6
    )
    lm = TableLM(graph.vocabulary, seed)
    log_prob = random_log_prob(seed, 1, 10)[0]
    chunked, at_once = K2StreamingDecoder(graph, wide, lm), K2StreamingDecoder(graph, wide, lm)
    partial, expected = chunked.partial(fed(chunked, log_prob, cuts)), at_once.partial(fed(at_once, log_prob, []))
    assert partial is not None and expected is not None
    assert partial.word_ids == expected.word_ids
    assert partial.total == pytest.approx(expected.total, abs=1e-3)


def test_streams_endpoints_and_bad_input():
    graph = random_graph(3, num_states=8, num_arcs=30)
    decoder = K2StreamingDecoder(graph, endpoint_rules=EndpointRules(3, 3, 50))
    first, second = decoder.start(2)
    decoder.advance([first, second], random_log_prob(3, 2, 6), torch.tensor([6, 0]))
    assert decoder.partial(first) is not None and decoder.num_settled_words(first) == 0
    assert not decoder.is_endpoint(second)
    empty = decoder.finalize(second)
    same(empty, K2Decoder(graph).decode(torch.zeros(1, 0, 4), torch.tensor([0]))[0])
    with pytest.raises(AsrError, match=f"stream {second} is not open"):
        decoder.partial(second)
    with pytest.raises(AsrError, match="NaN"):
        decoder.advance([first], torch.full((1, 2, 4), math.nan), torch.tensor([2]))
    same(decoder.finalize(first), K2Decoder(graph).decode(random_log_prob(3, 2, 6)[:1], torch.tensor([6]))[0])
    assert decoder.start() == [0]
    blanks = torch.tensor([5.0, 0.0, 0.0, 0.0]).log_softmax(0).expand(1, 51, 4)
    decoder.advance([0], blanks, torch.tensor([51]))
    assert decoder.is_endpoint(0)
    with pytest.raises(AsrError, match="use the decoder token-passing"):
        K2StreamingDecoder(random_graph(0, epsilons=True))


@pytest.mark.slow
def test_an_utterance_of_an4(corpora):
    from asr.audio.io import read_audio
    from asr.bundle import Bundle
    from asr.decoding.build import language_models
    from asr.recognizer import Recognizer

    recognizer = Recognizer(Bundle.load(Path(__file__).parents[2] / "checkpoints" / "an4"), mode="rnn")
    path = sorted((corpora / "an4" / "wav" / "test").rglob("*-b.*"))[0]
    waveform = read_audio(path)
    features, num_frames = recognizer.features(waveform[None], torch.tensor([len(waveform)]))
    with torch.no_grad():
        log_prob, num_frames = recognizer.acoustic_model(features, num_frames)
    lm = language_models(recognizer.bundle, "rnn", 1.0, torch.device("cpu")).model
    graph, options = recognizer.bundle.graph, recognizer.options
    whole = K2Decoder(graph, options).decode(log_prob, num_frames, lm)[0]
    assert whole.best is not None and len(whole.best.words) > 3
    decoder = K2StreamingDecoder(graph, options, lm)
    for size in (7, 16):
        same(decoder.finalize(fed(decoder, log_prob[0], range(size, int(num_frames), size))), whole)
