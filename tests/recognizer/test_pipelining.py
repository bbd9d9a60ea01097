"""Stages that overlap give what they give in turn."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from asr.pipeline import StreamPool, pipelined

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_in_order_and_never_twice_in_one_worker(num_workers: int) -> None:
    busy: set[int] = set()
    most = [0]
    lock = threading.Lock()

    def second(worker: int, value: int) -> int:
        with lock:
            assert worker not in busy and 0 <= worker < max(1, num_workers)
            busy.add(worker)
            most[0] = max(most[0], len(busy))
        time.sleep(0.002 * (value % 3))
        with lock:
            busy.remove(worker)
        assert num_workers == 0 or not torch.is_grad_enabled()
        return value + 1

    assert list(
        pipelined(range(20), lambda item: 2 * item, second, num_workers, StreamPool(num_workers + 1, CPU))
    ) == list(range(1, 41, 2))
    assert most[0] <= max(1, num_workers)


def test_few_are_under_way() -> None:
    taken = []

    def items():
        for number in range(20):
            taken.append(number)
            yield number

    results = pipelined(items(), lambda item: item, lambda _, value: value, 2, StreamPool(3, CPU))
    assert next(results) == 0
    assert len(taken) <= 4
    assert len(list(results)) == 19


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stage", ["first", "second"])
def test_an_error_comes_through(num_workers: int, stage: str) -> None:
    def fail(value: int, wanted: str) -> int:
        if value == 3 and wanted == stage:
            raise ValueError("three")
        return value

    results = pipelined(
        range(9),
        lambda item: fail(item, "first"),
        lambda _, value: fail(value, "second"),
        num_workers,
        StreamPool(num_workers + 1, CPU),
    )
    found = []
    with pytest.raises(ValueError, match="three"):
        for value in results:
            found.append(value)
    assert found == [0, 1, 2]
