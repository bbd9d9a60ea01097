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
    """Within the block, torch's own operations use one thread, and `in_threads` uses as many as torch had before.

    Between operations torch's threads busy-wait, and take processor time from the threads that loops run on.
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
    """Runs work(begin, end) on parts of num_rows rows in threads; `work` must not call this function itself."""
    num_parts = max(1, min(_num_of_loops.get() or torch.get_num_threads(), num_rows // rows_at_least))
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    others = [_pool(num_parts - 1).submit(work, *part) for part in itertools.pairwise(bounds[1:])]
    work(0, bounds[1])
    for other in others:
        other.result()


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads)


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the pool's threads


def each_in_threads(work: Callable[[Item], None], items: Iterator[Item]) -> None:
    """Runs work(item) for each item in threads, without gradient and with one torch thread; items are made lazily."""
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
                    error.append(True)  # the other threads need not continue
                    raise

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            for taken in [pool.submit(take) for _ in range(num_threads)]:
                taken.result()
    finally:
        torch.set_num_threads(num_threads)
