"""`scripts/bench robust`: mutated input for every reader, and faults that a run must survive.

Each reader gets mutations of small valid files, in processes with limited memory and time. Input that it does not
accept must be rejected with one sentence of ours. Failures are stored below `--keep` with their seed.
`memory_growth_mb_per_hour` counts allocated bytes, not resident memory; null if the C library does not count them.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from asr.cli.output import ResultsFile
from asr.errors import AsrError
from asr.serialization import sealed
from asr.text.documents import parse_json
from scripts.benchmarks.clock import processor_seconds
from scripts.benchmarks.faults import FIELDS as FAULT_FIELDS
from scripts.benchmarks.faults import report_of, run_faults
from scripts.benchmarks.inputs import ROOT, argument_parser
from scripts.benchmarks.live_memory import ALLOCATOR
from scripts.benchmarks.robust_targets import Target, targets_in

SECONDS_PER_INPUT = 10.0  # of processor time: how much else runs on the machine does not count
BLOCKED_SECONDS = 120.0  # without any result, whatever the process waits for
MEMORY_BYTES = 3 << 30  # beside what the process has mapped when it begins
QUICK_INPUTS, ALL_INPUTS = 2600, 50_000
QUICK_FAULTS = 40  # of some 1,000
_NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
_WORDS = [
    b"nan",
    b"inf",
    b"-1",
    b"1e999",
    b"99999999999999999999",
    b"",
    b"\0",
    b"\xff",
    b"../x",
    b"{" * 2000,
    b"[]",
    b"null",
    b"[" * 20_000,
    b"[" * 900 + b"]" * 900,
    b"&a [*a, *a]",
]


def main(arguments: list[str]) -> int:
    """Runs everything; the last line is one JSON object."""
    parser = argument_parser("robust", __doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_INPUTS} inputs instead of {ALL_INPUTS}")
    parser.add_argument("--inputs", type=int, help="number of inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="only this reader")
    parser.add_argument("--keep", type=Path, default=ROOT / "exp" / "robust", help="folder for failures")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report: Counter[str] = Counter(dict.fromkeys(_FIELDS, 0))
    num_inputs = args.inputs or (QUICK_INPUTS if args.quick else ALL_INPUTS)
    with tempfile.TemporaryDirectory() as scratch:
        background = None if args.only else _start_recognizer_check(args.quick)
        faults = None if args.only else run_faults(QUICK_FAULTS if args.quick else None, args.seed)
        targets = targets_in(Path(scratch))
        if args.only:
            targets = {args.only: targets[args.only]}
        for target_name, target in targets.items():
            begin = time.monotonic()
            _fuzz(target_name, target, num_inputs // len(targets), args.seed, Path(scratch), args.keep, report)
            print(f"{target_name}: {time.monotonic() - begin:.1f} s", file=sys.stderr)
        if not args.only:
            _kill_and_resume(Path(scratch), 20 if args.quick else 300, args.seed, report)
        if faults is not None:
            report.update(report_of(faults))
        result: dict[str, Any] = dict(report)
        if background is not None:
            result |= _recognizer_check(background)
    print(json.dumps(result))
    return 0


_FIELDS = (
    "inputs_tried",
    "refused",
    "crashes",
    "hangs",
    "other_exceptions",
    "refusals_without_sentence",
    "silent_bit_flips",
    "code_executed",
    *FAULT_FIELDS,
)


def _fuzz(
    name: str, target: Target, num_inputs: int, seed: int, scratch: Path, keep: Path, report: Counter[str]
) -> None:
    folder = scratch / f"fuzz-{name}"
    folder.mkdir()
    for beside, content in target.folder.items():
        (folder / beside).write_bytes(content)
    path = folder / (target.name or f"input{target.suffix}")
    marker = scratch / "executed"
    for content in target.seeds:
        path.write_bytes(content)
        target.read(path)  # a good file must be read
    done = 0
    while done < num_inputs:
        done += _child(name, target, range(done, num_inputs), seed, path, marker, keep, report)


def _child(
    name: str, target: Target, indices: range, seed: int, path: Path, marker: Path, keep: Path, report: Counter[str]
) -> int:
    """Tries inputs in a process until one kills it or all are done; returns their number."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _try_all(name, target, indices, seed, path, marker, writing)
        os._exit(0)
    os.close(writing)
    num_done = 0
    received = b""
    outcome = "crashes"
    with os.fdopen(reading, "rb", buffering=0) as results:
        while True:
            if not _answers(results, pid):
                os.kill(pid, signal.SIGKILL)
                outcome = "hangs"
                break
            block = results.read(1 << 16)
            if not block:
                break
            received += block
            *lines, received = received.split(b"\n")
            for line in lines:
                kind, _, text = line.decode().partition(" ")
                report["inputs_tried"] += 1
                num_done += 1
                if kind != "read":
                    report[kind] += 1
                if kind not in ("read", "refused"):
                    _keep(name, kind, text, target, seed, indices[num_done - 1], keep)
    os.waitpid(pid, 0)
    if num_done < len(indices):
        report["inputs_tried"] += 1
        report[outcome] += 1
        _keep(name, outcome, "", target, seed, indices[num_done], keep)
        num_done += 1
    return num_done


