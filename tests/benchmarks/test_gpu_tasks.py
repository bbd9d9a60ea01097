"""The bodies of `scripts/gpu_check`'s checks, as far as they run without a GPU, and what they call wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asr.decoding.interface import DecodeResult, Hypothesis
from asr.testing.tones import tones
from scripts.benchmarks import gpu_agreement, gpu_expected, gpu_speed, gpu_tasks
from scripts.benchmarks.gpu_profile import launches_and_waits
from scripts.benchmarks.gpu_tasks import Bench, sanitizer_result

CLEAN = """========= COMPUTE-SANITIZER
a line of the program
{"token passing, triton frames on cuda, n-gram graph": "2 best paths agree"}
========= ERROR SUMMARY: 0 errors
"""
ERRORS = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at expand_arcs+0x6b0 in kernels.py:530
=========     by thread (3,0,0) in block (7,0,0)
=========     Address 0x7f2b0bc00400 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2d2bb4]
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call.
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 2 errors
"""
NOT_STARTED = "========= Error: Target application terminated before first instrumented API call\n"


@pytest.fixture
def bench(tiny_bundle_folder: Path) -> Bench:
    return Bench(torch.device("cpu"), tiny_bundle_folder, [tones(["PAT"]), tones(["KIT"])], True)


@pytest.mark.parametrize(
    ("output", "code", "wrong", "num_errors"),
    [
        (CLEAN, 0, None, 0),
        (CLEAN.replace('"token', '"wrong": "other words", "token'), 0, "other words", 0),
        (ERRORS, 9, "Invalid __global__ write", 2),
        (ERRORS[: ERRORS.index("=========     Saved")], None, "Invalid __global__ write", 1),
        (CLEAN[:60], None, None, 0),
        (NOT_STARTED, 1, "Target application terminated", 1),
        ("Traceback\n", 1, "ended with 1: Traceback", 0),
        ("", 127, "ended with 127", 0),
    ],
)
def test_what_the_sanitizer_says(output: str, code: int | None, wrong: str | None, num_errors: int) -> None:
    found = sanitizer_result(output, code)
    assert found["num_errors"] == num_errors
    assert (wrong is None) == ("wrong" not in found) and (wrong or "") in found.get("wrong", "")
    assert ("unfinished" in found) == (code is None and wrong is None)


