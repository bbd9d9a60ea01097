from __future__ import annotations

import time

import pytest

from asr.results import StageTimes


def test_stages_add_up():
    times = StageTimes(audio_seconds=2.0)
    with times.measure("features"):
        time.sleep(0.02)
    with times.measure("search"):
        pass
    with times.measure("features"):
        time.sleep(0.02)
    assert list(times.stages) == ["features", "search"]
    assert 0.04 <= times.stages["features"] < 1.0
    assert times.real_time_factor == pytest.approx(times.total / 2.0)
    total = StageTimes()
    total.add(times)
    total.add(times.scaled(0.5))
    assert total.audio_seconds == 2.0
    assert total.total == pytest.approx(1.5 * times.total)
    assert "real-time factor" in total.format()
    assert StageTimes().format() == "nothing was recognized"


def test_a_failing_stage_is_still_timed():
    times = StageTimes()
    with pytest.raises(ValueError, match="no"), times.measure("search"):
        raise ValueError("no")
    assert "search" in times.stages
    assert times.real_time_factor == 0.0