def _answers(results: Any, pid: int) -> bool:
    """Waits for a result of a process; False if it takes too long."""
    begin, used = time.monotonic(), processor_seconds(pid)
    while not select.select([results], [], [], SECONDS_PER_INPUT)[0]:
        is_blocked = time.monotonic() - begin > BLOCKED_SECONDS
        if is_blocked or processor_seconds(pid) - used >= SECONDS_PER_INPUT:
            return False
    return True


def _keep(name: str, kind: str, text: str, target: Target, seed: int, index: int, keep: Path) -> None:
    content = _mutated(name, target, seed, index)[0]
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{name}-{seed}-{index}{target.suffix}"
    path.write_bytes(content)
    print(f"{kind}: {name}, seed {seed}, input {index}: {text[:300]} ({path})", file=sys.stderr)


def _try_all(name: str, target: Target, indices: range, seed: int, path: Path, marker: Path, writing: int) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for index in indices:
        content, flipped = _mutated(name, target, seed, index)
        if flipped is not None:
            path.write_bytes(flipped)
            expected = target.read(path)
        path.write_bytes(content)
        text = ""
        try:
            found = target.read(path)
            kind = "silent_bit_flips" if flipped is not None and found != expected else "read"
        except AsrError as error:
            text = str(error)
            kind = "refused" if text.strip() == text and "\n" not in text and text.endswith(".") else ""
            kind = kind or "refusals_without_sentence"
        except BaseException as error:
            kind, text = "other_exceptions", f"{type(error).__name__}: {error}"
        if marker.exists():
            marker.rmdir()
            kind = "code_executed"
        os.write(writing, f"{kind} {text[:400]}".replace("\n", " ").encode("utf-8", "replace") + b"\n")


