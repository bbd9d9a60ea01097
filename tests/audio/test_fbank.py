"""The filterbanks against kaldi-native-fbank and torchaudio, and what a batch must not change."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asr.audio.fbank import Fbank
from asr.errors import AsrError

RATE = 16000


def speech_like(num_samples: int, seed: int = 0) -> Tensor:
    """A sum of gliding tones and noise, 16-bit values."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(num_samples) / RATE
    tones = sum(torch.sin(2 * torch.pi * f * time * (1 + 0.2 * time)) for f in (130.0, 700.0, 2400.0, 5100.0))
    wave = 0.1 * tones + 0.05 * torch.randn(num_samples, generator=generator)
    return (wave * 32768).round().clamp(-32768, 32767) / 32768


CONFIGURATIONS = [
    {},
    {"snip_edges": True},
    {"num_mel_bins": 40, "use_energy": True, "window": "hamming", "high_freq": 5600.0},
    {"num_mel_bins": 23, "window": "hanning", "snip_edges": True, "use_energy": True, "high_freq": -400.0},
    {"num_mel_bins": 40, "window": "rectangular", "low_freq": 60.0},
]


@pytest.mark.parametrize("config", CONFIGURATIONS)
@pytest.mark.parametrize("num_samples", [400, 401, 559, 560, 16000])
def test_equals_kaldi_native_fbank(config: dict, num_samples: int) -> None:
    knf = pytest.importorskip("kaldi_native_fbank")
    options = knf.FbankOptions()
    options.frame_opts.dither = 0.0
    options.frame_opts.window_type = config.get("window", "povey")
    options.frame_opts.snip_edges = config.get("snip_edges", False)
    options.mel_opts.num_bins = config.get("num_mel_bins", 80)
    options.mel_opts.low_freq = config.get("low_freq", 20.0)
    options.mel_opts.high_freq = config.get("high_freq", 0.0)
    options.use_energy = config.get("use_energy", False)
    options.energy_floor = 0.0
    oracle = knf.OnlineFbank(options)
    wave = speech_like(num_samples)
    oracle.accept_waveform(RATE, (wave * 32768).tolist())
    oracle.input_finished()
    expected = torch.tensor(np.stack([oracle.get_frame(i) for i in range(oracle.num_frames_ready)]))
    features, num_frames = Fbank(**config)(wave[None], torch.tensor([num_samples]))
    assert num_frames.tolist() == [len(expected)]
    torch.testing.assert_close(features[0], expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_equals_torchaudio(config: dict) -> None:
    try:
        from torchaudio.compliance import kaldi
    except (ImportError, OSError):
        pytest.skip("no torchaudio that fits this torch")
    config = {"window": "povey", "snip_edges": False, "num_mel_bins": 80, **config}
    wave = speech_like(8000, seed=1)
    renamed = {("window_type" if name == "window" else name): value for name, value in config.items()}
    expected = kaldi.fbank(wave[None] * 32768, dither=0.0, energy_floor=0.0, **renamed)
    features, _ = Fbank(**config)(wave[None], torch.tensor([8000]))
    torch.testing.assert_close(features[0], expected, atol=2e-3, rtol=0)


@pytest.mark.slow
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_batched_equals_single_and_padding_has_no_influence(lengths: list[int], snip: bool, energy: bool) -> None:
    fbank = Fbank(num_mel_bins=23, snip_edges=snip, use_energy=energy)
    waves = torch.full((len(lengths), max(lengths) + 7), 9.9)
    for row, length in enumerate(lengths):
        waves[row, :length] = speech_like(length, seed=row)
    features, num_frames = fbank(waves, torch.tensor(lengths))
    assert features.shape == (len(lengths), int(num_frames.max()), fbank.feature_dim)
    for row, length in enumerate(lengths):
        alone, alone_frames = fbank(waves[row : row + 1, :length], torch.tensor([length]))
        assert alone_frames[0] == num_frames[row]
        torch.testing.assert_close(features[row, : num_frames[row]], alone[0], atol=1e-4, rtol=0)
        assert not features[row, num_frames[row] :].any()


@pytest.mark.parametrize(("snip", "expected"), [(True, [0, 0, 1, 1, 2, 98]), (False, [0, 1, 3, 3, 4, 100])])
def test_number_of_frames(snip: bool, expected: list[int]) -> None:
    lengths = torch.tensor([0, 80, 400, 559, 560, 16000])
    assert Fbank(snip_edges=snip).num_frames(lengths).tolist() == expected


def test_silence_is_finite_and_the_band_edge_hides_what_is_above() -> None:
    silence, _ = Fbank(use_energy=True)(torch.zeros(1, 1600), torch.tensor([1600]))
    assert torch.isfinite(silence).all()
    tone = 0.5 * torch.sin(2 * torch.pi * 7000 * torch.arange(8000) / RATE)
    whole, _ = Fbank(num_mel_bins=40)(tone[None], torch.tensor([8000]))
    capped, _ = Fbank(num_mel_bins=40, high_freq=5600.0)(tone[None], torch.tensor([8000]))
    assert whole[0, 20:30].max() - capped[0, 20:30].max() > 8.0


def test_dither_changes_features_a_little() -> None:
    wave = speech_like(4000)[None]
    plain, _ = Fbank(dither=0.0)(wave, torch.tensor([4000]))
    dithered, _ = Fbank(dither=1.0)(wave, torch.tensor([4000]))
    assert 0 < (plain - dithered).abs().mean() < 0.1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"high_freq": 9000.0}, "is not within 0 to 8000"),
        ({"low_freq": 6000.0, "high_freq": 5600.0}, "change low_freq or high_freq"),
        ({"window": "kaiser"}, "'kaiser' is unknown"),
        ({"num_mel_bins": 300}, "too many"),
        ({"num_mel_bins": 1 << 16}, "is too large: the filters would fill the memory"),
        ({"sampling_rate": 10**10}, "sampling_rate is 10000000000; give a whole number of Hz from 1000 to 1000000"),
        ({"sampling_rate": 16000.5}, r"^Fbank: sampling_rate is 16000\.5; give a whole number of Hz"),
        ({"sampling_rate": "16000"}, r"^Fbank: sampling_rate is '16000'; give a whole number of Hz"),
        ({"frame_length_ms": 1e300}, "is too large: the filters would fill the memory"),
        ({"frame_shift_ms": 0.0}, "have no samples"),
        ({"frame_shift_ms": math.nan}, r"frame_length_ms is 25\.0, frame_shift_ms nan and dither 0\.0; give finite"),
        ({"frame_length_ms": math.inf}, "frame_length_ms is inf"),
        ({"dither": math.nan}, "dither nan"),
        ({"dither": -1.0}, r"dither -1\.0; give finite numbers, dither 0 or more"),
    ],
)
def test_impossible_settings(config: dict, message: str) -> None:
    with pytest.raises(AsrError, match=message):
        Fbank(**config)


@pytest.mark.parametrize("num_mel_bins", [0, -3])
def test_no_filters_are_refused(num_mel_bins):
    with pytest.raises(AsrError, match=f"num_mel_bins is {num_mel_bins}; give 1 or more"):
        Fbank(num_mel_bins)
