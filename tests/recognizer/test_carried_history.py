"""Histories carried over the segments of recordings and the utterances of streams."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from asr.audio.segments import segment_batches, split_at_pauses
from asr.bundle import Bundle
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.lm.evaluate import network_word_scores
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.recognizer import Recognizer
from asr.serialization import ModelSpec
from asr.streaming import StreamingOptions, StreamingRecognizer
from asr.testing.tones import RATE, TEXT, tones
from asr.text.symbols import EOS_ID
from tests.reference.table_lm import TableLM

SENTENCES = [line.split() for line in TEXT[:8]]
CARRY = {"carry_history": True}


@pytest.fixture(scope="module")
def bundle(tiny_bundle_folder):
    """The tiny bundle with a network whose scores depend much on what came before."""
    loaded = Bundle.load(tiny_bundle_folder)
    torch.manual_seed(1)
    config = {"embedding_size": 8, "hidden_size": 12, "maxent_order": 2, "maxent_size": 64, "log_z": 6.0}
    network = RNNLanguageModel(loaded.small_ngram.vocabulary, RNNLMConfig(**config, carry_state=True))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.8)
    return replace(loaded, rnn_lm=ModelSpec("RnnLm", config, network.eval()))


def expected_lm_scores(bundle, sentences, carries=True):
    """The language model's score of each sentence of a session: the network over the whole text, less the trigram."""
    network, small = bundle.rnn_lm.network, bundle.small_ngram
    texts = [[*(small.vocabulary.id_of(word) for word in words), EOS_ID] for words in sentences]
    if carries:
        scores = network_word_scores(network, np.concatenate(texts).astype(np.int32))[0]
        large = [float(part.sum()) for part in scores.split([len(text) for text in texts])]
    else:
        large = [float(network_word_scores(network, np.array(text, dtype=np.int32))[0].sum()) for text in texts]
    less = [float(small.score_sentence(words).sum()) for words in sentences]
    return [one - other for one, other in zip(large, less, strict=True)]


