"""The checks of `scripts/gpu_check`, one per process: `python -m scripts.benchmarks.gpu_tasks [--simulate] NAME`.

Each prints a JSON object as its last line, with `wrong` in it if results disagree. With --simulate the device is
simulated and the bundle and the data are tiny, so the figures are meaningless.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock


class Bench(NamedTuple):
    """The data of the checks: the device, a bundle's folder, recordings, and whether the device is simulated.

    Everything is small on a simulated device, and where `is_tiny` says so.
    """

    device: Any
    folder: Path
    waveforms: list[Any]
    is_simulated: bool
    is_tiny: bool = False


def environment(bench: Bench) -> dict[str, Any]:
    """Versions, driver and clocks, and the peak rates of copies and matrix products."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    found["device"] = torch.cuda.get_device_name(bench.device)
    if shutil.which("nvidia-smi") and not bench.is_simulated:
        fields = "name,driver_version,clocks.sm,clocks.mem,memory.total,power.limit"
        asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        found["nvidia_smi"] = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    size = 64 if bench.is_simulated else 8192
    left = torch.ones(size, size, device=bench.device)
    for name, work, amount in (
        ("copy_gb_per_s", left.clone, 2 * 4 * size**2),
        ("float32_gflop_per_s", lambda: left @ left, 2 * size**3),
        ("bfloat16_gflop_per_s", lambda: left.bfloat16() @ left.bfloat16(), 2 * size**3),
    ):
        work()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        found[name] = round(5 * amount / (time.perf_counter() - begin) / 1e9, 1)
    return found


def _turns(bench: Bench) -> range:
    """The number of repetitions of checks that may fail by chance."""
    return range(1 if bench.is_simulated or bench.is_tiny else 5)


def kernels(bench: Bench) -> dict[str, Any]:
    """Every kernel and form of the search against plain torch on the same device, five times."""
    from scripts.benchmarks.gpu_agreement import NotHere, search_checks

    turns = _turns(bench)
    sizes, found, wrong = ((2, 3) if len(turns) == 1 else (32, 100)), dict[str, Any](), dict[str, str]()
    for turn in turns:
        for name, compare in search_checks(bench.folder, bench.device, *sizes):
            # The sanitizer has to do without torch's allocator, which graphs need.
            if bench.is_tiny and name.startswith("token passing, triton on"):
                continue
            try:
                found[name] = compare()
            except NotHere as error:
                found[name] = f"not here: {error}"
            except Exception as error:  # results that differ, or what the compiler or the driver raises
                wrong.setdefault(name, f"turn {turn}: {_told(error)}")
            # Kept if the next one does not end.
            print(json.dumps({**found, **_wrong(wrong)}), flush=True)
        found["num_turns"] = turn + 1
    return {**found, **_wrong(wrong)}


