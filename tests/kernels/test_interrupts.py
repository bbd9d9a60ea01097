"""Ctrl-C during a compiled loop that returns named tuples, in a process of its own, which could crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from asr.kernels.interrupts import interrupts_between_loops

LOOP = """
import contextlib, os, signal, sys, threading, time
from typing import Any, NamedTuple
import numba
import numpy as np
from asr.kernels.interrupts import interrupts_between_loops

class Pair(NamedTuple):
    first: Any
    second: Any

@numba.njit(nogil=True)
def loop(values, rounds):
    total = 0.0
    for number in range(rounds):
        total += np.sin(total + values[number % len(values)])
    return Pair(values, values), Pair(values, np.full(3, total)), total

signal.signal(signal.SIGINT, signal.default_int_handler)
values = np.ones(4)
loop(values, 10)
rounds = 100_000
while True:
    begin = time.perf_counter()
    loop(values, rounds)
    seconds = time.perf_counter() - begin
    if seconds > 0.5:
        break
    rounds *= 2
threading.Timer(seconds / 4, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    with interrupts_between_loops() if sys.argv[1] == "safe" else contextlib.nullcontext():
        loop(values, rounds)
        time.sleep(5)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
def test_a_loop_returns_before_it_is_interrupted() -> None:
    pytest.importorskip("numba")
    done = subprocess.run(
        [sys.executable, "-c", LOOP, "safe"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "interrupted\n"
    assert done.returncode == 0


SLOW_IMPORT = """
import time
try:
    time.sleep(0.5)
except KeyboardInterrupt:
    print("cut short")
"""

PROGRAM = """
import os, signal, threading, time
from asr.kernels.interrupts import interrupts_between_loops

signal.signal(signal.SIGINT, signal.default_int_handler)

def press():
    for _ in range(3):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

def run():
    presses = threading.Thread(target=press)
    try:
        with interrupts_between_loops():
            presses.start()
            import slow
            print("imported", flush=True)
            time.sleep(5)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    presses.join()
    time.sleep(0.1)
    print("not interrupted again")

run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["program.py"], ["-c", "import program"]], ids=["script", "module"])
def test_an_import_ends_before_it_is_interrupted_and_later_code_is_not(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "slow.py").write_text(SLOW_IMPORT)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.stdout.removeprefix("imported\n") == "interrupted\nnot interrupted again\n"
    assert done.stderr == ""
    assert done.returncode == 0


def test_python_code_is_interrupted_at_once() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_between_loops():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_handlers_are_called_and_those_set_meanwhile_stay() -> None:
    called = []

    def handler(number: int, frame: object) -> None:
        called.append(number)

    def later(number: int, frame: object) -> None:
        pass

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGUSR1)}
    try:
        with interrupts_between_loops(), interrupts_between_loops():
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGINT)
            assert called == [signal.SIGUSR1, signal.SIGINT]
            signal.signal(signal.SIGUSR1, later)
        assert signal.getsignal(signal.SIGINT) is handler and signal.getsignal(signal.SIGUSR1) is later
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def test_threads_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with interrupts_between_loops():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


TIMEOUT = """
import signal, sys, threading, time, os

def give_up(number, frame):
    raise TimeoutError("too long")

import asr
from asr.testing.tones import tones

recognizer = asr.load(sys.argv[1])
samples = tones(["PAT", "TO", "KIT"])
expected = recognizer(samples)[0].text
long = samples.repeat(60)
begin = time.perf_counter()
recognizer(long)
seconds = time.perf_counter() - begin
signal.signal(signal.SIGALRM, give_up)
signal.signal(signal.SIGINT, signal.default_int_handler)
for part in range(1, 6):
    for number, kind in ((signal.SIGALRM, TimeoutError), (signal.SIGINT, KeyboardInterrupt)):
        timer = threading.Timer(seconds * part / 6, os.kill, (os.getpid(), number))
        try:
            timer.start()
            recognizer(long)
            timer.join()
            time.sleep(1)
        except kind:
            print("ended", end=" ")
        assert recognizer(samples)[0].text == expected
assert signal.getsignal(signal.SIGALRM) is give_up
"""


@pytest.mark.slow
def test_a_recognizer_survives_signals_whose_handlers_raise(tiny_bundle_folder: Path) -> None:
    pytest.importorskip("numba")
    command = [sys.executable, "-c", TIMEOUT, str(tiny_bundle_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == ["ended"] * 10
    assert done.returncode == 0
