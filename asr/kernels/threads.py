"""Divides the work of compiled loops between as many threads as torch uses."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TypeVar

import torch

Item = TypeVar("Item")


_num_of_loops: ContextVar[int | None] = ContextVar("_num_of_loops", default=None)


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Within, torch's own operations are on one thread, and what `in_threads` shares out on as many as torch had.

    Between two operations torch's threads wait busily, and take the processors from those that loops run on.
    """
    num_threads = torch.get_num_threads()
    token = _num_of_loops.set(_num_of_loops.get() or num_threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        _num_of_loops.reset(token)


def in_threads(work: Callable[[int, int], None], num_rows: int, rows_at_least: int) -> None:
    """work(begin, end) on parts of num_rows rows; it must not share out work itself."""
    num_parts = max(1, min(_num_of_loops.get() or torch.get_num_threads(), num_rows // rows_at_least))
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    others = [_pool(num_parts - 1).submit(work, *part) for part in itertools.pairwise(bounds[1:])]
    work(0, bounds[1])
    for other in others:
        other.result()


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads)


os.register_at_fork(after_in_child=_pool.cache_clear)  # which has no threads but its own


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
