"""Adaptation to a speaker: what it trains, what it leaves alone, and its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.graph.context import TIED_STATES, TiedStates
from asr.graph.denominator_graph import DenominatorGraph
from asr.models.adaptation import RecognizedSpeech, SpeakerTransform, adapt, numerator_pieces, score_of_speaker
from asr.models.chain_preparation import denominator_graph, phone_histories
from asr.models.interface import NormalizingNetwork
from asr.models.lfmmi import LfMmi
from asr.models.tdnnf import Tdnnf
from asr.recognizer import Recognizer
from asr.results import StageTimes

ROOT = Path(__file__).resolve().parents[2]
CLIPS = sorted((ROOT / "scripts" / "demo_clips").glob("*.flac"))
# Two phones; the first frame of each depends on the phone before.
STATES = TiedStates(
    ("SIL", "a", "b"), np.array([[0, 1, 3], [0, 2, 4], [0, 1, 3]]), np.array([[0, 5, 6], [0, 5, 6], [0, 5, 6]])
)
DENOMINATOR = denominator_graph(phone_histories([[0, 1, 2, 0], [0, 2, 1, 1, 0]], 3), STATES)


@pytest.fixture(scope="module")
def network() -> Tdnnf:
    torch.manual_seed(0)
    network = Tdnnf(8, STATES.num_columns, dim=16, bottleneck_dim=4, num_layers=2, prefinal_dim=8, small_dim=8).eval()
    torch.nn.init.normal_(network.branch.out.weight, std=0.5)
    return network


def speech(seed: int = 0, num_frames: int = 600) -> RecognizedSpeech:
    """Noise that is said to be `a` and `b` in turn, ten output frames each, from frame 20 on."""
    features = torch.randn(num_frames, 8, generator=torch.Generator().manual_seed(seed))
    runs: list[tuple[int, int, int]] = []
    before = 0
    for begin in range(20, num_frames // 3 - 10, 10):
        phone = 1 + begin // 10 % 2
        runs += [(int(STATES.entry[before, phone]), begin, begin + 1), (4 + phone, begin + 1, begin + 10)]
        before = phone
    return RecognizedSpeech(features, tuple(runs))


def loss(network: NormalizingNetwork, spoken: RecognizedSpeech, transform: SpeakerTransform) -> float:
    pieces = numerator_pieces(STATES, spoken.runs)
    with torch.no_grad():
        score, _ = score_of_speaker(network, spoken.features[None], torch.tensor([len(spoken.features)]), transform)
    each, *_ = LfMmi(DENOMINATOR)(torch.stack(score[0].split(60)[: len(pieces)]), pieces)
    return float(each.mean())


def test_pieces_have_the_phones_of_the_path_and_silence_between_them() -> None:
    pieces = numerator_pieces(STATES, [(1, 3, 4), (5, 4, 50), (4, 50, 51), (6, 51, 58), (3, 80, 81), (6, 81, 125)])
    assert len(pieces) == 2
    assert pieces[0].entry.tolist() == [0, 1, 4, 0]
    assert pieces[0].loop.tolist() == [0, 5, 6, 0]
    # A phone may begin 1.5 frames early and end 1.5 late; silence goes from 58 to 80.
    assert pieces[0].earliest.tolist() == [-1, 2, 49, 57] and pieces[0].latest.tolist() == [4, 51, 59, 81]
    assert pieces[1].entry.tolist() == [0, 3] and pieces[1].earliest.tolist() == [-3, 19]
    assert numerator_pieces(STATES, [(1, 3, 4), (5, 4, 59)]) == []


@pytest.mark.slow
def test_the_objective_rises_and_the_network_stays_as_it_is(network: Tdnnf) -> None:
    spoken = [speech(0), speech(1)]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = adapt(network, STATES, DENOMINATOR, spoken)
    identity = SpeakerTransform.identity(8)
    gain = [loss(network, each, identity) - loss(network, each, found) for each in spoken]
    assert sum(gain) > 0.01 and not found.scale.requires_grad
    # Six epochs of one step each, of about two hundredths.
    assert 0.0 < float((found.scale - 1.0).abs().max()) < 0.15 and float(found.shift.abs().max()) < 0.15
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    again = adapt(network, STATES, DENOMINATOR, spoken)
    assert torch.equal(found.scale, again.scale) and torch.equal(found.shift, again.shift)


@pytest.mark.slow
def test_more_speech_makes_more_steps(network: Tdnnf) -> None:
    found = adapt(network, STATES, DENOMINATOR, [speech(seed, 3000) for seed in range(3)])
    assert float((found.scale - 1.0).abs().max()) > 0.15


def test_nothing_to_learn_is_the_identity(network: Tdnnf) -> None:
    short = RecognizedSpeech(torch.randn(90, 8), ((1, 2, 3), (5, 3, 20)))
    for spoken in ([], [short], [RecognizedSpeech(torch.randn(600, 8), ())]):
        found = adapt(network, STATES, DENOMINATOR, spoken)
        assert torch.equal(found.scale, torch.ones(8)) and torch.equal(found.shift, torch.zeros(8))


def test_padding_stays_zero_and_changes_nothing(network: Tdnnf) -> None:
    transform = SpeakerTransform(torch.linspace(0.8, 1.2, 8), torch.linspace(-0.3, 0.3, 8))
    features, num_frames = torch.randn(2, 90, 8), torch.tensor([90, 50])
    with torch.no_grad():
        both, length = score_of_speaker(network, features, num_frames, transform)
        alone, _ = score_of_speaker(network, features[1:, :50], num_frames[1:], transform)
        plain, _ = network(features, num_frames)
        same, _ = score_of_speaker(network, features, num_frames, SpeakerTransform.identity(8))
    torch.testing.assert_close(both[1, : length[1]], alone[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(same, plain) and not torch.allclose(both, plain, atol=1e-4)


def test_a_denominator_graph_as_a_file(tmp_path: Path) -> None:
    DENOMINATOR.save(tmp_path / "graph.safetensors")
    np.savez(tmp_path / "graph.npz", **DENOMINATOR._asdict())
    for name in ("graph.safetensors", "graph.npz"):
        for wanted, found in zip(DENOMINATOR, DenominatorGraph.load(tmp_path / name), strict=True):
            assert wanted.dtype == found.dtype and np.array_equal(wanted, found)


def _changed(field: str) -> torch.Tensor:
    row = torch.from_numpy(getattr(DENOMINATOR, field)).clone()
    if field in ("stay", "probability", "initial"):
        row[0] = torch.nan
    elif field == "begin":
        row[1] = row[-1] + 5
    else:
        row[0] = -1 if field != "source" else DENOMINATOR.num_states
    return row


@pytest.mark.parametrize("field", DenominatorGraph._fields)
@pytest.mark.parametrize("damage", ["value", "length", "type", "absence"])
def test_arrays_that_are_no_graph_are_refused(tmp_path: Path, field: str, damage: str) -> None:
    DENOMINATOR.save(tmp_path / "graph.safetensors")
    arrays = load((tmp_path / "graph.safetensors").read_bytes())
    if damage == "value":
        arrays[field] = _changed(field)
    elif damage == "length":
        arrays[field] = arrays[field][:-1].clone()
    elif damage == "type":
        arrays[field] = arrays[field].to(torch.float64)
    else:
        del arrays[field]
    (tmp_path / "graph.safetensors").write_bytes(save(arrays))
    with pytest.raises(AsrError, match=r"graph.safetensors: the file is not a valid denominator graph"):
        DenominatorGraph.load(tmp_path / "graph.safetensors")


@pytest.mark.parametrize("name", ["graph.safetensors", "graph.npz"])
def test_files_that_are_none_are_refused(tmp_path: Path, name: str) -> None:
    for content in (None, b"", b"PK\x03\x04", b"\x08\0\0\0\0\0\0\0{}      "):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(AsrError, match="the file is not a valid denominator graph"):
            DenominatorGraph.load(tmp_path / name)


@pytest.mark.slow
def test_a_recognizer_learns_a_voice_and_uses_it(librispeech: Bundle) -> None:
    recognizer = Recognizer(librispeech, "ngram")
    clips = [read_audio(path, recognizer.sampling_rate) for path in CLIPS[:2]]
    plain = [(result.text, result.total) for result in recognizer(clips)]
    speaker = recognizer.speaker_transform(clips)
    assert not torch.equal(speaker.scale, torch.ones_like(speaker.scale))
    adapted = [(result.text, result.total) for result in recognizer(clips, speaker=speaker)]
    identity = SpeakerTransform.identity(len(speaker.scale))
    assert plain == [(result.text, result.total) for result in recognizer(clips, speaker=identity)]
    assert [total for _, total in plain] != [total for _, total in adapted]
    # It is trained on features that are normalized with the speaker's statistics.
    statistics = recognizer.speaker_statistics(clips)
    assert speaker.statistics is not None and speaker.statistics.num_frames == statistics.num_frames
    torch.testing.assert_close(speaker.statistics.mean, statistics.mean)
    # Nothing is learned from nothing.
    assert recognizer.speaker_statistics([]).num_frames == 0
    assert torch.equal(recognizer.speaker_transform([]).scale, torch.ones_like(speaker.scale))
    # Others' recordings are recognized as before.
    assert plain == [(result.text, result.total) for result in recognizer(clips)]


@pytest.mark.slow
def test_a_recognizer_normalizes_with_a_speakers_statistics(librispeech: Bundle) -> None:
    recognizer = Recognizer(librispeech, "ngram", resources=ResourceOptions(batch_seconds=4.0))
    clips = [read_audio(path, recognizer.sampling_rate) for path in CLIPS]
    plain = [result.total for result in recognizer(clips)]
    speaker = recognizer.speaker_statistics(clips)
    own = [recognizer.speaker_statistics(clip) for clip in clips]
    assert speaker.num_frames == sum(part.num_frames for part in own)
    found = [result.total for result in recognizer(clips, speaker=speaker)]
    assert all(abs(before - after) > 0.1 for before, after in zip(plain, found, strict=True))
    # Its own statistics change nothing in an utterance.
    for clip, statistics, total in zip(clips, own, plain, strict=True):
        assert recognizer(clip, speaker=statistics)[0].total == pytest.approx(total, abs=0.2)  # rounded to bytes
    # The network reads what its norm returns for the speaker.
    features = recognizer._features(clips[:1], StageTimes())
    network = librispeech.acoustic_model.network
    normal = network.input_norm(*features, speaker)
    with torch.no_grad(), recognizer.acoustic_arithmetic():
        expected = network.forward_normalized(normal, features[1])[0][-1]
    log_prob, _ = recognizer.log_prob(clips[:1], StageTimes(), speaker)
    torch.testing.assert_close(log_prob, expected, atol=0.2, rtol=0.05)


@pytest.mark.slow
def test_a_bundle_keeps_its_denominator_graph(librispeech: Bundle, tmp_path: Path) -> None:
    from dataclasses import replace

    assert librispeech.denominator is not None and TIED_STATES in librispeech.graph.meta
    small = replace(librispeech, large_ngram=None, rnn_lm=None, decoding={})
    small.save(tmp_path / "copy")
    copy = Bundle.load(tmp_path / "copy")
    assert copy.denominator is not None
    assert all(map(np.array_equal, librispeech.denominator, copy.denominator))
    with pytest.raises(AsrError, match="it cannot adapt to speakers because it has no denominator graph"):
        Recognizer(replace(small, denominator=None), "ngram").speaker_transform(torch.zeros(16000))
    wide = librispeech.denominator._replace(entry=librispeech.denominator.entry + 1000)
    with pytest.raises(AsrError, match="use the denominator graph of its training"):
        replace(small, denominator=wide).check()
