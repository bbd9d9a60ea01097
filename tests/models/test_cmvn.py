"""Normalization of features by mean and variance, against explicit loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asr.models.interface import UtteranceCmvn

LENGTHS = torch.tensor([7, 3, 1, 0])


def test_utterance_cmvn_equals_a_loop() -> None:
    # (4, 7, 5), rubbish behind each end
    features = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0)) * 3 + 2
    normal = UtteranceCmvn()(features, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        frames = features[row, :length]
        if length > 1:
            expected = (frames - frames.mean(dim=0)) / frames.std(dim=0, unbiased=False)
            torch.testing.assert_close(normal[row, :length], expected, atol=1e-5, rtol=1e-5)
        assert not normal[row, length:].any()
    assert torch.isfinite(normal).all()


def speech_and_pauses(seed: int, pauses: list[int], speech_frames: int = 70) -> tuple[Tensor, Tensor]:
    """Loud pieces with soft ones before, between and behind them, (T, 5), and which frames are loud."""
    generator = torch.Generator().manual_seed(seed)
    pieces, loud = [], []
    for number, pause in enumerate(pauses):
        if number:
            pieces.append(8.0 + 0.5 * torch.randn(speech_frames, 5, generator=generator))
            loud += [True] * speech_frames
        pieces.append(torch.randn(pause, 5, generator=generator))
        loud += [False] * pause
    return torch.cat(pieces), torch.tensor(loud)


@pytest.mark.slow
@given(st.integers(0, 99), st.lists(st.integers(0, 300), min_size=2, max_size=4))
def test_of_long_pauses_only_the_edges_count(seed: int, pauses: list[int]) -> None:
    features, loud = speech_and_pauses(seed, pauses)
    margin = 20
    near = torch.tensor([bool(loud[max(0, i - margin) : i + margin + 1].any()) for i in range(len(loud))])
    counted = features[near]
    expected = (features - counted.mean(dim=0)) / counted.std(dim=0, unbiased=False)
    padded = torch.stack([torch.cat([features, torch.full((9, 5), 99.0)]), torch.randn(len(features) + 9, 5)])
    normal = UtteranceCmvn(pause_margin=margin)(padded, torch.tensor([len(features), len(features) + 9]))
    torch.testing.assert_close(normal[0, : len(features)], expected, atol=1e-4, rtol=1e-4)
    assert not normal[0, len(features) :].any()


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("margin", [0, 4, 60])
def test_frames_near_loud_ones_are_those_of_the_definition(spread: float, margin: int) -> None:
    """Energies rise and fall slowly, but for clicks; loud is what the tenth loudest and softest frames say."""
    noise = torch.randn(400, generator=torch.Generator().manual_seed(1))
    energy = spread * torch.sin(torch.arange(400) / 30) + 0.1 * noise
    energy[50:400:50] += 30.0
    ranked = energy.sort().values
    soft, loud = ranked[9], ranked[-10]
    is_loud = energy > max(loud - 4.0, soft + 0.3 * (loud - soft))
    near = torch.stack([is_loud[max(0, i - margin) : i + margin + 1].any() for i in range(400)])
    features = torch.stack([energy - 1.0, energy + 1.0], dim=1)
    found = UtteranceCmvn(margin).statistics(features[None], torch.tensor([400]))
    assert found.num_frames == int(near.sum())
    torch.testing.assert_close(found.mean, features[near].mean(dim=0))


def test_a_short_utterance_is_normalized_alike_in_any_batch() -> None:
    """All its frames count, up to twice the margin; the pauses of a longer one count only near speech."""
    norm = UtteranceCmvn(pause_margin=20)
    features, _ = speech_and_pauses(4, [0, 35], speech_frames=12)
    for length in (5, 40, 41):
        alone = norm(features[None, :length], torch.tensor([length]))
        batch = torch.stack([features, torch.randn_like(features)])
        together = norm(batch, torch.tensor([length, len(features)]))
        torch.testing.assert_close(together[:1, :length], alone)
        statistics = norm.statistics(batch[:1], torch.tensor([length]))
        assert statistics.num_frames == (length if length <= 40 else 32)


def test_an_utterance_without_pause_counts_whole() -> None:
    features = torch.randn(2, 300, 5) * 3 + 2
    num_frames = torch.tensor([300, 180])
    normal = UtteranceCmvn(pause_margin=50)(features, num_frames)
    torch.testing.assert_close(normal, UtteranceCmvn(pause_margin=300)(features, num_frames))
    silence = torch.zeros(1, 300, 5)
    assert not UtteranceCmvn()(silence, torch.tensor([300])).any()
    # Also beside others.
    both = torch.stack([features[0], torch.full((300, 5), 3.0)])
    assert not UtteranceCmvn()(both, torch.tensor([300, 300]))[1].any()


def frames_of(num: int, seed: int) -> Tensor:
    return torch.randn(num, 5, generator=torch.Generator().manual_seed(seed)) * (seed + 1) + seed


@pytest.mark.parametrize("num_others", [1, 40, 999])
def test_frames_of_the_same_speaker_count_like_an_utterances_own(num_others: int) -> None:
    norm = UtteranceCmvn()
    own, others = frames_of(60, 1), frames_of(num_others, 2)
    speaker = norm.statistics(others[None], torch.tensor([num_others]))
    assert speaker.num_frames == num_others
    both = torch.cat((own, others)).double()
    expected = (own - both.mean(dim=0)) / both.std(dim=0, unbiased=False)
    padded = torch.cat((own, torch.full((4, 5), 99.0)))[None]
    normal = norm(padded, torch.tensor([60]), speaker)[0]
    torch.testing.assert_close(normal[:60].double(), expected, atol=1e-4, rtol=1e-4)
    assert not normal[60:].any()


def test_a_speaker_counts_like_ten_seconds_at_most() -> None:
    norm = UtteranceCmvn()
    own, hour = frames_of(60, 1), frames_of(90, 2)
    speaker = norm.statistics(hour[None], torch.tensor([90]))
    alike = norm(own[None], torch.tensor([60]), speaker._replace(num_frames=1000))
    assert torch.equal(norm(own[None], torch.tensor([60]), speaker._replace(num_frames=360_000)), alike)
    assert not torch.equal(norm(own[None], torch.tensor([60]), speaker._replace(num_frames=900)), alike)


def test_statistics_of_parts_add_up_and_leave_pauses_out() -> None:
    norm = UtteranceCmvn(pause_margin=20)
    features, loud = speech_and_pauses(3, [90, 200, 150])
    near = torch.tensor([bool(loud[max(0, i - 20) : i + 21].any()) for i in range(len(loud))])
    first = norm.statistics(features[None], torch.tensor([len(features)]))
    second = norm.statistics(torch.stack((frames_of(30, 1), frames_of(30, 2))), torch.tensor([30, 12]))
    frames = torch.cat((features[near], frames_of(30, 1), frames_of(30, 2)[:12])).double()
    both = first + second
    assert both.num_frames == len(frames)
    torch.testing.assert_close(both.mean.double(), frames.mean(dim=0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(both.variance.double(), frames.var(dim=0, unbiased=False), atol=1e-3, rtol=1e-4)


def test_a_speaker_without_frames_changes_nothing() -> None:
    norm = UtteranceCmvn()
    silent = norm.statistics(torch.zeros(2, 0, 5), torch.tensor([0, 0]))
    own, num = frames_of(60, 1)[None], torch.tensor([60])
    assert silent.num_frames == (silent + silent).num_frames == 0
    assert torch.equal(norm(own, num, silent), norm(own, num))
    heard = norm.statistics(own, num)
    assert all(map(torch.equal, (silent + heard)[:2], heard[:2])) and (silent + heard).num_frames == 60
