"""Work shared out between as many threads as torch has; compiled loops and tensor operations let each other run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import torch

Item = TypeVar("Item")


def in_threads(work: Callable[[int, int], None], num_rows: int, rows_at_least: int) -> None:
    """work(begin, end) on parts of num_rows rows."""
    num_parts = max(1, min(torch.get_num_threads(), num_rows // rows_at_least))
    if num_parts == 1:
        work(0, num_rows)
        return
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    with ThreadPoolExecutor(num_parts) as pool:
        list(pool.map(work, bounds[:-1], bounds[1:]))


def each_in_threads(work: Callable[[Item], None], items: Iterator[Item]) -> None:
    """work(item) of each item, without gradient, torch itself on one thread in each; the items are made one by one."""
    num_threads = torch.get_num_threads()
    lock = Lock()
    error: list[bool] = []

    def take() -> None:
        with torch.no_grad():
            while not error:
                with lock:
                    item = next(items, None)
                if item is None:
                    return
                try:
                    work(item)
                except BaseException:
                    error.append(True)  # what is left would be in vain
                    raise

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            for taken in [pool.submit(take) for _ in range(num_threads)]:
                taken.result()
    finally:
        torch.set_num_threads(num_threads)
