"""The rooms of the benchmark of accuracy: reflections by hand, and how long sound stays."""

from __future__ import annotations

import math

import pytest
import torch

from scripts.benchmarks.rooms import room_response


def test_reflections_are_where_mirrors_put_them() -> None:
    size, source, microphone, seconds, rate = (8.0, 6.1, 4.3), (2.0, 2.7, 1.1), (4.2, 2.1, 1.6), 0.03, 16000
    response = room_response(size, source, microphone, seconds, rate)
    reflected = math.sqrt(max(0.0, 1 - 0.161 * 8 * 6.1 * 4.3 / (2 * (48.8 + 34.4 + 26.23) * seconds)))
    assert reflected == 0.0 and torch.count_nonzero(response) == 1 and response[0] == 1.0
    response = room_response(size, source, microphone, 0.5, rate)[: round(seconds * rate)].double()
    reflected = math.sqrt(1 - 0.161 * 8 * 6.1 * 4.3 / (2 * (48.8 + 34.4 + 26.23) * 0.5))
    # Each image is mirrored at each wall; it needs as many reflections as mirrors.
    images, newest = {source: 0}, [source]
    for order in range(1, 7):
        mirrored = []
        for image in newest:
            for number in range(6):
                axis, is_far = divmod(number, 2)
                values = list(image)
                values[axis] = round(2 * is_far * size[axis] - values[axis], 9)
                mirrored.append((values[0], values[1], values[2]))
        newest = [image for image in dict.fromkeys(mirrored) if image not in images]
        images |= dict.fromkeys(newest, order)
    expected, direct = torch.zeros_like(response), math.dist(source, microphone)
    for image, order in images.items():
        distance = math.dist(image, microphone)
        delay = round((distance - direct) / 343.0 * rate)
        if delay < len(expected):
            expected[delay] += direct / distance * reflected**order
    assert torch.count_nonzero(expected) > 30 and torch.allclose(response, expected, atol=1e-6)


def test_sound_falls_by_60_db_in_about_the_time_that_was_asked_for() -> None:
    for seconds in (0.2, 0.4):
        response = room_response((5.0, 4.0, 3.0), (1.5, 2.1, 1.2), (3.2, 1.4, 1.7), seconds, 16000).double()
        left = (response.square().flip(0).cumsum(0).flip(0) / response.square().sum()).log10() * 10
        begin, end = int((left > -5).sum()), int((left > -25).sum())
        assert (end - begin) / 16000 * 3 == pytest.approx(seconds, rel=0.4)
