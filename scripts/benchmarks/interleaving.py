"""Triton's interpreter with the programs of a grid interleaved, as a GPU may run them.

The interpreter runs one program after the other, so that a race between programs never shows. Here each program is a
thread. Exactly one thread runs at a time, and the next one is drawn at random before each load, store and atomic
operation. Atomic operations run lane by lane in random order. The order depends only on the seed.

This covers all sequentially consistent orders of the operations, but no weak memory model.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime import interpreter

_BUILDER = interpreter.interpreter_builder
_RMW = interpreter._ir.ATOMIC_OP
_RMW_OPERATIONS = (_RMW.ADD, _RMW.MAX, _RMW.UMAX, _RMW.MIN, _RMW.UMIN)
_MAX_THREADS = 64  # programs of larger grids run in groups of this many


@dataclass
class Interleaving:
    """Counts of what ran.

    Args:
        launches: number of grids.
        programs: number of their programs.
        switches: how often another program continued.
    """

    launches: int = 0
    programs: int = 0
    switches: int = 0


class _Schedule:
    """Lets one of several threads run at a time."""

    def __init__(self, num_threads: int, order: random.Random, counts: Interleaving) -> None:
        self.order = order
        self.error: BaseException | None = None
        self._counts = counts
        self._may_run = [threading.Event() for _ in range(num_threads)]
        self._alive = list(range(num_threads))
        self._all_done = threading.Event()

    def run(self, programs: list[Callable[[int], None]]) -> None:
        """Runs all programs to their ends.

        Raises:
            BaseException: the error of the first program that failed.
        """
        threads = [threading.Thread(target=self._work, args=item) for item in enumerate(programs)]
        for thread in threads:
            thread.start()
        self._wake_any()
        self._all_done.wait()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def switch(self, own: int) -> None:
        """Lets any of the programs continue; returns when it is this program's turn again."""
        chosen = self.order.choice(self._alive)
        if chosen != own:
            self._counts.switches += 1
            self._may_run[own].clear()
            self._may_run[chosen].set()
            self._may_run[own].wait()

    def _work(self, own: int, program: Callable[[int], None]) -> None:
        self._may_run[own].wait()
        try:
            program(own)
        except BaseException as error:
            self.error = self.error or error
        self._alive.remove(own)
        if self._alive:
            self._wake_any()
        else:
            self._all_done.set()

    def _wake_any(self) -> None:
        self._may_run[self.order.choice(self._alive)].set()


class _Running(threading.local):
    """The program that runs in a thread: its schedule, its number in it and its position in the grid."""

    schedule: _Schedule | None = None
    number = 0
    grid_idx: Any = None


@contextlib.contextmanager
def interleaved_programs(seed: int, splits: str | None = None) -> Iterator[Interleaving]:
    """Within the block, the programs of grids run interleaved.

    Args:
        seed: of the order.
        splits: which atomic operations become a load and a store, between which another program may run: `cas`
            (compare-and-swap) or `rmw` (minimum, maximum and sum). This is a mutant that checks must catch.
    """
    running, counts, order = _Running(), Interleaving(), random.Random(seed)
    builder = type(_BUILDER)
    launch = interpreter.GridExecutor.__call__

    def pause() -> None:
        if running.schedule is not None:
            running.schedule.switch(running.number)

    def paused(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            pause()
            return operation(*args, **kwargs)

        return run

    def by_lane(operation: Callable[..., Any], num_before: int) -> Callable[..., Any]:
        """The operation lane by lane; its first `num_before` arguments have no lanes."""

        def run(self: Any, *args: Any) -> Any:
            first, handles, last = args[:num_before], args[num_before:-2], args[-2:]
            if running.schedule is None:
                return operation(self, *args)
            shape = handles[0].data.shape
            flat = [handle.data.reshape(-1) for handle in handles]
            results: Any = [None] * flat[0].size
            lanes = list(range(len(results)))
            running.schedule.order.shuffle(lanes)
            for lane in lanes:
                pause()
                own = [
                    interpreter.TensorHandle(np.ascontiguousarray(values[lane : lane + 1]), handle.dtype)
                    for values, handle in zip(flat, handles, strict=True)
                ]
                result = operation(self, *first, *own, *last)
                results[lane] = result.data.reshape(-1)[0]
            return interpreter.TensorHandle(np.array(results, dtype=result.data.dtype).reshape(shape), result.dtype)

        return run

    compare_and_swap = builder.create_atomic_cas

    def split_compare_and_swap(self: Any, place: Any, expected: Any, value: Any, *_: Any) -> Any:
        mask = interpreter.TensorHandle(np.ones_like(place.data, dtype=bool), interpreter.tl.int1)
        held = builder.create_masked_load(self, place, mask, None, None, False)
        mask.data = held.data == expected.data
        builder.create_masked_store(self, place, value, mask, None)
        return interpreter.TensorHandle(held.data, expected.dtype.scalar)

    read_modify_write = builder.create_atomic_rmw
    combine: dict[Any, Callable[..., Any]] = {
        operation: getattr(np, name)
        for operation, name in zip(_RMW_OPERATIONS, ("add", "maximum", "maximum", "minimum", "minimum"), strict=True)
    }

    def split_read_modify_write(self: Any, operation: Any, place: Any, value: Any, mask: Any, *_: Any) -> Any:
        held = builder.create_masked_load(self, place, mask, None, None, False)
        new = combine[operation](held.data, value.data).astype(held.data.dtype)
        builder.create_masked_store(self, place, interpreter.TensorHandle(new, value.dtype), mask, None)
        return interpreter.TensorHandle(held.data, value.dtype.scalar)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = self.fn
        waiting: list[tuple[Any, dict[str, Any]]] = []
        product, grid = math.prod, _BUILDER  # `put_off` has the kernel's globals, not this module's

        def run_all() -> None:
            order.shuffle(waiting)
            counts.launches += 1
            counts.programs += len(waiting)
            for begin in range(0, len(waiting), _MAX_THREADS):
                group = waiting[begin : begin + _MAX_THREADS]
                schedule = _Schedule(len(group), order, counts)

                def program(number: int, schedule: _Schedule = schedule, group: Any = group) -> None:
                    running.schedule, running.number = schedule, number
                    running.grid_idx, arguments = group[number]
                    kernel(**arguments)

                schedule.run([program] * len(group))

        def put_off(**arguments: Any) -> None:
            waiting.append((running.grid_idx, arguments))
            if len(waiting) == product(grid.grid_dim):
                run_all()

        # The interpreter patches the globals of the function that it calls and reads its signature.
        self.fn = FunctionType(put_off.__code__, kernel.__globals__, kernel.__name__, None, put_off.__closure__)
        self.fn.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
        try:
            return launch(self, *args, **kwargs)
        finally:
            self.fn = kernel

    grid_idx = property(lambda _: running.grid_idx, lambda _, value: setattr(running, "grid_idx", value))
    cas = split_compare_and_swap if splits == "cas" else compare_and_swap
    rmw = split_read_modify_write if splits == "rmw" else read_modify_write
    patches: dict[str, Any] = {
        "create_masked_load": paused(builder.create_masked_load),
        "create_masked_store": paused(builder.create_masked_store),
        "create_atomic_rmw": by_lane(rmw, 1),
        "create_atomic_cas": by_lane(cas, 0),
    }
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, _BUILDER, "grid_idx", None)
        for name, instead in patches.items():
            stack.enter_context(mock.patch.object(builder, name, instead))
        stack.enter_context(mock.patch.object(builder, "grid_idx", grid_idx, create=True))
        stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", launched))
        yield counts