def _told(error: Exception) -> str:
    """An error in a few words: what disagrees, or the type and the beginning of the message."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def _wrong(wrong: dict[str, str]) -> dict[str, str]:
    """The field `wrong` of a result, from what is wrong by name, if anything is."""
    return {"wrong": "; ".join(f"{name}: {text}" for name, text in wrong.items())} if wrong else {}


def acoustic_model(bench: Bench) -> dict[str, Any]:
    """Features and acoustic model against a CPU."""
    from scripts.benchmarks.gpu_agreement import compare_log_prob

    return {"agrees": compare_log_prob(bench.folder, bench.waveforms, bench.device)}


def recognition(bench: Bench) -> dict[str, Any]:
    """Words and totals of each mode against those of a CPU, which were found before and lie beside the bundle.

    Five times; the result says how many of these are equal to the last digit. On a simulated device, and with another
    bundle, the CPU recognizes now.
    """
    from scripts.benchmarks.gpu_expected import Expected, load_expected, names_of, recognized

    expected = None if bench.is_simulated else load_expected(bench.folder)
    found: dict[str, Any] = {"expected": "found now on a CPU" if expected is None else "found before on a CPU"}
    if expected is None:
        some = 1 if bench.is_simulated else None
        waveforms, names = bench.waveforms[:some], names_of(bench.folder)[:some]
        cpu = torch_device("cpu")
        expected = Expected(waveforms, {name: recognized(bench.folder, name, waveforms, cpu) for name in names})
    wrong: dict[str, str] = {}
    for name, theirs in expected.results.items():
        try:
            runs = [recognized(bench.folder, name, expected.waveforms, bench.device) for _ in _turns(bench)]
            found[name] = _agreement(runs, theirs)
        except Exception as error:  # the other modes are tried all the same
            wrong[name] = _told(error)
        print(json.dumps({**found, **_wrong(wrong)}), flush=True)
    return {**found, **_wrong(wrong)}


def _agreement(runs: Sequence[list[tuple[str, float]]], theirs: list[tuple[str, float]]) -> str:
    """How far texts and totals of several runs are those of a CPU.

    Raises:
        AssertionError: a total differs.
    """
    pairs = [(own, other) for ours in runs for own, other in zip(ours, theirs, strict=True)]
    for (text, total), (other_text, other_total) in pairs:
        # Sums in another order may turn a tie; the totals must still be as good.
        assert abs(total - other_total) < 0.1 + 1e-3 * abs(other_total), (
            f"{text!r} with {total:.3f}, {other_text!r} with {other_total:.3f} on a CPU"
        )
    num_same = sum(own[0] == other[0] for own, other in pairs)
    return (
        f"{num_same} of {len(pairs)} transcripts are the same, all totals agree; "
        f"{runs.count(runs[0])} of {len(runs)} runs are the same to the last digit"
    )


def compile_loops(bench: Bench) -> dict[str, Any]:
    """Seconds in which the loops for the CPU are compiled, which the later checks then find on disk."""
    from asr.kernels.jit import watch_compiler
    from asr.recognizer import Recognizer
    from asr.streaming import StreamingRecognizer

    num_compiled, begin = [0], time.perf_counter()
    with watch_compiler(num_compiled.append):
        recognizer = Recognizer.from_folder(bench.folder, decoder="token-passing").to(bench.device)
        recognizer.prepare()
        StreamingRecognizer(recognizer)
    return {"functions": num_compiled[-1], "compile_s": round(time.perf_counter() - begin, 1)}


def workers(bench: Bench) -> dict[str, Any]:
    """Batches one after the other, and several at a time, twice."""
    from scripts.benchmarks.gpu_agreement import compare_workers

    mode, numbers = ("ngram", (0, 2)) if bench.is_simulated else ("auto", (0, 1, 4))
    waveforms = bench.waveforms[: 1 if bench.is_simulated else None]
    agree = [compare_workers(bench.folder, mode, waveforms, bench.device, numbers) for _ in _turns(bench)[:2]]
    return {"agrees": agree}


def distinct(waveforms: Sequence[Any], number: int, seed: int, num_samples: int = 0) -> list[Any]:
    """Recordings that have not been heard before: halves of some, at chance places, one behind the other.

    Args:
        waveforms: what they are made of.
        number: how many.
        seed: of chance.
        num_samples: the length of each; 0 takes two halves.
    """
    import random

    import torch

    chance, made = random.Random(seed), []
    for _ in range(number):
        halves: list[Any] = []
        while len(halves) < 2 or sum(map(len, halves)) < num_samples:
            waveform = chance.choice(waveforms)
            begin = chance.randrange(max(1, len(waveform) // 2))
            halves.append(waveform[begin : begin + max(400, len(waveform) // 2)])
        made.append(torch.cat(halves)[: num_samples or None])
    return made


_SEGMENT_SECONDS = 25.0
_BATCHES = (
    (1, 0.0),
    (8, 0.0),
    (32, 0.0),
    (128, 0.0),
    (32, _SEGMENT_SECONDS),
    (256, 0.0),
    (128, _SEGMENT_SECONDS),
    (512, 0.0),
)
"""Recordings in a batch, and the seconds of each; 0 for those of the demo's clips."""


