"""`.half()`, `.bfloat16()`, autocast and `train()` of a recognizer and of an acoustic model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from asr.bundle import Bundle
from asr.models.acoustic_model import AcousticModel
from asr.recognizer import Recognizer
from asr.streaming import StreamingRecognizer
from asr.testing.tones import TEXT, tones

WORDS = TEXT[0].split()
# torch 1.13 has no float16 convolution on a CPU.
TYPES = [torch.bfloat16, *([torch.float16] if int(torch.__version__[0]) > 1 else [])]


@pytest.fixture
def recognizer(tiny_bundle_folder: Path) -> Recognizer:
    return Recognizer(Bundle.load(tiny_bundle_folder), mode="ngram", decoder="token-passing")


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_types_are_for_the_network_alone(recognizer: Recognizer, kind: torch.dtype) -> None:
    before = copy.deepcopy(recognizer)
    recognizer.to(kind)
    assert {part.dtype for part in recognizer.acoustic_model.parameters()} == {kind}
    for one, other in zip(recognizer.features.buffers(), before.features.buffers(), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)
    assert recognizer(tones(WORDS, seed=9))[0].text.split() == WORDS
    streaming = StreamingRecognizer(recognizer)
    stream = streaming.open()
    streaming.push(stream, tones(WORDS, seed=9))
    streaming.close(stream)
    results = []
    while streaming.is_ready:
        results += streaming.step()
    assert results[-1].text.split() == WORDS


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_an_acoustic_model_in_another_type(tiny_bundle_folder: Path, kind: torch.dtype) -> None:
    model = AcousticModel.from_bundle(Bundle.load(tiny_bundle_folder))
    waveform = tones(WORDS, seed=9)
    with torch.no_grad():
        wanted, _ = model(waveform)
        found, _ = model.to(kind)(waveform)
    assert found.dtype == torch.float32 and not torch.equal(found, wanted)
    assert (found.exp() - wanted.exp()).abs().max() < 0.1


def test_autocast_reaches_the_network_but_not_features(recognizer: Recognizer) -> None:
    waveform = tones(WORDS, seed=9)
    plain = recognizer(waveform)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = recognizer(waveform)[0]
        features, _ = recognizer.features(waveform[None], torch.tensor([len(waveform)]))
    assert torch.equal(features, recognizer.features(waveform[None], torch.tensor([len(waveform)]))[0])
    assert cast.text == plain.text and cast.total != plain.total


def test_a_recognizer_decodes_in_evaluation_mode(recognizer: Recognizer) -> None:
    wanted = recognizer(tones(WORDS, seed=9))[0].total
    assert not any(part.training for part in recognizer.train().modules())
    recognizer.acoustic_model.train()
    assert recognizer(tones(WORDS, seed=9))[0].total == wanted
