"""Whoever loads or calls something in `torch.inference_mode()` may go on outside of it, and the other way round.

`torch.compile` changes nothing.
"""

from __future__ import annotations

import pytest
import torch

import asr
from asr.ctc import CTCDecoder
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.recognizer import Recognizer
from asr.streaming import StreamingRecognizer
from asr.testing.tones import RATE, TEXT, tones
from tests.reference.toy_network import ToyNetwork

SENTENCES = [line.split() for line in TEXT[:2]]


@pytest.mark.slow
def test_recognizers_loaded_and_called_in_inference_mode(tiny_bundle_folder):
    expected = [asr.load(tiny_bundle_folder)(tones(words), RATE)[0].text for words in SENTENCES]
    with torch.inference_mode():
        recognizer = asr.load(tiny_bundle_folder)
        first = recognizer(tones(SENTENCES[0]), RATE)[0].text
    second = recognizer(tones(SENTENCES[1]), RATE)[0].text
    with torch.inference_mode():
        again = recognizer(tones(SENTENCES[0]), RATE)[0].text
    assert [first, second] == expected
    assert again == first


@pytest.mark.slow
def test_a_recognizer_loaded_or_changed_in_inference_mode_is_as_any_other(tiny_bundle_folder):
    """Products of bytes included, which need ordinary weights."""
    samples = tones(SENTENCES[0])
    expected = asr.load(tiny_bundle_folder)(samples)[0]
    with torch.inference_mode():
        recognizer = asr.load(tiny_bundle_folder)
    assert recognizer(samples)[0].total == expected.total
    with torch.inference_mode():
        recognizer.half().float()
    assert not any(parameter.is_inference() for parameter in recognizer.parameters())
    assert recognizer(samples)[0].text == expected.text


def test_what_prepare_warms_up_is_what_recognition_runs(tiny_bundle_folder, monkeypatch):
    """With gradients, layers are neither packed nor multiply bytes, and the first recording waits for that."""
    monkeypatch.setattr("asr.recognizer.needs_warm_up", lambda *_: True)  # whatever this process has run before
    recognizer = Recognizer(asr.Bundle.load(tiny_bundle_folder))
    modes = []
    recognizer.acoustic_model.register_forward_pre_hook(
        lambda *_: modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    )
    recognizer.prepare()
    warmed_up = len(modes)
    recognizer(tones(SENTENCES[0]), RATE)
    assert 0 < warmed_up < len(modes)
    assert set(modes) == {(False, False)}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch, "compile"), reason="needs torch.compile")
def test_torch_compile_traces_no_loops_of_numba(tiny_bundle_folder):
    recognizer = asr.load(tiny_bundle_folder)
    samples = tones(SENTENCES[0])
    expected = recognizer(samples, RATE)[0].text
    compiled = torch.compile(recognizer)
    assert [compiled(samples, RATE)[0].text for _ in range(2)] == [expected] * 2
    assert torch.compile(lambda audio: recognizer(audio * 1.0, RATE)[0].text)(samples) == expected
    streams = StreamingRecognizer(recognizer)
    stream = streams.open(RATE)

    def heard(audio):
        streams.push(stream, audio * 1.0)
        streams.close(stream)
        return [result.text for result in streams.step() if result.is_final]

    assert torch.compile(heard)(samples) == [expected]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch, "compile"), reason="needs torch.compile")
def test_torch_compile_traces_no_loops_of_a_ctc_decoder():
    pytest.importorskip("kaldifst", reason="compiling graphs needs kaldifst")
    decoder = CTCDecoder(["-", "|", "a", "b"], words=["ab", "ba"])
    log_probs = torch.randn((20, 4), generator=torch.Generator().manual_seed(0)).log_softmax(1)
    expected, stream = decoder(log_probs)[0], decoder.stream()

    def streamed(frames):
        stream.accept(frames * 1.0)
        return stream.partial().text, stream.finish()

    assert torch.compile(lambda frames: decoder(frames * 1.0)[0])(log_probs) == expected
    assert torch.compile(streamed)(log_probs)[1] == expected


@pytest.mark.slow
def test_streams_that_change_modes_between_chunks(tiny_bundle_folder):
    recognizer = Recognizer(asr.Bundle.load(tiny_bundle_folder))
    with torch.inference_mode():
        streams = StreamingRecognizer(recognizer)
    stream = streams.open(RATE)
    texts = []
    for number, piece in enumerate(tones(SENTENCES[0]).split(RATE // 4)):
        with torch.inference_mode(number % 2 == 0):
            streams.push(stream, piece)
            while streams.is_ready:
                texts += [result.text for result in streams.step() if result.is_final]
    streams.close(stream)
    while streams.is_ready:
        texts += [result.text for result in streams.step() if result.is_final]
    assert " ".join(texts) == recognizer(tones(SENTENCES[0]), RATE)[0].text


def test_cached_models_that_change_modes_between_queries():
    word_id = torch.tensor([3, 4, 5])
    for options in (CacheOptions(), CacheOptions(capacity_bytes=1 << 20), CacheOptions(recombination_length=1)):
        expected, found = [], []
        plain = CachedRNNLM(ToyNetwork(), options)
        with torch.inference_mode():
            switched = CachedRNNLM(ToyNetwork(), options)
        for model, scores in ((plain, expected), (switched, found)):
            context_idx = model.start(3)
            for step in range(4):
                with torch.inference_mode(step % 2 == 0 and model is switched):
                    log_prob, context_idx = model.score(context_idx, word_id)
                    model.retain(context_idx)
                    scores.append(log_prob.tolist())
        assert found == expected
