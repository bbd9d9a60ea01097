"""Augmentation: noise at the ratio that was asked for, acoustic conditions, and warped vocal tracts against a loop."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.fbank import Fbank
from asr.audio.io import read_audio
from asr.datasets.augment import (
    CONDITIONS,
    NoiseMixer,
    SpecAugment,
    VocalTractPerturbation,
    add_noise,
    colored_noise,
    far_away,
    in_room,
    reverberated,
    through_telephone,
    with_babble,
    with_noise,
)
from asr.errors import AsrError
from tests.datasets.toy_corpora import write_audio


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_time_masks", -1), ("max_time_mask_frames", -1), ("max_time_mask_fraction", 1.5),
        ("num_frequency_masks", -1), ("max_frequency_mask_bins", -1),
    ],
)  # fmt: skip
def test_masks_and_warps_that_cannot_be_are_refused(option: str, value: float) -> None:
    with pytest.raises(AsrError, match=f"^{option} is {value}; give "):
        SpecAugment(**{option: value})  # type: ignore[arg-type]
    with pytest.raises(AsrError, match=r"max_warp is 1\.0; give 0 or more, and less than 1"):
        VocalTractPerturbation(1.0, Fbank())


@pytest.mark.parametrize("snr_db", [-5.0, 0.0, 12.5])
def test_the_ratio_is_exact(snr_db: float) -> None:
    torch.manual_seed(0)
    speech, noise = torch.randn(4000), 0.01 * torch.randn(4000)
    added = add_noise(speech, noise, snr_db) - speech
    assert 10 * torch.log10(speech.square().mean() / added.square().mean()).item() == pytest.approx(snr_db, abs=1e-3)


def test_silence_stays_finite() -> None:
    assert torch.equal(add_noise(torch.zeros(10), torch.randn(10), 10.0), torch.zeros(10))
    assert torch.equal(add_noise(torch.ones(10), torch.zeros(10), 10.0), torch.ones(10))


def test_files_shorter_and_longer_than_speech_at_any_rate(tmp_path: Path) -> None:
    write_audio(tmp_path / "a" / "short.wav", 0.1, 44100)
    write_audio(tmp_path / "long.flac", 2.0, channels=2)
    mixer = NoiseMixer(tmp_path, probability=1.0, min_snr_db=5.0, max_snr_db=15.0)
    assert len(mixer.files) == 2
    speech = torch.randn(8000)
    ratios = []
    for _ in range(20):
        added = mixer(speech) - speech
        ratios.append(10 * torch.log10(speech.square().mean() / added.square().mean()).item())
    assert all(4.99 < ratio < 15.01 for ratio in ratios) and max(ratios) - min(ratios) > 3
    assert torch.equal(NoiseMixer(tmp_path, probability=0.0)(speech), speech)


def test_a_bad_noise_file_is_left_out_and_the_last_one_raises(tmp_path: Path) -> None:
    soundfile.write(str(tmp_path / "nan.wav"), np.full(100, np.nan), 16000, subtype="FLOAT")
    with pytest.raises(AsrError, match=r"nan\.wav"):
        NoiseMixer(tmp_path, probability=1.0)(torch.randn(100))
    write_audio(tmp_path / "good.wav")
    mixer = NoiseMixer(tmp_path, probability=1.0)
    speech = torch.randn(8000)
    assert all(not torch.equal(mixer(speech), speech) for _ in range(10))


def test_a_bad_noise_file_does_not_change_what_the_others_are_drawn_for(tmp_path: Path) -> None:
    """A run that is resumed has not met it yet."""
    for name, seconds in (("a.wav", 0.1), ("b.wav", 0.11), ("d.wav", 0.12)):
        write_audio(tmp_path / name, seconds)
    (tmp_path / "c.wav").write_bytes(b"")
    speech, mixer = torch.randn(800), NoiseMixer(tmp_path, probability=1.0)
    draws = [[0.0, place, 0.0, 0.5] for place in (0.1, 0.3, 0.6, 0.8)]
    first, second = ([mixer(speech, draw) for draw in draws] for _ in range(2))
    assert torch.equal(torch.stack(first), torch.stack(second))
    assert torch.equal(first[2], first[3]) and not torch.equal(first[1], first[2])


def test_noise_is_kept_as_far_as_memory_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def noted(path: Path, rate: int) -> torch.Tensor:
        read.append(path)
        return read_audio(path, rate)

    monkeypatch.setattr("asr.datasets.augment.read_audio", noted)
    for name in ("a.wav", "b.wav"):
        write_audio(tmp_path / name, 0.1)
    mixer = NoiseMixer(tmp_path, probability=1.0, memory_gb=2 * 1600 / 2**30)
    for place in (0.0, 0.5, 0.0, 0.5):
        mixer(torch.randn(800), [0.0, place, 0.0, 0.5])
    assert [path.name for path in read] == ["a.wav", "b.wav", "b.wav"]


def test_a_folder_without_noise(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path, "has no audio in it"),
        (tmp_path / "absent", "absent: this folder cannot be read"),
    ):
        with pytest.raises(AsrError, match=message):
            NoiseMixer(folder)


def test_numbers_of_noise_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    write_audio(tmp_path / "hum.wav", 0.1)
    with pytest.raises(AsrError, match="probability is 50; give a number between 0 and 1"):
        NoiseMixer(tmp_path, probability=50)
    for highest in (5.0, math.nan):
        with pytest.raises(AsrError, match=f"min_snr_db is 10.0 and max_snr_db {highest}; give the lower one first"):
            NoiseMixer(tmp_path, max_snr_db=highest)


SECOND = 16000


def chirp() -> torch.Tensor:
    """(L,) two seconds from 100 Hz to 7 kHz."""
    time = torch.arange(2 * SECOND) / SECOND
    return 0.3 * torch.sin(2 * math.pi * (100 * time + 0.25 * 6900 * time.square()))


def power(waveform: torch.Tensor, low: float, high: float) -> float:
    spectrum = torch.fft.rfft(waveform).abs().square()
    hertz = torch.linspace(0, SECOND / 2, len(spectrum))
    return float(spectrum[(hertz >= low) & (hertz < high)].sum()) / len(waveform)


def test_a_telephone_carries_half_of_the_band() -> None:
    waveform = chirp()
    heard = through_telephone(waveform, torch.Generator(), [])
    assert heard.shape == waveform.shape
    assert power(heard, 4100, 8000) < 0.01 * power(waveform, 4100, 8000)
    assert power(heard, 300, 3000) == pytest.approx(power(waveform, 300, 3000), rel=0.02)
    # Eight bits of mu-law are heard: a signal-to-noise ratio of about 38 dB.
    first = slice(SECOND // 10, SECOND // 2)
    error = float((heard - waveform)[first].square().mean() / waveform[first].square().mean())
    assert 1e-5 < error < 1e-3


@pytest.mark.slow
def test_noise_has_the_stated_ratio_and_a_wandering_level() -> None:
    waveform, generator = chirp(), torch.Generator().manual_seed(3)
    ratios = []
    for _ in range(40):
        noise = with_noise(waveform, generator, []) - waveform
        ratios.append(10 * math.log10(float(waveform.square().mean() / noise.square().mean())))
    assert 4.99 <= min(ratios) < 8 and 17 < max(ratios) <= 20.01
    levels = [float(part.square().mean()) for part in colored_noise(10 * SECOND, 0.0, generator).split(SECOND // 4)]
    assert max(levels) > 1.5 * min(levels)


@pytest.mark.parametrize(("slope", "ratio"), [(0.0, 1.0), (-1.0, 0.25)])
def test_the_colour_of_noise(slope: float, ratio: float) -> None:
    noise = colored_noise(20 * SECOND, slope, torch.Generator().manual_seed(1))
    # Bands of one width: an octave higher, power falls by 2 ** (2 * slope).
    assert power(noise, 4000, 4400) / power(noise, 2000, 2200) / 2 == pytest.approx(ratio, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "most"), [("noise", 0.0, 0.2), ("white", 0.4, 0.75)])
def test_white_noise_is_nearly_white(name: str, least: float, most: float) -> None:
    waveform = chirp()
    ratios = []
    for seed in range(20):
        noise = CONDITIONS[name].apply(waveform, torch.Generator().manual_seed(seed)) - waveform
        ratios.append(power(noise, 5000, 5500) / power(noise, 1000, 1500))
    assert least < min(ratios) < most


def test_babble_is_made_of_other_voices_at_the_stated_ratios() -> None:
    speech, tones = chirp(), [torch.sin(2 * math.pi * hertz * torch.arange(SECOND) / SECOND) for hertz in (1050, 3050)]
    ratios, shares, generator = [], [], torch.Generator().manual_seed(3)
    for _ in range(40):
        babble = with_babble(speech, generator, [tones[0], 0.01 * tones[1]]) - speech
        ratios.append(10 * math.log10(float(speech.square().mean() / babble.square().mean())))
        low, high = power(babble, 1000, 1100), power(babble, 3000, 3100)
        assert low + high == pytest.approx(power(babble, 0, 8001), rel=0.05)  # nothing else is in it
        shares.append(high / (low + high))
    assert 0.3 < sum(shares) / len(shares) < 0.7  # a soft voice counts as much as a loud one
    assert 4.99 <= min(ratios) < 8 and 17 < max(ratios) <= 20.01
    assert torch.equal(with_babble(torch.zeros(100), generator, tones), torch.zeros(100))
    assert with_babble(speech, generator, [torch.zeros(50)]).isfinite().all()


def test_a_room_keeps_the_direct_sound_and_decays_exponentially() -> None:
    impulse = torch.zeros(SECOND)
    impulse[100] = 1.0
    direct_db, decays = [], []
    for seed in range(60):
        heard = in_room(impulse, torch.Generator().manual_seed(seed), [])
        assert len(heard) == SECOND and heard[:100].abs().max() < 1e-5 and heard[100] == pytest.approx(1.0, abs=1e-4)
        assert heard[101:116].abs().max() < 1e-4  # the first echo comes later than a millisecond
        echo = heard[101:].double().square()
        direct_db.append(-10 * math.log10(float(echo.sum())))
        left = 10 * (echo.flip(0).cumsum(0).flip(0) / echo.sum()).clamp(min=1e-12).log10()
        decays.append(int((left > -20).sum()) / SECOND * 3)  # 60 dB take three times as long as 20
    assert -4.01 <= min(direct_db) < -2 and 8 < max(direct_db) <= 10.01
    assert 0.1 < min(decays) < 0.25 and 0.7 < max(decays) < 1.0
    assert torch.equal(in_room(torch.zeros(100), torch.Generator().manual_seed(1), []), torch.zeros(100))


def test_a_convolution_is_the_sum_of_its_echoes() -> None:
    waveform, response = torch.randn(50, generator=torch.Generator().manual_seed(1)), torch.zeros(20)
    response[[0, 7]] = torch.tensor([1.0, -0.5])
    expected = waveform.clone()
    expected[7:] -= 0.5 * waveform[:-7]
    assert torch.allclose(reverberated(waveform, response), expected, atol=1e-5)


def test_far_speech_has_noise_in_its_pauses() -> None:
    speech = torch.cat([torch.zeros(SECOND), chirp()])
    for seed in range(10):
        heard = far_away(speech, torch.Generator().manual_seed(seed), [])
        ratio = 10 * math.log10(float(speech.square().mean() / heard[:SECOND].square().mean()))
        assert 5 < ratio < 30


def test_conditions_keep_length_and_repeat_with_the_generator() -> None:
    waveform = chirp()
    for name, condition in CONDITIONS.items():
        first, again = (condition.apply(waveform, torch.Generator().manual_seed(5), [chirp()]) for _ in range(2))
        assert torch.equal(first, again), name
        assert len(first) == pytest.approx(len(waveform) / condition.speed, abs=2), name
    assert next(iter(CONDITIONS)) == "1" and torch.equal(CONDITIONS["1"].apply(waveform, torch.Generator()), waveform)


LOW, HIGH, BINS = 20.0, 7600.0, 40
FBANK = Fbank(BINS, low_freq=LOW, high_freq=HIGH)


def mel(frequency: float) -> float:
    return 1127.0 * math.log(1.0 + frequency / 700.0)


def warped(bands: list[float], factor: float) -> list[float]:
    """One frame, filter by filter: Jaitly and Hinton's piecewise linear map, read off between neighbouring filters."""
    step = (mel(HIGH) - mel(LOW)) / (BINS + 1)
    bend = 0.8 * HIGH * min(factor, 1.0)
    result = []
    for i in range(BINS):
        frequency = 700.0 * math.expm1((mel(LOW) + (i + 1) * step) / 1127.0)
        if frequency <= bend:
            source = frequency / factor
        else:
            source = HIGH - (HIGH - bend / factor) / (HIGH - bend) * (HIGH - frequency)
        position = min(max((mel(source) - mel(LOW)) / step - 1.0, 0.0), BINS - 1.0)
        below = min(int(position), BINS - 2)
        result.append(bands[below] + (position - below) * (bands[below + 1] - bands[below]))
    return result