def speed(mode: str, lm_fusion: str, hidden_size: int | None = None) -> Callable[[Bench], dict[str, Any]]:
    """A check of how fast a mode is end to end, with recordings that are new to the engine, and heard before.

    Args:
        mode, lm_fusion: as of `Recognizer`.
        hidden_size: of a GRU with random weights in the place of the bundle's; None leaves that.
    """

    def measured(bench: Bench) -> dict[str, Any]:
        import torch

        from asr.decoding.settings import ResourceOptions
        from asr.recognizer import Recognizer

        found: dict[str, Any] = {}
        bundle = _bundle_with_gru(bench.folder, 16 if bench.is_simulated and hidden_size else hidden_size)
        if mode == "large_ngram":
            bundle = _with_large_ngram(bundle, 200 if bench.is_simulated else 100_000)
        for batch, length in ((1, 0.0),) if bench.is_simulated else _BATCHES:
            recognizer = Recognizer(
                bundle,
                mode=mode,
                decoder="token-passing",
                lm_fusion=lm_fusion,
                resources=ResourceOptions(batch_seconds=1e9),
            ).to(bench.device)
            num_samples = int(length * recognizer.sampling_rate)
            if not bench.is_simulated:
                # Compiles kernels and makes room; the recordings that follow are others.
                recognizer(distinct(bench.waveforms, batch, 1, num_samples))
            recordings = distinct(bench.waveforms, batch, 2, num_samples)
            seconds = sum(map(len, recordings)) / recognizer.sampling_rate
            what = f"{batch}_of_{length:.0f}_s" if length else f"{batch}"
            for name in ("new", "again"):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                recognizer(recordings)
                torch.cuda.synchronize()
                found[f"times_real_time_{name}_{what}"] = round(seconds / (time.perf_counter() - begin), 1)
            if not bench.is_simulated:
                found[f"peak_gb_{what}"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                torch.cuda.reset_peak_memory_stats()
            # What is measured so far is kept if a larger batch does not end.
            print(json.dumps(found), flush=True)
        return found

    return measured


def _with_large_ngram(bundle: Any, num_sentences: int) -> Any:
    """The bundle with a 4-gram model of made-up sentences of eight words in the place of its large n-gram model."""
    import numpy as np

    from asr.lm.corpus import WordStream
    from asr.lm.ngram.estimate import estimate_kneser_ney
    from asr.lm.ngram.model import NgramLM
    from asr.text.symbols import BOS_ID, EOS_ID, SPECIAL_WORDS

    vocabulary = bundle.small_ngram.vocabulary
    first, num_words = len(SPECIAL_WORDS), len(vocabulary)
    word_id = np.random.default_rng(0).integers(first, num_words, (num_sentences, 10)).astype(np.int32)
    word_id[:, 0], word_id[:, -1] = BOS_ID, EOS_ID
    stream = WordStream(word_id.reshape(-1), vocabulary, num_words)
    return replace(bundle, large_ngram=NgramLM.from_trie(estimate_kneser_ney(stream, 4).trie))


def _bundle_with_gru(folder: Path, hidden_size: int | None) -> Any:
    """The bundle, with a GRU of this many units and random weights in place of its own."""
    import torch

    from asr.bundle import Bundle
    from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
    from asr.serialization import ModelSpec

    bundle = Bundle.load(folder)
    if hidden_size is None:
        return bundle
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embedding_size": hidden_size, "hidden_size": hidden_size}
    network = RNNLanguageModel(bundle.small_ngram.vocabulary, RNNLMConfig(**sizes)).eval()
    return replace(bundle, rnn_lm=ModelSpec("RnnLm", sizes, network))


def streams(bench: Bench) -> dict[str, Any]:
    """How long streams wait for an answer: the steps of many at once, which all get a chunk at the same time."""
    import torch

    from asr.recognizer import Recognizer
    from asr.streaming import StreamingOptions, StreamingRecognizer

    found: dict[str, Any] = {}
    recognizer = Recognizer.from_folder(
        bench.folder, mode="ngram" if bench.is_simulated else "auto", decoder="token-passing"
    ).to(bench.device)
    options = StreamingOptions(chunk_seconds=0.3, left_seconds=1.0, right_seconds=0.2)
    for num_streams in (1,) if bench.is_simulated else (1, 16, 128):
        online = StreamingRecognizer(recognizer, options)
        recordings = distinct(bench.waveforms, num_streams, 3)
        opened = [online.open() for _ in recordings]
        pieces = [recording.split(int(0.3 * recognizer.sampling_rate)) for recording in recordings]
        steps: list[float] = []
        for chunk in range(2 if bench.is_simulated else 12):
            for stream, own in zip(opened, pieces, strict=True):
                if chunk < len(own):
                    online.push(stream, own[chunk])
            if bench.is_simulated and chunk == 1:
                online.close(opened[0])
            if not online.is_ready:
                continue  # the first window is longer than a chunk
            begin = time.perf_counter()
            while online.is_ready:
                online.step()
            torch.cuda.synchronize()
            steps.append(1e3 * (time.perf_counter() - begin))
        steps = sorted(steps[len(steps) // 4 :])  # the first ones compile
        found[f"step_ms_median_{num_streams}"] = round(steps[len(steps) // 2], 2)
        found[f"step_ms_longest_{num_streams}"] = round(steps[-1], 2)
        print(json.dumps(found), flush=True)
    return found


def profile(bench: Bench) -> dict[str, Any]:
    """Where a call of the default mode spends its time: stages, kernels, launches and waits, functions of the host."""
    from asr.decoding.settings import ResourceOptions
    from asr.recognizer import Recognizer
    from scripts.benchmarks.gpu_profile import where_time_goes

    num = 1 if bench.is_simulated else 64
    asked: dict[str, Any] = {"mode": "ngram"} if bench.is_simulated else {}
    resources = ResourceOptions(batch_seconds=1e9)
    recognizer = Recognizer.from_folder(bench.folder, decoder="token-passing", resources=resources, **asked)
    recognizer.to(bench.device)(distinct(bench.waveforms, num, 1))
    result = where_time_goes(recognizer, distinct(bench.waveforms, num, 2), bench.is_simulated)
    # Acoustic model and search, each by an operation or kernel that cannot be missing.
    products = ("gemm", "nvjet", "addmm", "aten::mm")
    needed = (products, ("aten::cumsum",) if bench.is_simulated else ("expand_arcs",))
    missing = [parts[0] for parts in needed if not any(part in name for name in result["kernels"] for part in parts)]
    return {**result, "wrong": f"not in the profile: {', '.join(missing)}"} if missing else result


def k2(bench: Bench) -> dict[str, Any]:
    """k2's search beside this one on the same frames, where it is installed."""
    from asr.kernels.jit import has_package
    from scripts.benchmarks.gpu_agreement import beside_k2

    if not has_package("k2"):
        return {"not_here": "k2 is not installed"}
    # k2 knows no simulated device.
    device = torch_device("cpu") if bench.is_simulated else bench.device
    return beside_k2(bench.folder, device, distinct(bench.waveforms, 2 if bench.is_simulated else 64, 1))


def torch_device(name: str) -> Any:
    """torch.device, for tasks that import torch late."""
    import torch

    return torch.device(name)


def queries(bench: Bench) -> dict[str, Any]:
    """Scores per second of GRUs with 256 and 512 units."""
    from scripts.benchmarks.gpu_speed import queries as rates
    from scripts.benchmarks.gpu_speed import recorded_streams

    if bench.is_simulated:
        return rates(bench.device, [1], hidden_size=16, seconds=0.0, streams=recorded_streams(1, 8))
    found: dict[str, Any] = {}
    for hidden_size in (256, 512):
        of_size = rates(bench.device, [3, 32, 256], hidden_size)
        found |= {f"{name}_gru_{hidden_size}": rate for name, rate in of_size.items()}
        print(json.dumps(found), flush=True)
    return found


def placements(bench: Bench) -> dict[str, Any]:
    """Search, hidden and output layer on either side: seconds and transfers of each placement, and equal scores.

    One recorded stream five times, then all of them.
    """
    from scripts.benchmarks.gpu_speed import placements as rows
    from scripts.benchmarks.gpu_speed import recorded_streams

    if bench.is_simulated:
        return {"placements": rows(bench.device, 16, recorded_streams(1, 4))}
    found: dict[str, Any] = {"num_repeated": len([rows(bench.device, 256, recorded_streams(1)) for _ in _turns(bench)])}
    print(json.dumps(found), flush=True)
    return {**found, "placements": rows(bench.device)}


def training(bench: Bench) -> dict[str, Any]:
    """Steps of both models' training, forward and backward: losses and gradients against a CPU's, then speed."""
    from scripts.benchmarks.gpu_speed import acoustic_training, training_agrees
    from scripts.benchmarks.gpu_speed import training as steps

    # Gradients need a device that is there.
    device = torch_device("cpu") if bench.is_simulated else bench.device
    found: dict[str, Any] = training_agrees(bench.folder, device)
    if "wrong" in found:
        return found
    is_small = bench.is_simulated
    found |= acoustic_training(bench.folder, device, *((1, 200, 1) if is_small else (32, 1000, 10)))
    print(json.dumps(found), flush=True)
    return {**found, **steps(device, *((500, 2, 1) if is_small else (33_000, 256, 50)))}


def ctc(bench: Bench) -> dict[str, Any]:
    """`CTCDecoder` against a CPU's, and the time of a batch; lattices are rescored on the device, too."""
    from scripts.benchmarks.gpu_ctc import Sizes, agreement

    return agreement(bench.device, Sizes(1, 8, 1, 8, 3.0) if bench.is_simulated else Sizes())


def external(bench: Bench) -> dict[str, Any]:
    """Decoders of transducers and attention models against a CPU's, and the time of a batch."""
    from scripts.benchmarks.gpu_external import Sizes, agreement

    sizes = Sizes(16, 2, 32) if bench.is_simulated else Sizes()
    return agreement(bench.device, sizes)


def sanitizer(bench: Bench, *, most_seconds: float = 20.0) -> dict[str, Any]:
    """compute-sanitizer over the kernels on a small scale, where it is installed.

    `most_seconds` is less than the check's limit, so that what has been found by then is reported.
    """
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"not_here": "compute-sanitizer is not installed"}
    own = [sys.executable, "-m", "scripts.benchmarks.gpu_tasks", "--simulate" if bench.is_simulated else "--tiny"]
    # torch's own allocator hands out pieces of large blocks, whose ends the tool does not know.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", *own, "kernels"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code: int | None = process.wait(most_seconds * (5 if bench.is_simulated else 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        output.seek(0)
        return sanitizer_result(output.read(), code)


def sanitizer_result(output: str, code: int | None) -> dict[str, Any]:
    """What compute-sanitizer's output says; `code` is None where it did not end in time.

    It marks its own lines with `=========`: each error is a line without further indent, its places are indented, and
    the last line counts the errors.
    """
    lines = output.splitlines()
    marked = [line.removeprefix("=========") for line in lines if line.startswith("=========")]
    told = [line.strip() for line in marked if line.startswith(" ") and not line.startswith("  ")]
    errors = [line for line in told if line and not line.startswith(("COMPUTE-SANITIZER", "ERROR SUMMARY"))]
    counts = [line.split(":")[1].split()[0] for line in told if line.startswith("ERROR SUMMARY")]
    found: dict[str, Any] = {"num_errors": int(counts[-1]) if counts else len(errors)}
    if errors:
        found["errors"] = errors[:5]
    if found["num_errors"] or errors:
        return {**found, "wrong": f"compute-sanitizer has found {errors[0] if errors else 'errors'}"}
    if code is None:
        return {**found, "unfinished": "no error until the time was over"}
    results = [line for line in lines if line.startswith("{")]
    if code != 0 or not counts or not results:
        return {**found, "wrong": f"compute-sanitizer ended with {code}: {lines[-1] if lines else 'it says nothing'}"}
    wrong = json.loads(results[-1]).get("wrong")
    return {**found, "wrong": wrong} if wrong else found


TASKS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "environment": environment,
    "kernels": kernels,
    "acoustic_model": acoustic_model,
    "recognition": recognition,
    "speed_one_pass": speed("rnn", "search", 256),
    "compile": compile_loops,
    "streams": streams,
    "ctc": ctc,
    "workers": workers,
    "speed_ngram": speed("ngram", "lattice"),
    "speed_default": speed("auto", "lattice"),
    "queries": queries,
    "profile": profile,
    "speed_gru_512": speed("rnn", "search", 512),
    "speed_large_ngram": speed("large_ngram", "search"),
    "training": training,
    "external": external,
    "placements": placements,
    "k2": k2,
    "sanitizer": sanitizer,
}


def main(arguments: Sequence[str]) -> int:
    """Runs the check named last."""
    name, is_simulated, is_tiny = arguments[-1], "--simulate" in arguments, "--tiny" in arguments
    if is_simulated:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    with ExitStack() as stack:
        bench = _bench(stack, is_simulated)._replace(is_tiny=is_tiny)
        try:
            found = TASKS[name](bench)
        except AssertionError as error:
            found = {"wrong": str(error)}
    print(json.dumps(found))
    return 0


def _bench(stack: ExitStack, is_simulated: bool) -> Bench:
    import torch

    if not is_simulated:
        from scripts.benchmarks.gpu_expected import clips
        from scripts.benchmarks.inputs import AN4_BUNDLE

        return Bench(torch.device("cuda"), AN4_BUNDLE, clips(), False)
    from asr.decoding.build import available_modes
    from asr.decoding.gpu import frame
    from asr.testing.simulated_gpu import simulated_gpu
    from asr.testing.tones import tiny_bundle, tones

    # The interpreter runs a kernel's programs one by one: few tokens in little room.
    stack.enter_context(mock.patch.object(frame, "FIRST_CAPACITY", 512))

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    bundle = tiny_bundle(folder)
    few = {"search_beam": 4.0, "min_active_states": 0}
    decoding = {mode: {**bundle.decoding.get(mode, {}), **few} for mode in available_modes(bundle)}
    replace(bundle, decoding=decoding).save(folder / "tones", half_precision=False)
    stack.enter_context(simulated_gpu())
    return Bench(torch.device("cuda"), folder / "tones", [tones(["TO"]), tones(["TWO"])], True)


_WITH_LOOPS = ("compile", "workers", "speed_default", "streams", "profile", "placements")
"""Checks of what a recognizer does by default: language models over lattices and streams use the CPU's loops."""

if __name__ == "__main__":
    if "--simulate" in sys.argv or sys.argv[-1] not in _WITH_LOOPS:
        # The others do without, since numba would compile its loops on a new machine for longer than they may take.
        sys.modules["numba"] = None  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:]))