@pytest.mark.slow
@pytest.mark.parametrize(("output", "code"), [(CLEAN, 0), (ERRORS, 9), (None, 0)])
def test_the_sanitizer_is_run(
    output: str | None, code: int, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its place a program that notes how it was called."""
    tool, called = tmp_path / "compute-sanitizer", tmp_path / "called"
    said = "sleep 60" if output is None else f"cat <<'END'\n{output}END"
    tool.write_text(f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" > {called}\n{said}\nexit {code}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    most_seconds = 0.4 if output is None else 20.0
    found = gpu_tasks.sanitizer(bench._replace(is_simulated=output is not None), most_seconds=most_seconds)
    assert called.read_text().startswith("1 --tool memcheck --error-exitcode 9 ")
    assert called.read_text().split()[-1] == "kernels"
    assert ("unfinished" in found, found["num_errors"]) == (output is None, 2 if code else 0)


def test_a_part_that_fails_hides_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(error: Exception) -> str:
        raise error

    cases = [
        ("frames", lambda: fails(AssertionError("-3.0 where the torch backend has -2.0"))),
        ("hash table", lambda: fails(RuntimeError("PTXAS error:\nline 7"))),
        ("n-gram look-up", lambda: "10 queries give the same bits"),
    ]
    monkeypatch.setattr(gpu_agreement, "search_checks", lambda *_: cases)
    found = gpu_tasks.kernels(bench)
    wrong = (
        "frames: turn 0: -3.0 where the torch backend has -2.0; hash table: turn 0: RuntimeError: PTXAS error: line 7"
    )
    assert found == {"n-gram look-up": "10 queries give the same bits", "num_turns": 1, "wrong": wrong}
    # What was found before the check ends is kept if it does not.
    assert [json.loads(line).get("wrong", "")[:6] for line in capsys.readouterr().out.splitlines()] == ["frames"] * 3

    def recognized(folder: Path, name: str, waveforms: object, device: torch.device) -> list[tuple[str, float]]:
        if name == "ngram, torch":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return [("PAT", -10.0 if name == "rnn, torch" else -30.0)]

    results = {name: [("PAT", -10.0)] for name in ("ngram, torch", "rnn, torch", "rnn, torch-search")}
    monkeypatch.setattr(gpu_expected, "load_expected", lambda folder: gpu_expected.Expected([], results))
    monkeypatch.setattr(gpu_expected, "recognized", recognized)
    found = gpu_tasks.recognition(bench._replace(is_simulated=False, is_tiny=True))
    assert found["rnn, torch"].startswith("1 of 1 transcripts are the same")
    assert (
        found["wrong"].split("; ")[0]
        == "ngram, torch: RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert found["wrong"].split("; ")[1].startswith("rnn, torch-search: 'PAT' with -30.000")


def test_launches_and_waits_are_counted_by_frame() -> None:
    calls = {"cudaLaunchKernel": 30, "cuLaunchKernelEx": 8, "cudaGraphLaunch": 2, "cudaStreamSynchronize": 5}
    found = launches_and_waits({**calls, "cudaMemcpyAsync": 9, "aten::add": 100}, 20.0, 4)
    assert (found["launches_per_frame"], found["waits_per_frame"]) == (2.0, 0.25)
    assert (found["launches_per_recording"], found["waits_per_recording"]) == (10.0, 1.25)


def test_recordings_of_a_length_are_distinct() -> None:
    made = gpu_tasks.distinct([tones(["PAT"]), tones(["KIT"])], 5, 1, 40_000)
    assert [len(one) for one in made] == [40_000] * 5
    assert all(not torch.equal(made[0], one) for one in made[1:])


@pytest.mark.slow
def test_training_on_a_cpu(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_tasks.training(bench)
    assert "wrong" not in found
    assert [found[f"{kind}_difference_{name}"] for name in ("lm", "am") for kind in ("loss", "gradient")] == [0.0] * 4
    assert found["acoustic_training_times_real_time"] > 0 and found["training_words_per_s_500"] > 0
    steps = iter([(2.0, 1.0), (2.0, 1.02)])
    monkeypatch.setattr(gpu_speed, "_lm_step", lambda device: next(steps))
    assert gpu_tasks.training(bench)["wrong"].startswith("lm: gradient 1.02")


@pytest.mark.slow
def test_k2_beside_on_a_cpu(bench: Bench) -> None:
    pytest.importorskip("k2")
    found = gpu_tasks.k2(bench)
    assert found["num_compared"] == 2 and "wrong" not in found
    assert found["search_times_real_time_k2"] > 0 and found["search_times_real_time_token_passing"] > 0


def test_other_best_paths_are_noticed() -> None:
    from scripts.benchmarks.gpu_agreement import agreement

    best = Hypothesis((5, 6), ("A", "B"), 0.0, 0.0, 0.0, -100.0, (0, 1), (1, 2))
    paths = [best] * 20
    ours = [_result(one) for one in paths]
    assert "wrong" not in agreement(ours, ours)
    theirs = [_result(replace(one, total=-101.0)) for one in paths[:2]] + ours[2:]
    assert agreement(ours, theirs) == {"num_compared": 20, "num_others": 2}
    theirs[2] = _result(replace(best, word_ids=(5, 7)))
    assert agreement(ours, theirs)["wrong"] == "3 of 20 best paths of k2 are others"
    theirs[2] = _result(None)
    assert agreement(ours, theirs)["num_others"] == 3


def _result(best: Hypothesis | None) -> DecodeResult:
    return DecodeResult(() if best is None else (best,), True, 3)
