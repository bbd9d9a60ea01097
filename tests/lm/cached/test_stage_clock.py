"""Stages are timed by work done, where that is asked for, and by work begun elsewhere."""

from __future__ import annotations

from unittest import mock

import torch

from asr.lm.cached.statistics import StageClock

CPU, GPU, OTHER_GPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def test_it_waits_for_each_device_once_where_asked_to() -> None:
    with mock.patch("torch.cuda.synchronize") as wait:
        patient, hasty = (StageClock([CPU, GPU, OTHER_GPU, GPU], synchronize=each) for each in (True, False))
        assert hasty.now() <= hasty.now() and not wait.called
        assert patient.now() <= patient.now()
    assert [call.args for call in wait.call_args_list] == 2 * [(GPU,), (OTHER_GPU,)]
