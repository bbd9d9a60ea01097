"""`.half()`, `.bfloat16()`, autocast, `train()` and default devices of a recognizer and of an acoustic model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import asr
from asr.bundle import Bundle
from asr.ctc import CTCDecoder
from asr.errors import AsrError
from asr.models.acoustic_model import AcousticModel
from asr.recognizer import Recognizer
from asr.streaming import StreamingRecognizer, recognize_stream
from asr.testing.tones import RATE, TEXT, tones

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


def test_an_acoustic_model_takes_integer_samples_and_refuses_lengths_that_do_not_fit(tiny_bundle_folder: Path) -> None:
    model = AcousticModel.from_bundle(Bundle.load(tiny_bundle_folder))
    waveform = tones(WORDS, seed=9)
    integers = (waveform * 32768).round().clamp(-32768, 32767).to(torch.int16)
    assert torch.equal(model(integers)[0], model(integers.float() / 32768)[0])
    with pytest.raises(AsrError, match=r"the waveform holds torch\.int64; give floating-point samples"):
        model(integers.long())
    size = len(waveform)
    for num_samples, message in (
        ([size + 1], f"from {size + 1} to {size + 1}; the waveform has {size} samples"),
        ([-1], "num_samples is from -1 to -1"),
        ([size, size], r"num_samples has shape \(2,\); give \(1,\)"),
        (size, r"num_samples has shape \(\); give \(1,\)"),
    ):
        with pytest.raises(AsrError, match=message):
            model(waveform, torch.tensor(num_samples))


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


@pytest.mark.skipif(not hasattr(torch, "get_default_device"), reason="torch 1.13 has no default device")
def test_torch_may_make_its_tensors_on_another_device(tiny_bundle_folder: Path) -> None:
    """As after `torch.set_default_device("cuda")`: recognizers move by `.to("cuda")` alone."""
    waveform = tones(WORDS, seed=9)
    log_prob = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    with torch.device("meta"):
        recognizer = asr.load(tiny_bundle_folder)
        assert {part.device.type for part in (*recognizer.parameters(), *recognizer.buffers())} == {"cpu"}
        assert recognizer(waveform)[0].text.split() == WORDS
        assert [*recognize_stream(recognizer, [waveform], RATE)][-1].text.split() == WORDS
        decoder = CTCDecoder(["-", "a", "b"], blank=0)
        found = decoder(log_prob)[0].text
    assert found == decoder(log_prob)[0].text
