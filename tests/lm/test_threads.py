"""Work shared out between threads: all of it, once, and errors come out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from asr.lm.threads import each_in_threads, in_threads


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_rows", "rows_at_least"), [(100, 7), (10, 7), (0, 7)])
def test_all_rows_are_shared_out(num_rows: int, rows_at_least: int, threads: int) -> None:
    seen: list[int] = []
    in_threads(lambda begin, end: seen.extend(range(begin, end)), num_rows, rows_at_least)
    assert sorted(seen) == list(range(num_rows))


def test_each_item_once_and_torch_has_its_threads_again(threads: int) -> None:
    seen: list[tuple[int, int, bool]] = []
    each_in_threads(lambda item: seen.append((item, torch.get_num_threads(), torch.is_grad_enabled())), iter(range(50)))
    assert sorted(seen) == [(item, 1, False) for item in range(50)]
    assert torch.get_num_threads() == threads


def test_an_error_ends_the_work(threads: int) -> None:
    seen: list[int] = []

    def work(item: int) -> None:
        seen.append(item)
        if item == 5:
            raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        each_in_threads(work, iter(range(10_000)))
    assert len(seen) < 10_000
    assert torch.get_num_threads() == threads