@pytest.mark.parametrize("energy", [0, 1])
def test_equals_the_loop_and_leaves_the_energy(energy: int) -> None:
    torch.manual_seed(0)
    features = torch.randn(3, 5, BINS + energy)
    factor = torch.tensor([0.9, 1.0, 1.1])
    result = VocalTractPerturbation(0.1, FBANK).warp(features, factor)
    assert torch.equal(result[..., :energy], features[..., :energy])
    for row in range(3):
        for frame in range(5):
            expected = warped(features[row, frame, energy:].tolist(), float(factor[row]))
            torch.testing.assert_close(result[row, frame, energy:], torch.tensor(expected), atol=2e-4, rtol=1e-4)


def test_a_shorter_tract_moves_a_peak_up() -> None:
    features = torch.zeros(2, 1, BINS)
    features[:, :, 20] = 1.0
    up, down = VocalTractPerturbation(0.1, FBANK).warp(features, torch.tensor([1.1, 0.9]))[:, 0].argmax(1)
    assert down < 20 < up


def test_draws_within_bounds_and_only_in_training() -> None:
    torch.manual_seed(0)
    perturbation = VocalTractPerturbation(0.1, FBANK)
    features = perturbation.frequency.expand(200, 1, BINS)
    ratio = features[:, 0, 15] / perturbation(features)[:, 0, 15]
    assert 0.89 < float(ratio.min()) < 0.92
    assert 1.08 < float(ratio.max()) < 1.11
    assert torch.equal(perturbation.eval()(features), features)
    assert torch.equal(VocalTractPerturbation(0.0, FBANK)(features), features)
