"""Work shared out between threads: all of it, once, and errors come out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from asr.kernels.jit import each_in_threads, in_threads, torch_on_one_thread


@pytest.mark.parametrize(("num_rows", "rows_at_least"), [(100, 7), (10, 7), (0, 7)])
def test_all_rows_are_shared_out(num_rows: int, rows_at_least: int, threads: int) -> None:
    seen: list[int] = []
    in_threads(lambda begin, end: seen.extend(range(begin, end)), num_rows, rows_at_least)
    assert sorted(seen) == list(range(num_rows))


def test_loops_keep_the_threads_that_torch_gives_up(threads: int) -> None:
    parts: list[tuple[int, int]] = []
    with torch_on_one_thread(), torch_on_one_thread():
        assert torch.get_num_threads() == 1
        in_threads(lambda begin, end: parts.append((begin, end)), 6, 2)
    assert len(parts) == threads == torch.get_num_threads()


def test_threads_that_give_up_torchs_threads_at_once_leave_them_as_they_were(threads: int) -> None:
    is_inside, may_end = threading.Event(), threading.Event()
    parts: list[tuple[int, int]] = []
    found: list[int] = []

    def second() -> None:
        with torch_on_one_thread():
            is_inside.set()
            assert may_end.wait(60.0)
            in_threads(lambda begin, end: parts.append((begin, end)), 6, 2)
        found.append(torch.get_num_threads())

    other, third = (
        threading.Thread(target=second),
        threading.Thread(target=lambda: found.append(torch.get_num_threads())),
    )
    with torch_on_one_thread():
        other.start()
        assert is_inside.wait(60.0)
    may_end.set()
    other.join()
    third.start()
    third.join()
    assert found == [threads, threads] and len(parts) == threads == torch.get_num_threads()


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_an_error_of_any_part_comes_out(threads: int) -> None:
    for wrong in range(3):
        with pytest.raises(ZeroDivisionError):
            in_threads(lambda begin, end, wrong=wrong: 1 // (begin - wrong), 3, 1)  # type: ignore[misc]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_each_item_has_its_result_and_no_gradient(is_lazy: bool, threads: int) -> None:
    seen: set[int] = set()

    def work(item: int) -> tuple[int, bool, int]:
        seen.add(threading.get_ident())
        time.sleep(0.002 * (item % 3))  # later items may end first
        parts: list[int] = []
        in_threads(lambda begin, end: parts.append(end - begin), 6, 1)
        return item, torch.is_grad_enabled(), len(parts)

    items = range(50)
    assert each_in_threads(work, iter(items) if is_lazy else items) == [(item, False, 1) for item in items]
    assert len(seen) == threads and torch.is_grad_enabled()
    assert (threading.get_ident() in seen) and each_in_threads(work, []) == []
    # For one item no other thread is asked, and loops have their threads again.
    assert each_in_threads(lambda _: threading.get_ident(), [0]) == [threading.get_ident()]
    parts: list[int] = []
    in_threads(lambda begin, end: parts.append(end - begin), 6, 1)
    assert len(parts) == threads


def test_items_have_the_threads_that_torch_gives_up(threads: int) -> None:
    everyone = threading.Barrier(threads, timeout=60.0)
    with torch_on_one_thread():
        assert each_in_threads(lambda _: torch.get_num_threads() + 0 * everyone.wait(), range(threads)) == [1] * threads


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("of_item", [False, True])
def test_an_error_ends_the_work(error: type[BaseException], of_item: bool, threads: int) -> None:
    seen: list[int] = []

    def items() -> Iterator[int]:
        for item in range(10_000):
            if item == 5 and of_item:
                raise error("five")
            yield item

    caller = threading.get_ident()

    def work(item: int) -> None:
        seen.append(item)
        time.sleep(0.001)
        # If there are others, the error is one of theirs.
        if not of_item and item >= 5 and (threads == 1 or threading.get_ident() != caller):
            raise error("five")

    with pytest.raises(error, match="five"):
        each_in_threads(work, items())
    time.sleep(0.05)
    num_seen = len(seen)
    time.sleep(0.05)
    assert len(seen) == num_seen < 100