def _mutated(name: str, target: Target, seed: int, index: int) -> tuple[bytes, bytes | None]:
    """An input; for single flipped bits of files with a checksum the good one, too."""
    generator = random.Random(f"{name} {seed} {index}")
    good = generator.choice(target.seeds)
    if target.is_checked and index % 2 == 0:
        flipped = bytearray(good)
        flipped[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        return bytes(flipped), good
    content = good
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        content = generator.choice(_MUTATIONS)(content, generator, target.seeds)
    return content, None


def _flip(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    changed = bytearray(content or b"\0")
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _number(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    packed = struct.pack(generator.choice("<I >I <H >H <Q >Q B".split()), generator.choice(_NUMBERS) & 0xFF)
    if len(packed) > 1:
        packed = struct.pack(
            {2: "<H", 4: generator.choice(("<I", ">I")), 8: "<Q"}[len(packed)],
            generator.choice(_NUMBERS) & (256 ** len(packed) - 1),
        )
    place = generator.randrange(min(len(content), 512) + 1)
    return content[:place] + packed + content[place + len(packed) :]


def _cut(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    return content[: generator.randrange(len(content) + 1)]


def _delete(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    begin = generator.randrange(len(content) + 1)
    return content[:begin] + content[begin + generator.randrange(1, 64) :]


def _repeat(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    begin = generator.randrange(len(content) + 1)
    return (
        content[:begin]
        + content[begin : begin + generator.randrange(1, 200)] * generator.choice((2, 3, 50))
        + content[begin:]
    )


def _splice(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    other = generator.choice(seeds)
    return content[: generator.randrange(len(content) + 1)] + other[generator.randrange(len(other) + 1) :]


def _line(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    lines = content.split(b"\n")
    place = generator.randrange(len(lines))
    fate = generator.randrange(3)
    if fate == 0:
        del lines[place]
    elif fate == 1:
        lines.insert(place, generator.choice(lines))
    else:
        generator.shuffle(lines)
    return b"\n".join(lines)


def _word(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    separator = generator.choice((b" ", b"\t", b"=", b",", b":", b"\n"))
    parts = content.split(separator)
    parts[generator.randrange(len(parts))] = generator.choice(_WORDS)
    return separator.join(parts)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each container in a value with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _value(content: bytes, generator: random.Random, seeds: list[bytes]) -> bytes:
    """Another value at some place of a JSON text."""
    try:
        value = parse_json(content)
        places = _places(value)
    except (ValueError, RecursionError):
        return _word(content, generator, seeds)
    if places:
        owner, key = generator.choice(places)
        owner[key] = generator.choice((None, -1, 1e300, 1 << 62, "", "../x", [], {}, True, [[]]))
        if isinstance(value, dict) and "checksum" in value and generator.random() < 0.9:
            value = sealed({name: inner for name, inner in value.items() if name != "checksum"})
    return json.dumps(value).encode()


_MUTATIONS = (_flip, _number, _cut, _delete, _repeat, _splice, _line, _word, _value)


def _kill_and_resume(scratch: Path, num_kills: int, seed: int, report: Counter[str]) -> None:
    """Writes results in processes that are killed at random times, and counts missing and duplicate results."""
    path = scratch / "killed.jsonl"
    names = [f"{number}.wav" for number in range(400)]
    generator = random.Random(seed)
    for kill in range(num_kills + 1):
        pid = os.fork()
        if pid == 0:
            with ResultsFile(path, "audio") as output:
                output.require_maker("fuzzer")
                for name in names:
                    if name not in output.done:
                        output.add({"audio": name, "text": "WORD " * 40})
                        time.sleep(0.0005)
            os._exit(0)
        if kill < num_kills:
            time.sleep(generator.uniform(0.0, 0.03))
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    counts = Counter(json.loads(line)["audio"] for line in path.read_text().splitlines())
    report["lost_results"] += sum(name not in counts for name in names)
    report["doubled_results"] += sum(count - 1 for count in counts.values())


_RECOGNIZER = """
import json, sys, threading
import torch
torch.set_num_threads(1)
from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.recognizer import Recognizer
from scripts.benchmarks.live_memory import growth, live_megabytes
folder, num_rounds, *clips = sys.argv[1:]
waveforms = [read_audio(clip)[:64000] for clip in clips]
bundle = Bundle.load(folder)
expected = [Recognizer(bundle)([waveform])[0].text for waveform in waveforms]
wrong, recognizer, together = [], Recognizer(bundle), threading.Barrier(4)
def call(first):
    together.wait()
    try:
        for step in range(len(waveforms)):
            which = (first + step) % len(waveforms)
            if recognizer([waveforms[which]])[0].text != expected[which]:
                wrong.append(which)
    except Exception as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=call, args=(first,)) for first in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
wrong += [which for which, text in enumerate(expected) if recognizer([waveforms[which]])[0].text != text]
hours = sum(map(len, waveforms)) / 16000 / 3600
for _ in range(10):  # until caches and pools have their size
    recognizer(waveforms)
live = []
for _ in range(int(num_rounds)):
    recognizer(waveforms)
    live.append(live_megabytes())
found = None if None in live else round(growth(live, hours), 2)
print(json.dumps({"thread_errors": len(wrong), "memory_growth_mb_per_hour": found}))
"""


def _start_recognizer_check(quick: bool) -> subprocess.Popen[str]:
    clips = sorted(map(str, (ROOT / "scripts" / "demo_clips").glob("*.flac")))[: 3 if quick else 5]
    bundle = ROOT / "checkpoints" / "librispeech"
    command = [sys.executable, "-c", _RECOGNIZER, str(bundle), "30" if quick else "200", *clips]
    environment = {**os.environ, **ALLOCATOR}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def _recognizer_check(process: subprocess.Popen[str]) -> dict[str, Any]:
    output = process.communicate()[0]
    if process.returncode:
        return {"thread_errors": 1, "memory_growth_mb_per_hour": None}
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result
