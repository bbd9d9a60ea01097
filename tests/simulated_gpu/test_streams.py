"""The model of streams and of the allocator that they share, and what it says of the recognizer's workers."""

from __future__ import annotations

import ast
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch

from asr.testing.simulated_gpu import simulated_gpu

pytestmark = pytest.mark.skipif(torch.__version__ < "2", reason="the simulated device needs torch 2's dispatch modes")


@pytest.mark.parametrize(
    ("known_by", "num_hazards"), [("nobody", 1), ("host", 0), ("event", 0), ("own stream", 0), ("a later event", 0)]
)
def test_a_block_is_freed_too_early_unless_the_work_on_it_is_known_to_be_done(known_by: str, num_hazards: int) -> None:
    with simulated_gpu() as device:
        home, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(home):
            block = torch.zeros(4, device="cuda")
        other.wait_stream(home)
        with torch.cuda.stream(home if known_by == "own stream" else other):
            total = block + 1.0
        if known_by == "host":
            with torch.cuda.stream(other):
                assert total.tolist() == [1.0] * 4
        elif known_by == "event":
            home.wait_event(other.record_event())
        elif known_by == "a later event":
            third = torch.cuda.Stream()
            third.wait_stream(other)
            third.synchronize()
        del block
        assert device.streams.hazards.total() == num_hazards


def test_a_view_keeps_its_memory() -> None:
    with simulated_gpu() as device:
        other = torch.cuda.Stream()
        block = torch.zeros(4, device="cuda")
        view = block[1:]
        with torch.cuda.stream(other):
            view += 1.0
        del block
        assert not device.streams.hazards
        del view
        assert device.streams.hazards.total() == 1


@pytest.mark.parametrize(("known_by", "num_races"), [("nobody", 1), ("host", 0), ("event", 0)])
@pytest.mark.parametrize("second", ["reads", "writes", "writes to what was read"])
def test_a_block_is_used_too_early_unless_another_stream_s_work_is_known_to_be_done(
    second: str, known_by: str, num_races: int
) -> None:
    with simulated_gpu() as device:
        home, other = torch.cuda.Stream(), torch.cuda.Stream()
        block = torch.zeros(4, device="cuda")
        for stream in (home, other):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(home):
            total = block + 1.0 if second == "writes to what was read" else block.add_(1.0)
        if known_by == "host":
            home.synchronize()
        elif known_by == "event":
            other.wait_event(home.record_event())
        with torch.cuda.stream(other):
            _ = block + 1.0 if second == "reads" else block.mul_(2.0)
        assert device.streams.races.total() == num_races
        home.synchronize()
        other.synchronize()
        del block, total


def test_two_streams_may_read_at_a_time() -> None:
    with simulated_gpu() as device:
        block = torch.zeros(4, device="cuda")
        streams = [torch.cuda.Stream() for _ in range(2)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                _ = block + 1.0
        assert not device.streams.races


def test_the_bytes_that_tensors_hold_are_counted() -> None:
    with simulated_gpu() as device:
        first = torch.zeros(1000, device="cuda")
        second = first[10:].view(torch.int32) + 1
        view = second[:5]
        del first, second
        (file,) = device.streams.most_held
        assert device.streams.most_held[file] == device.streams.peak_bytes == 4000 + 3960
        assert device.streams.bytes_held[file] == 3960
        del view
        assert device.streams.bytes_held[file] == 0


def test_kernels_are_prepared_for_the_interpreter_one_at_a_time() -> None:
    """Python 3.11 may end two threads that make syntax trees at once with a SystemError."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    in_progress, most = threading.Semaphore(0), []

    def transform(rewriter: Any, source: str) -> ast.AST:
        in_progress.release()
        time.sleep(0.02)
        most.append(in_progress._value)
        in_progress.acquire()
        return ast.parse(source)

    def kernel() -> None:
        pass

    with mock.patch.object(interpreter.FunctionRewriter, "_transform_ast", transform), simulated_gpu():
        threads = [threading.Thread(target=interpreter.FunctionRewriter(kernel).rewrite_ast) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1] * 4


def test_what_a_thread_queues_in_a_stream_that_another_one_captures_is_a_race() -> None:
    with simulated_gpu(num_streams=1) as device:
        value = torch.ones(3, device="cuda")

        def work(stream: Any) -> None:
            with torch.cuda.stream(stream):
                value.add_(1)

        for stream, num_races in ((torch.cuda.Stream(priority=-1), 0), (torch.cuda.Stream(), 1)):
            torch.cuda.synchronize()
            other = threading.Thread(target=work, args=(torch.cuda.Stream(),))
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                other.start()
                other.join()
            assert device.streams.races.total() == num_races
