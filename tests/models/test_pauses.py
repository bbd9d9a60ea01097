"""Long pauses are silence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from asr.audio.fbank import LOG_FLOOR
from asr.bundle import Bundle
from asr.models.interface import LOG_PROB_IN_NOISE, NormalizingNetwork
from asr.models.pauses import in_pauses, with_silence_in_pauses
from asr.models.windows import ChunkedEncoder, RunningNorm, WindowSizes
from asr.recognizer import Recognizer
from asr.streaming import recognize_stream


def pauses_one_by_one(energy: list[float], heard: list[float], margin: int) -> list[bool]:
    """`in_pauses` of one utterance, frame by frame."""
    audible = [each for each in heard if each > LOG_FLOOR + 1.0]
    if len(energy) < 2 * margin:
        return [False] * len(energy)
    softest = float(np.quantile(audible, 0.05)) if audible else math.inf
    loudest = sorted([LOG_FLOOR] * 10 + heard)[-10]
    threshold = softest + min(2.0, 0.4 * (loudest - softest)) if audible else math.inf
    loud = [each > threshold for each in energy]
    return [not any(loud[max(0, t - margin) : t + margin + 1]) for t in range(len(energy))]


def energies(seed: int, num_frames: int) -> Tensor:
    """Noise with stretches of speech, which is louder and louder, and of digital silence."""
    generator = torch.Generator().manual_seed(seed)
    energy = -9.0 + 0.3 * torch.randn(num_frames, generator=generator)
    for first in torch.randint(0, num_frames, (3,), generator=generator).tolist():
        energy[first : first + 15] += 0.4 * torch.arange(15)[: num_frames - first]
        energy[first + 40 : first + 60] = LOG_FLOOR
    return energy


@pytest.mark.parametrize("margin", [0, 3, 10, 60, 90, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_pauses_are_those_of_the_definition(margin: int, seed: int) -> None:
    lengths = [200, 120, 65, 9]
    batch = torch.full((len(lengths), 200), torch.nan)
    for row, length in zip(batch, lengths, strict=True):
        row[:length] = energies(seed * 10 + length, length)
    inside = ~batch.isnan()
    found = in_pauses(batch, inside, batch, margin)
    for row, length, pauses in zip(batch, lengths, found, strict=True):
        heard = row[:length].tolist()
        assert pauses[:length].tolist() == pauses_one_by_one(heard, heard, margin)
    assert margin > 10 or ((found & inside).any() and (~found & inside).any())


def test_nothing_but_digital_silence_is_a_pause() -> None:
    silent, inside = torch.full((1, 100), LOG_FLOOR), torch.ones(1, 100, dtype=torch.bool)
    assert in_pauses(silent, inside, silent, 25).all()
    assert not in_pauses(silent, inside, silent[:, :0], 25).any()  # nothing has been heard yet


@pytest.mark.parametrize("num_frames", [50, 80])
def test_pauses_have_a_least_length(num_frames: int) -> None:
    quiet, inside = torch.full((2, num_frames), -9.0), torch.arange(num_frames) < torch.tensor([[50], [49]])
    assert in_pauses(quiet, inside, quiet, 25).any(1).tolist() == [True, False]


def test_outputs_in_pauses_are_silence_and_others_stay() -> None:
    energy = torch.full((1, 300), -9.0)
    energy[0, 101:200] = -3.0
    features = energy[:, :, None].expand(-1, -1, 4)
    log_prob = torch.randn(1, 100, 5).log_softmax(2)
    found = with_silence_in_pauses(log_prob, features, torch.tensor([300]), 3, 25)
    # Of output t, frame 3 t + 1 is the middle; speech has frames 76 to 224 with its margins.
    stays = [76 <= 3 * t + 1 < 225 for t in range(100)]
    assert torch.equal(found[0, stays], log_prob[0, stays])
    silence = found[0, [not each for each in stays]]
    assert (silence[:, 0] == 0.0).all() and (silence[:, 1:] == LOG_PROB_IN_NOISE).all()
    longer = torch.cat([features, torch.zeros(1, 60, 4)], dim=1)
    more = torch.cat([log_prob, log_prob[:, :20]], dim=1)
    assert torch.equal(with_silence_in_pauses(more, longer, torch.tensor([300]), 3, 25)[:, :100], found)
    assert with_silence_in_pauses(log_prob[:, :0], features[:, :0], torch.tensor([0]), 3, 25).shape == (1, 0, 5)


class Talkative(NormalizingNetwork):
    """Always finds token 1."""

    def __init__(self) -> None:
        super().__init__(4, 3, 2)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward_normalized(self, features: Tensor, num_frames: Tensor) -> Any:
        """See `NormalizingNetwork`."""
        found = torch.full((len(features), -(-features.shape[1] // 2), 3), -5.0)
        found[:, :, 1] = -0.1
        return [found], (num_frames + 1) // 2


def stream_outputs(features: Tensor, sizes: WindowSizes, piece: int) -> tuple[Tensor, Tensor]:
    encoder = ChunkedEncoder(Talkative(), sizes)
    stream = encoder.open(torch.device("cpu"))
    found = []
    for part in features.split(piece):
        stream.push(part)
        while stream.is_ready:
            found += encoder.step([stream])
    (again,) = encoder.utterance_log_probs([stream])
    return torch.cat(found), again


@pytest.mark.parametrize("piece", [7, 1000])
def test_streams_are_silent_in_long_pauses_after_speech(piece: int) -> None:
    energy = -9.0 + 0.2 * torch.randn(1200, generator=torch.Generator().manual_seed(1))
    energy[100:200] += 6.0
    energy[900:1000] += 6.0
    features = energy[:, None] + torch.randn(1200, 4, generator=torch.Generator().manual_seed(2)) * 0.1
    sizes = WindowSizes(10, 30, 20, 400, 0.5, pause_margin=25)
    outputs, again = stream_outputs(features, sizes, piece)
    for found in (outputs, again):
        words = (found.argmax(1) == 1).tolist()
        assert all(words[50:100]) and all(words[450:500])
        assert not any(words[115:435]) and not any(words[515:])
    assert (stream_outputs(features, WindowSizes(10, 30, 20, 400, 0.5), piece)[0][50:].argmax(1) == 1).all()


def test_digital_silence_does_not_count_in_the_normalization_of_streams() -> None:
    speech = torch.randn(100, 4) - 5.0
    norms = [RunningNorm(4, 1000, 0.0, torch.device("cpu")) for _ in range(2)]
    for norm in norms:
        norm.add(speech, True)
    norms[1].add(torch.full((50, 4), LOG_FLOOR), False)
    for expected, found in zip(*(norm.statistics(speech[:30]) or () for norm in norms), strict=True):
        assert torch.equal(expected, found)
    mixed = torch.cat([speech[:30], torch.full((50, 4), LOG_FLOOR)])
    assert torch.equal((norms[1].statistics(mixed) or ())[1], (norms[0].statistics(speech[:30]) or ())[1])


@pytest.mark.slow
def test_the_noise_of_long_pauses_has_no_words(librispeech: Bundle) -> None:
    samples, rate = soundfile.read(Path("scripts/demo_clips/river.flac"), dtype="float32")
    generator = torch.Generator().manual_seed(0)
    noise = [3e-4 * torch.randn(seconds * rate, generator=generator) for seconds in (1, 4, 4)]
    clip = torch.from_numpy(samples)
    waveform = torch.cat([noise[0], clip, noise[1], clip, noise[2]])
    num_words = 13  # of the clip

    def counts(pause_seconds: float) -> tuple[int, int]:
        recognizer = Recognizer(librispeech, "ngram", options={"pause_seconds": pause_seconds})
        finals = [each for each in recognize_stream(recognizer, waveform.split(3000), rate) if each.is_final]
        return len(recognizer(waveform, rate)[0].words), sum(len(each.words) for each in finals)

    assert counts(0.5) == (2 * num_words, 2 * num_words)
    assert min(counts(math.inf)) > 2 * num_words  # the network alone finds some
