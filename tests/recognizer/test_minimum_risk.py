"""Minimum-Bayes-risk decoding in a recognizer and in streams."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from asr.bundle import Bundle
from asr.decoding.mbr import PathPosteriors
from asr.decoding.nbest import n_best
from asr.decoding.words import with_final_words
from asr.recognizer import Recognizer
from asr.streaming import StreamingOptions, recognize_stream
from asr.testing.tones import TEXT, tones

SCALE = 0.05


@pytest.fixture(scope="module")
def bundle(tiny_bundle_folder):
    return Bundle.load(tiny_bundle_folder)


@pytest.fixture(scope="module")
def noisy():
    generator = torch.Generator().manual_seed(7)
    clean = [tones(line.split(), seed=number) for number, line in enumerate(TEXT[:5])]
    return [row + 0.3 * torch.randn(len(row), generator=generator) for row in clean]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ngram", "rnn"])
def test_recognizers_and_streams_choose_the_path_of_least_risk(bundle, noisy, mode):
    bundle = replace(bundle, decoding={mode: {"output_beam": 12.0}})
    plain = Recognizer(bundle, mode, decoder="token-passing", keep_lattices=True)
    chosen = Recognizer(bundle, mode, decoder="token-passing", options={"mbr_scale": SCALE})
    num_changed = 0
    for one, other in zip(plain(noisy), chosen(noisy), strict=True):
        (piece,) = one.lattices
        (best,) = n_best(piece.lattice, bundle.graph, plain.options, 1)
        expected = PathPosteriors(piece.lattice, plain.options).path_of_least_risk(bundle.graph, SCALE, best)
        assert other.text == " ".join(expected.words) and other.lattices == ()
        assert other.total == pytest.approx(expected.total, abs=1e-3)
        num_changed += other.text != one.text
    assert num_changed >= 1
    assert [in_stream(chosen, samples) for samples in noisy] != [in_stream(plain, samples) for samples in noisy]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ngram", "rnn"])
def test_threads_share_the_utterances(bundle, noisy, mode, threads, monkeypatch):
    calibration = {"bias": 0.5, "terms": {"word_posterior": {"knots": [-9.0, 9.0], "values": [-3.0, 2.0]}}}
    bundle = replace(bundle, confidence={"rnn": calibration})
    recognizer = Recognizer(bundle, mode, decoder="token-passing", options={"mbr_scale": SCALE})
    recognizer.prepare()  # which recognizes something itself if this process has not done so
    seen, made = set(), []

    def noting(*arguments):
        seen.add(threading.get_ident())
        time.sleep(0.01)
        made.append((arguments, with_final_words(*arguments)))
        return made[-1][1]

    monkeypatch.setattr("asr.recognizer.with_final_words", noting)
    found = recognizer(noisy)
    assert len(made) == len(noisy) and len(seen) == threads and threading.get_ident() in seen
    # One after the other in this thread, the results are the same to the last digit.
    assert all(with_final_words(*arguments).best == final.best for arguments, final in made)
    told = {tuple(word.confidence for word in result.words) for result in found}
    assert told == {final.best.confidences for _, final in made}
    assert all(any(confidence < 0.9 for confidence in one) for one in told)


def test_posteriors_are_no_confidences_unless_asked_for(bundle):
    samples = [tones(TEXT[0].split())]
    recognizer = Recognizer(bundle, "ngram", decoder="token-passing", options={"mbr_scale": SCALE})
    lists = Recognizer(bundle, "ngram", decoder="token-passing", options={"mbr_scale": SCALE}, keep_lattices=True)
    found = recognizer(samples), recognizer(samples, nbest=2), lists(samples)
    has_confidences = [{word.confidence is not None for word in result.words} for (result,) in found]
    assert has_confidences == [{False}, {True}, {True}]


def in_stream(recognizer, samples):
    options = StreamingOptions(min_feature_std=0.0)
    return [result.text for result in recognize_stream(recognizer, [samples], options=options) if result.is_final]
