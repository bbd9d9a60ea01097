from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from asr.audio.samples import as_recording, as_recordings, as_samples
from asr.errors import AsrError


def test_full_scale_of_integers_is_one():
    for dtype in (torch.int16, torch.int32):
        limits = torch.iinfo(dtype)
        samples = torch.tensor([limits.min, limits.min // 2, 0, limits.max], dtype=dtype)
        assert as_samples(samples, "it").tolist() == pytest.approx([-1.0, -0.5, 0.0, 1.0], abs=2**-15)


def test_a_lists_entries_may_be_stereo():
    (row,) = as_recordings([torch.tensor([[1.0, 0.0], [0.0, 0.5]])])
    assert row.tolist() == [0.5, 0.25]


def test_opposite_channels_are_not_heard_as_the_noise_of_both() -> None:
    generator = torch.Generator().manual_seed(0)
    speech = torch.randn(16000, generator=generator) * 0.05
    noise = torch.randn(2, 16000, generator=generator) * 0.01
    opposite = torch.stack([speech, -0.9 * speech]) + noise
    assert torch.equal(as_recording(opposite, "it"), opposite[0])
    for num_channels in (2, 16):
        independent = torch.randn(num_channels, 16000, generator=generator)
        assert torch.allclose(as_recording(independent, "it"), independent.mean(0), atol=1e-6)


def test_zeros_at_the_end_of_a_row_of_a_batch_are_padding():
    batch = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    assert [row.tolist() for row in as_recordings(batch)] == [[1.0, 0.0, 0.5], [0.0] * 4, [0.5] * 4]
    stereo = torch.stack([batch, batch.flip(0)], dim=1)  # (3, 2, 4)
    assert [len(row) for row in as_recordings(stereo)] == [4, 4, 4]
    assert [len(row) for row in as_recordings(stereo[:2, :, 2:])] == [2, 2]
    # Neither lengths that are given nor recordings of their own are cut.
    assert [len(row) for row in as_recordings(batch, [4, 4, 4])] == [4, 4, 4]
    assert len(as_recordings(batch[0])[0]) == 4 and len(as_recordings([batch[0], batch[1]])[0]) == 4
    assert len(as_recordings(batch[:1])[0]) == 4


@pytest.mark.slow
def test_checks_of_samples_need_no_memory() -> None:
    program = """
import resource
import torch
from asr.audio.samples import as_recordings
as_recordings(torch.zeros(1000))
recording = torch.full((20_000_000,), 0.5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
as_recordings([recording])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 8.0  # the recording has 76 MB


@pytest.mark.parametrize("dtype", ["uint8", "bool", "longdouble", "complex64", "int64"])
def test_arrays_of_other_types_are_named(dtype: str) -> None:
    with pytest.raises(AsrError, match=rf"recording 0 holds (torch\.)?{np.dtype(dtype)}; give floating-point samples"):
        as_recordings(np.zeros(10, dtype))


def test_samples_before_channels_are_refused():
    """As soundfile reads them."""
    stereo = torch.rand(50, 2)
    for audio in (stereo[None], [stereo], stereo[None].numpy(), [stereo.numpy()]):
        with pytest.raises(AsrError, match=r"recording 0 has 50 channels of 2 samples; give \(channels, samples\)"):
            as_recordings(audio)
    with pytest.raises(AsrError, match=r"it has 50 channels of 2 samples"):
        as_recording(stereo, "it")
    with pytest.raises(AsrError, match=r"50 recordings of 2 samples; .* or \[waveform.T\] for one recording"):
        as_recordings(stereo)
    (found,) = as_recordings([stereo.T])
    assert torch.equal(found, stereo.T.mean(dim=0))
    # The lengths say that these are recordings, which may be short.
    assert [len(row) for row in as_recordings(torch.rand(3, 2), [2, 2, 1])] == [2, 2, 1]
    assert [len(row) for row in as_recordings(torch.rand(1, 2, 4), [1])] == [1]


def test_arrays_may_be_read_only(recwarn):
    samples = np.linspace(-0.5, 0.5, 100, dtype=np.float32)
    samples.setflags(write=False)
    (found,) = as_recordings([samples])
    assert np.array_equal(found.numpy(), samples) and not recwarn.list
