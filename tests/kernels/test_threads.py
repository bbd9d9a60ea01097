"""Work shared out between threads: all of it, once, and errors come out."""

from __future__ import annotations

import pytest
import torch

from asr.kernels.jit import in_threads, torch_on_one_thread


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


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_an_error_of_any_part_comes_out(threads: int) -> None:
    for wrong in range(3):
        with pytest.raises(ZeroDivisionError):
            in_threads(lambda begin, end, wrong=wrong: 1 // (begin - wrong), 3, 1)  # type: ignore[misc]
