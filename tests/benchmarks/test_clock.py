"""The clock of the benchmarks waits for each GPU once a reading."""

from __future__ import annotations

from unittest import mock

import torch

from scripts.benchmarks.clock import waiting_clock

CPU, GPU, OTHER_GPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def test_each_reading_waits_for_each_gpu_once() -> None:
    with mock.patch("torch.cuda.synchronize") as wait:
        on_host, clock = waiting_clock(CPU), waiting_clock(CPU, GPU, OTHER_GPU, GPU)
        assert on_host() <= on_host() and not wait.called
        assert clock() <= clock()
    assert [call.args for call in wait.call_args_list] == 2 * [(GPU,), (OTHER_GPU,)]