def sentence_of(result):
    return [word.text for word in result.words]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoder", "lm_fusion"),
    [("token-passing", "lattice"), ("token-passing", "chunks"), ("token-passing", "search"), ("k2", "lattice")],
)
def test_segments_are_scored_after_the_words_before_them(bundle, decoder, lm_fusion):
    if decoder == "k2":
        pytest.importorskip("k2")
    recognizer = Recognizer(bundle, "rnn", decoder=decoder, lm_fusion=lm_fusion, options=CARRY)
    waveforms = [tones(words, seed=index) for index, words in enumerate(SENTENCES)]
    sessions = ["a", "b", "a", "a", "c", "b", "b", "a"]
    results = recognizer(waveforms, sessions=sessions)
    for session in "abc":
        own = [result for result, name in zip(results, sessions, strict=True) if name == session]
        found = [sentence_of(result) for result in own]
        assert all(found) and all(result.is_complete for result in own)
        assert [result.lm_score for result in own] == pytest.approx(expected_lm_scores(bundle, found), abs=2e-3)
        # Alone, a session is what it is among others.
        alone = recognizer(
            [waveforms[i] for i, name in enumerate(sessions) if name == session], sessions=[0] * len(own)
        )
        for one, other in zip(own, alone, strict=True):
            assert one.words == other.words
            assert one.total == pytest.approx(other.total, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rnn", "interpolated"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_long_recordings_in_one_batch_are_what_they_are_alone(bundle, mode, num_workers):
    resources = ResourceOptions(max_segment_seconds=1.0, batch_seconds=2.5, num_workers=num_workers)
    recognizer = Recognizer(bundle, mode, options=CARRY, resources=resources)
    plain = Recognizer(bundle, mode, resources=resources)
    waveforms = [
        torch.cat([tones(words, seed=seed) for words in SENTENCES[seed : seed + 3 + seed % 2]]) for seed in range(4)
    ]
    together, apart = recognizer(waveforms), [recognizer(waveform)[0] for waveform in waveforms]
    for one, other in zip(together, apart, strict=True):
        assert one.words == other.words
        assert one.lm_score == pytest.approx(other.lm_score, abs=5e-3)
    without = plain(waveforms)
    assert any(
        one.lm_score != pytest.approx(other.lm_score, abs=0.1) for one, other in zip(together, without, strict=True)
    )


@pytest.mark.slow
def test_without_it_every_segment_starts_anew(bundle):
    waveforms = [tones(words, seed=3) for words in (*SENTENCES[:3], SENTENCES[0])]
    results = Recognizer(bundle, "rnn")(waveforms)
    found = [sentence_of(result) for result in results]
    assert [result.lm_score for result in results] == pytest.approx(
        expected_lm_scores(bundle, found, carries=False), abs=2e-3
    )
    assert results[0].total == results[3].total
    plain = Recognizer(bundle, "rnn", resources=ResourceOptions(max_segment_seconds=1.0, batch_seconds=1.0))
    whole = torch.cat(waveforms)
    segments = plain([whole[begin:end] for begin, end in split_at_pauses(whole, RATE, 1.0)])
    assert len(segments) > 2
    assert plain(whole)[0].lm_score == pytest.approx(sum(segment.lm_score for segment in segments), abs=2e-3)
    # So does the first segment of a recording in any case.
    first = Recognizer(bundle, "rnn", options=CARRY)(waveforms)
    assert [result.total for result in first] == [result.total for result in results]


def test_batches_keep_the_order_of_each_session():
    lengths = [3, 1, 4, 1, 5, 2]
    sessions = ["a", "b", "a", "c", "b", "d"]
    recordings = [torch.rand(length * RATE) for length in lengths]
    batches = list(segment_batches(recordings, RATE, 1.0, 2.0, sessions))
    seen: list[tuple[int, int]] = []
    for batch in batches:
        of_batch = [sessions[segment.recording_idx] for segment in batch]
        assert len(set(of_batch)) == len(of_batch) and sum(len(segment.samples) for segment in batch) <= 2 * RATE
        seen += [(segment.recording_idx, segment.begin) for segment in batch]
    for session in "abcd":
        own = [place for place in seen if sessions[place[0]] == session]
        assert own == sorted(own)
    for index, recording in enumerate(recordings):
        begins = [begin for own, begin in sorted(seen) if own == index]
        parts = {(s.recording_idx, s.begin): s.samples for batch in batches for s in batch}
        assert torch.equal(torch.cat([parts[index, begin] for begin in begins]), recording)
    assert any(len(batch) > 1 for batch in batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lm_fusion", "policy"), [("lattice", "agreed"), ("search", "agreed"), ("lattice", "stable"), ("chunks", "best")]
)
def test_utterances_of_streams_are_scored_after_those_before_them(bundle, lm_fusion, policy):
    recognizer = Recognizer(bundle, "rnn", lm_fusion=lm_fusion, options=CARRY)
    options = StreamingOptions(
        chunk_seconds=0.3, left_seconds=1.0, right_seconds=0.2, silence_after_words=0.3, partial_policy=policy
    )
    streaming = StreamingRecognizer(recognizer, options)
    pause = torch.zeros(RATE)
    streams = [streaming.open() for _ in range(2)]
    for stream, order in zip(streams, ([0, 3, 1], [1, 2]), strict=True):
        streaming.push(stream, torch.cat([part for i in order for part in (tones(SENTENCES[i], seed=i), pause)]))
        streaming.close(stream)
    finals = {stream: [] for stream in streams}
    while streaming.is_ready:
        for result in streaming.step():
            if result.is_final and result.words:
                finals[result.stream].append(result)
    assert [len(own) for own in finals.values()] == [3, 2]
    for own in finals.values():
        expected = expected_lm_scores(bundle, [sentence_of(result) for result in own])
        assert [result.lm_score for result in own] == pytest.approx(expected, abs=2e-3)
    # Later streams know nothing of earlier ones.
    stream = streaming.open()
    streaming.push(stream, torch.cat([tones(SENTENCES[0], seed=0), pause]))
    streaming.close(stream)
    results = []
    while streaming.is_ready:
        results += streaming.step()
    found = next(result for result in results if result.is_final)
    assert streaming._carried is not None and len(streaming._carried) == 0
    assert found.lm_score == pytest.approx(finals[streams[0]][0].lm_score, abs=2e-3)


def test_a_bundle_may_carry_and_a_user_may_refuse(bundle):
    tuned = replace(
        bundle, decoding={"rnn": {"lm_scale": 0.2, "carry_history": True}, "ngram": {"carry_history": True}}
    )
    assert Recognizer(tuned, "rnn").carries_history
    assert not Recognizer(tuned, "rnn", options={"carry_history": False}).carries_history
    assert not Recognizer(tuned, "ngram").carries_history
    assert not Recognizer(bundle, "rnn").carries_history


def test_what_cannot_carry_is_refused(bundle):
    for options in ({"second_pass": "lattice", "second_pass_mode": "large_ngram"}, {"second_pass": "nbest"}):
        with pytest.raises(AsrError, match=r"carry_history has no effect here: it needs .* and no second pass"):
            Recognizer(bundle, "rnn", options={**CARRY, **options})
    with pytest.raises(AsrError, match="num_workers is 2, but with carry_history a batch needs the words of the one"):
        Recognizer(bundle, "rnn", options=CARRY, resources=ResourceOptions(num_workers=2))
    with pytest.raises(AsrError, match="carry_history: TableLM carries nothing between sentences; leave it out"):
        Recognizer(bundle, language_model=TableLM(bundle.small_ngram.vocabulary), options=CARRY)
    with pytest.raises(AsrError, match="carry_history is 1; it must be true or false"):
        Recognizer(bundle, "rnn", options={"carry_history": 1})
    with pytest.raises(AsrError, match="streaming: k2 starts every utterance from <s>"):
        StreamingRecognizer(Recognizer(bundle, "rnn", options=CARRY), StreamingOptions(decoder="k2"))
    with pytest.raises(AsrError, match="sessions have no effect without carry_history"):
        Recognizer(bundle, "rnn")([tones(["PAT"])], sessions=["a"])
    with pytest.raises(AsrError, match="there are 2 sessions for 1 recordings"):
        Recognizer(bundle, "rnn", options=CARRY)([tones(["PAT"])], sessions=["a", "b"])


def test_a_network_that_did_not_learn_it_is_named(bundle, tiny_bundle_folder, caplog):
    with caplog.at_level(logging.WARNING):
        Recognizer(bundle, "rnn", options=CARRY)
        assert not caplog.records
        Recognizer(Bundle.load(tiny_bundle_folder), "rnn", options=CARRY)
    assert "was trained with every sentence on its own" in caplog.text
