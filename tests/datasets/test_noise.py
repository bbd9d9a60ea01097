"""Noise is added at the ratio that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from asr.datasets.augment import NoiseMixer, add_noise
from asr.errors import AsrError
from tests.datasets.toy_corpora import write_audio


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
    assert [path.name for path in mixer.files] == ["good.wav"]


def test_a_folder_without_noise(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(AsrError, match="missing or has no audio"):
            NoiseMixer(folder)
