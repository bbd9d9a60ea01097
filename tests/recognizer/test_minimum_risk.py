"""Minimum-Bayes-risk decoding in a recognizer and in streams."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asr.bundle import Bundle
from asr.decoding.mbr import path_of_least_risk
from asr.decoding.nbest import n_best
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


@pytest.mark.parametrize("mode", ["ngram", "rnn"])
def test_recognizers_and_streams_choose_the_path_of_least_risk(bundle, noisy, mode):
    bundle = replace(bundle, decoding={mode: {"output_beam": 12.0}})
    plain = Recognizer(bundle, mode, decoder="token-passing", keep_lattices=True)
    chosen = Recognizer(bundle, mode, decoder="token-passing", options={"mbr_scale": SCALE})
    num_changed = 0
    for one, other in zip(plain(noisy), chosen(noisy), strict=True):
        (piece,) = one.lattices
        (best,) = n_best(piece.lattice, bundle.graph, plain.options, 1)
        expected = path_of_least_risk(piece.lattice, bundle.graph, plain.options, SCALE, best)
        assert other.text == " ".join(expected.words) and other.lattices == ()
        assert other.total == pytest.approx(expected.total, abs=1e-3)
        num_changed += other.text != one.text
    assert num_changed >= 1
    assert [in_stream(chosen, samples) for samples in noisy] != [in_stream(plain, samples) for samples in noisy]


def in_stream(recognizer, samples):
    options = StreamingOptions(min_feature_std=0.0)
    return [result.text for result in recognize_stream(recognizer, [samples], options=options) if result.is_final]
