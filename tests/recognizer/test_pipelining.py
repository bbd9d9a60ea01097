"""Stages that overlap give what they give in turn."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch

from asr.pipeline import EnginePool, Engines, StreamPool, pipelined

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


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_first_stage_goes_on_item_by_item_while_the_second_is_busy(num_workers: int) -> None:
    begun = [threading.Event() for _ in range(5)]
    in_first = threading.Lock()

    def first(item: int) -> int:
        assert in_first.acquire(blocking=False)
        begun[item].set()
        time.sleep(0.005)
        in_first.release()
        return item

    def second(_: int, value: int) -> int:
        assert value == 4 or begun[value + 1].wait(5)
        return value

    streams = StreamPool(num_workers + 1, CPU)
    assert list(pipelined(range(5), first, second, num_workers, streams)) == list(range(5))


def test_language_models_are_lent_to_one_call_at_a_time_and_those_of_a_failed_call_not_again() -> None:
    made: list[StreamPool | None] = []

    def make(streams: StreamPool | None) -> Engines:
        made.append(streams)
        return Engines([], streams or StreamPool(1, CPU))

    pool = EnginePool(is_exclusive=False)
    pool.fill(make)
    pool.fill(make)
    assert made == [None]
    with pool.lend(make) as one, pool.lend(make) as other:
        assert one is not other and made == [None, None]
    with pytest.raises(ValueError, match="no"), pool.lend(make) as failed:
        raise ValueError("no")
    with pool.lend(make) as one, pool.lend(make) as other:
        assert one is not failed and other is not failed
    assert len(made) == 3 and made[2] is failed.streams
    with copy.deepcopy(pool).lend(make):
        assert made[3:] == [None]


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_calls_take_turns_if_they_share_a_language_model(is_exclusive: bool) -> None:
    pool = copy.deepcopy(EnginePool(is_exclusive))
    has_entered = threading.Event()

    def enter() -> None:
        with pool.lend(lambda streams: Engines([], StreamPool(1, CPU))):
            has_entered.set()

    with pool.lend(lambda streams: Engines([], StreamPool(1, CPU))):
        other = threading.Thread(target=enter)
        other.start()
        assert has_entered.wait(0.05 if is_exclusive else 5) is not is_exclusive
    other.join(5)
    assert has_entered.is_set()
