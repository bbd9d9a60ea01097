"""The softmax over all words on a GPU: kernels and plain operations agree."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton; its interpreter runs them without a GPU")
os.environ.setdefault("TRITON_INTERPRET", "1")

from asr.lm.rnn.outputs.softmax_loss import SoftmaxTargets, loss_and_gradients
from asr.testing.simulated_gpu import simulated_gpu

pytestmark = pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes")


@pytest.mark.slow
@pytest.mark.parametrize("num_lengths", [0, 2])
def test_loss_and_gradients_are_a_cpus(num_lengths: int) -> None:
    generator = torch.Generator().manual_seed(num_lengths)
    # More words than a program's tile, and hash values that are repeated.
    num_words, num_queries, width = 2500, 7, 3
    hidden, rows = (torch.randn(num, width, generator=generator) for num in (num_queries, num_words))
    bias, log_z = torch.randn(num_words, generator=generator), torch.tensor(1.0)
    weight = torch.randn(20 + num_words if num_lengths else 0, generator=generator)
    word_id = torch.randint(2, num_words, (num_queries,), generator=generator)
    places = torch.randint(20, (num_queries, num_lengths), generator=generator)
    tensors = hidden, rows, bias, weight, log_z
    expected, gradients = loss_and_gradients(
        *tensors, SoftmaxTargets(word_id, places, penalty=0.3, is_coarse=False), torch.float32
    )
    with simulated_gpu():
        targets = SoftmaxTargets(word_id.cuda(), places.cuda(), penalty=0.3, is_coarse=False)
        found, own = loss_and_gradients(*(part.cuda() for part in tensors), targets, torch.float32)
        found, own = found.cpu(), [part.cpu() for part in own]
    torch.testing.assert_close(found, expected)
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other)
