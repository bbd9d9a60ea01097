"""Faults at every step of commands that write: kills, full or read-only disks; clock jumps; a GPU without memory.

    python -m scripts.benchmarks.faults --limit 100

`faults.c`, loaded before the C library, counts the system calls that change files in one folder. Each command runs
once undisturbed, and then once for each fault at each such call: it is killed there (also halfway through a write), or
the call and all later ones fail. Then the same command runs again, undisturbed. Outputs must equal those of the first
run, nothing that was reported done may be lost or duplicated, and a failure must be reported in one sentence.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_SECONDS_PER_RUN = 60.0
FIELDS = ("faults_tried", "lost_results", "doubled_results", "other_outputs", "untold_failures")
_KILL, _KILL_HALF_WRITTEN, _FAIL, _CLOCK = 1, 2, 3, 4


class Fault(NamedTuple):
    """A fault: an action of faults.c, and the error number if calls fail."""

    name: str
    action: int
    error: int = 0


FAULTS = (
    Fault("killed", _KILL),
    Fault("killed while writing", _KILL_HALF_WRITTEN),
    Fault("disk full", _FAIL, errno.ENOSPC),
    Fault("read-only", _FAIL, errno.EROFS),
    Fault("input/output error", _FAIL, errno.EIO),
)
_CLOCK_JUMPS = Fault("clock jumps", _CLOCK)


class Command(NamedTuple):
    """A command line in a folder that has all inputs; `lines` is its output that only grows."""

    arguments: str
    outputs: tuple[str, ...]
    lines: str = ""


COMMANDS = {
    "transcribe": Command("transcribe --bundle tones audio --output out.jsonl", ("out.jsonl",), "out.jsonl"),
    "transcribe to files": Command(
        "transcribe --bundle tones audio --output-dir out --output-format txt,srt", ("out",)
    ),
    "transcribe, lattices": Command(
        "transcribe --bundle tones audio --output out.jsonl --lattices lattices", ("out.jsonl", "lattices"), "out.jsonl"
    ),
    "transcribe, Kaldi's lattices": Command(
        "transcribe --bundle tones audio --output out.jsonl --lattices lattices --lattice-format kaldi",
        ("out.jsonl", "lattices"),
        "out.jsonl",
    ),
    "workers": Command("transcribe --bundle tones audio --output out.jsonl --workers 2", ("out.jsonl",), "out.jsonl"),
    "n-gram": Command("lm ngram --text text --order 2 --arpa out.arpa --binary out.bin", ("out.arpa", "out.bin")),
    "vocabulary": Command("lm vocabulary words --text text", ("words",)),
    "graph": Command("graph --lexicon lexicon --arpa 2.arpa --output graph.safetensors", ("graph.safetensors",)),
    "details": Command("evaluate hyp --reference ref --details details", ("details",)),
    "bundle": Command(
        "bundle tones --acoustic-model new-tones --graph new-tones/graph.safetensors --card card", ("tones",)
    ),
    "manifest": Command("prepare csv --corpus table.csv --output manifests", ("manifests",)),
    "rescored lattices": Command(
        "rescore slf/0.slf.gz slf/1.slf.gz --ngram 2.arpa --jsonl --output rescored", ("rescored",)
    ),
    "exported language model": Command("lm rnn export rnnlm.ckpt rnnlm", ("rnnlm",)),
    "exported TorchScript": Command("export tones --format torchscript --output network.pt", ("network.pt",)),
    "exported ONNX": Command("export tones --format onnx --output network.onnx", ("network.onnx",)),
}


def run_faults(limit: int | None, seed: int, only: str | None = None) -> subprocess.Popen[str] | None:
    """Runs everything in a separate process with faults.c loaded; None if there is no C compiler.

    Args:
        limit: the number of faults; None for one of each kind at each call.
        seed: seed of the choice.
        only: one of `COMMANDS`; None for all.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        print("faults: skipped, there is no C compiler (cc)", file=sys.stderr)
        return None
    library = Path(tempfile.mkdtemp()) / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    command = [sys.executable, "-m", "scripts.benchmarks.faults", "--preloaded", str(library), "--seed", str(seed)]
    command += [] if limit is None else ["--limit", str(limit)]
    command += [] if only is None else ["--only", only]
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def report_of(process: subprocess.Popen[str]) -> dict[str, int]:
    """The counts of a finished run."""
    output = process.communicate()[0]
    if process.returncode:
        return {**dict.fromkeys(FIELDS, 0), "untold_failures": 1}
    found: dict[str, int] = json.loads(output.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="number of faults (default: one of each kind at each call)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="only this command")
    parser.add_argument("--preloaded", type=Path, help="the compiled faults.c, if already loaded")
    args = parser.parse_args(arguments)
    if args.preloaded is None:
        process = run_faults(args.limit, args.seed, args.only)
        print(json.dumps({} if process is None else report_of(process)))
        return 0
    os.environ.pop("LD_PRELOAD", None)  # not for compilers and the like
    from asr.models.export import can_export_onnx  # not before LD_PRELOAD has gone

    commands = {args.only: COMMANDS[args.only]} if args.only else COMMANDS
    if not can_export_onnx():
        commands = {name: command for name, command in commands.items() if name != "exported ONNX"}
    with tempfile.TemporaryDirectory() as scratch:
        sweep = _Sweep(Path(scratch), ctypes.CDLL(str(args.preloaded)))
        sweep.run(commands, args.limit, args.seed)
    print(json.dumps(dict(sweep.report)))
    return 0


class _Outcome(NamedTuple):
    code: int  # negative: killed by this signal
    error: str  # what it wrote to stderr
    calls: int


class _Sweep:
    def __init__(self, scratch: Path, library: ctypes.CDLL) -> None:
        self.report: Counter[str] = Counter(dict.fromkeys(FIELDS, 0))
        self._template, self._work, self._log = scratch / "template", scratch / "work", scratch / "log"
        self._library = library
        library.faults_seen.restype = ctypes.c_long
        library.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        _fill(self._template)

    def run(self, commands: dict[str, Command], limit: int | None, seed: int) -> None:
        expected: dict[str, dict[str, str]] = {}
        todo: list[tuple[str, Fault, int]] = []
        for name, command in commands.items():
            begin = time.monotonic()
            self._lay_out()
            outcome = self._attempt(command, Fault("none", _KILL), -1)
            if outcome.code != 0:
                self._wrong("untold_failures", name, Fault("none", 0), 0, outcome.error)
                continue
            expected[name] = self._contents(command)
            todo += [(name, fault, call) for fault in FAULTS for call in range(outcome.calls)]
            todo.append((name, _CLOCK_JUMPS, 0))
            seconds = time.monotonic() - begin
            print(f"{name}: {outcome.calls} calls that change files, {seconds:.1f} s", file=sys.stderr)
        if limit is not None and limit < len(todo):
            todo = random.Random(seed).sample(todo, limit)
        for name, fault, call in todo:
            self._try(name, commands[name], fault, call, expected[name])
        if "transcribe" in expected:
            self._without_gpu_memory(commands["transcribe"], expected["transcribe"])

    def _try(self, name: str, command: Command, fault: Fault, call: int, expected: dict[str, str]) -> None:
        self.report["faults_tried"] += 1
        self._lay_out()
        before = self._contents(command)
        outcome = self._attempt(command, fault, call)
        interrupted = self._contents(command)
        is_killed = fault.action in (_KILL, _KILL_HALF_WRITTEN)
        if fault.action == _CLOCK:
            if outcome.code != 0 or not _same(interrupted, expected):
                self._wrong("other_outputs", name, fault, call, outcome.error)
            return
        told = [line for line in outcome.error.splitlines() if line.startswith("asr: ")]
        is_told = outcome.code > 0 and bool(told) and "Traceback" not in outcome.error
        if is_killed != (outcome.code == -signal.SIGKILL) or not (is_killed or is_told or _same(interrupted, expected)):
            self._wrong("untold_failures", name, fault, call, f"{outcome.code}: {outcome.error}")
        # What was there before is there still, or what replaces it is complete.
        for path, content in before.items():
            if interrupted.get(path) != content and not _same_text(interrupted.get(path), expected[path]):
                self._wrong("lost_results", name, fault, call, f"{path} is neither as before nor as it will be")
        again = self._attempt(command, Fault("none", 0), -1)
        found = self._contents(command)
        if again.code != 0 or not _same(found, expected):
            different = [path for path in {*found, *expected} if not _same_text(found.get(path), expected.get(path))]
            self._wrong("other_outputs", name, fault, call, f"{again.code}, {different}, {again.error}")
        if command.lines:
            written = interrupted.get(command.lines, "")
            done = set(written.splitlines()[: written.count("\n")])  # the last one may be incomplete
            lines = Counter(found.get(command.lines, "").splitlines())
            lost = sum(line not in lines for line in done)
            doubled = sum(count - 1 for count in lines.values())
            if lost or doubled:
                self._wrong("lost_results" if lost else "doubled_results", name, fault, call, "")

    def _without_gpu_memory(self, command: Command, expected: dict[str, str]) -> None:
        """Batches that do not fit are recognized one by one; recordings that do not fit are reported and done later."""
        import torch

        from asr.recognizer import Recognizer

        score, warm_up = Recognizer._score, Recognizer._warm_up
        too_large = {"several": lambda samples: len(samples) > 1, "any": lambda samples: True}
        for name, is_too_large in too_large.items():

            def short_of_memory(self: Any, samples: Any, is_too_large: Any = is_too_large, **options: Any) -> Any:
                if is_too_large(samples):
                    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return score(self, samples, **options)

            self.report["faults_tried"] += 1
            self._lay_out()
            Recognizer._score = short_of_memory  # type: ignore[method-assign]
            if name == "several":
                Recognizer._warm_up = lambda *_: None  # type: ignore[method-assign]
            try:
                outcome = self._attempt(command, Fault("none", 0), -1)
            finally:
                Recognizer._score, Recognizer._warm_up = score, warm_up  # type: ignore[method-assign]
            fault = Fault(f"no GPU memory for {name}", 0)
            if (outcome.code != 0) != (name == "any") or "Traceback" in outcome.error:
                self._wrong("untold_failures", "transcribe", fault, 0, outcome.error)
            outcome = self._attempt(command, Fault("none", 0), -1)
            found = self._contents(command)
            kept = {path: _without_failures(content) for path, content in found.items()}
            if outcome.code != 0 or not _same(kept, expected):
                self._wrong("other_outputs", "transcribe", fault, 0, outcome.error)

    def _wrong(self, kind: str, name: str, fault: Fault, call: int, reason: str) -> None:
        self.report[kind] += 1
        print(f"{kind}: {name}, {fault.name} at call {call}: {reason[-600:]}", file=sys.stderr)

    def _lay_out(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._template, self._work)

    def _attempt(self, command: Command, fault: Fault, call: int) -> _Outcome:
        """Runs the command in a separate process."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.close(reading)
                log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.chdir(self._work)
                code = self._run(command, fault, call, writing)
            finally:
                os._exit(code)
        os.close(writing)
        deadline = time.monotonic() + _SECONDS_PER_RUN
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGABRT)
            time.sleep(0.002)
        with os.fdopen(reading, "rb") as pipe:
            calls = pipe.read()
        code = os.waitstatus_to_exitcode(status)
        return _Outcome(code, self._log.read_text(errors="replace"), int(calls or b"0"))

    def _run(self, command: Command, fault: Fault, call: int, writing: int) -> int:
        import traceback

        from asr.cli.main import main as asr

        self._library.faults_arm(os.fsencode(self._work), call, fault.action, fault.error)
        try:
            code = asr(command.arguments.split())
        except BaseException:
            traceback.print_exc()
            code = 71
        calls = self._library.faults_seen()
        self._library.faults_arm(b"", -1, 0, 0)
        sys.stderr.flush()
        os.write(writing, str(calls).encode())
        return code

    def _contents(self, command: Command) -> dict[str, str]:
        """Each file of the outputs, without the seconds that recognition took; hidden files are unfinished ones."""
        found = {}
        for output in command.outputs:
            top = self._work / output
            for path in [top] if top.is_file() else sorted(top.rglob("*")):
                if path.is_file() and not path.relative_to(self._work).name.startswith("."):
                    found[str(path.relative_to(self._work))] = _timeless(path)
        return found


_NUMBER = re.compile(r"-?\d+\.\d+")


def _same(found: dict[str, str], expected: dict[str, str]) -> bool:
    return found.keys() == expected.keys() and all(_same_text(found[path], expected[path]) for path in found)


def _same_text(found: str | None, expected: str | None) -> bool:
    """Scores may differ in their last digits, because a recording may be recognized in another batch."""
    if found is None or expected is None or found == expected:
        return found == expected
    numbers, others = ([*map(float, _NUMBER.findall(text))] for text in (found, expected))
    is_close = len(numbers) == len(others) and all(
        abs(one - other) < 1e-3 for one, other in zip(numbers, others, strict=True)
    )
    return is_close and _NUMBER.sub("0", found) == _NUMBER.sub("0", expected)


def _timeless(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            return gzip.decompress(content).decode()  # the header has the time in it
        except (OSError, EOFError):
            return "incomplete"
    if path.suffix == ".pt" and content.startswith(b"PK"):
        return _untraced(path)
    if path.suffix != ".jsonl":
        return content.decode("latin-1")
    lines = []
    for line in content.decode().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            lines.append(line)
            continue
        if isinstance(record, dict):
            record.pop("seconds", None)
        lines.append(json.dumps(record) + line[len(line.rstrip("\n")) :])
    return "".join(lines)


def _untraced(path: Path) -> str:
    """The entries of a TorchScript file except those that depend on the calling lines of this program."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith((".debug_pkl", "/serialization_id"))]
            return "".join(f"{name}\n{archive.read(name).decode('latin-1')}\n" for name in sorted(names))
    except (OSError, zipfile.BadZipFile):
        return "incomplete"


def _without_failures(content: str) -> str:
    return "".join(line for line in content.splitlines(keepends=True) if '"error": ' not in line)


def _fill(folder: Path) -> None:
    """Inputs of all commands: a bundle, recordings, texts; and earlier outputs that must not be lost."""
    import soundfile
    import torch

    from asr.cli.main import main as asr
    from asr.testing.tones import PRONUNCIATIONS, RATE, TEXT, tiny_bundle, tones

    torch.set_num_threads(1)
    (folder / "audio").mkdir(parents=True)
    bundle = tiny_bundle(folder)
    bundle.save(folder / "tones", half_precision=False)
    bundle.name = "new tones"
    bundle.save(folder / "new-tones", half_precision=False)
    (folder / "tones" / "notes").write_text("not part of the bundle\n")
    assert bundle.rnn_lm is not None
    network: Any = bundle.rnn_lm.network
    state = {f"network.{name}": value for name, value in network.state_dict().items()}
    words = list(network.vocabulary.ordinary)
    checkpoint = {"state_dict": state, "rnn_lm_words": words, "rnn_lm_config": bundle.rnn_lm.arguments}
    torch.save(checkpoint, folder / "rnnlm.ckpt")
    for number, sentence in enumerate(TEXT[:5]):
        waveform = tones(sentence.split(), seed=number).numpy()
        soundfile.write(str(folder / "audio" / f"{number}.wav"), waveform, RATE, subtype="FLOAT")
    (folder / "text").write_text("\n".join(TEXT) + "\n")
    (folder / "lexicon").write_text("".join(f"{word} {' '.join(PRONUNCIATIONS[word][0])}\n" for word in PRONUNCIATIONS))
    (folder / "ref").write_text("a SICK SKIP\nb PAT KIT\n")
    (folder / "hyp").write_text("a SICK SKIP\nb PAT TO\n")
    (folder / "card").write_text("# Tones\n")
    (folder / "words").write_text("PAT\n")
    for earlier in ("details", "rescored", "network.pt", "network.onnx"):
        (folder / earlier).write_text("earlier\n")
    (folder / "table.csv").write_text(
        "id,audio,text\n" + "".join(f"{number},audio/{number}.wav,{text}\n" for number, text in enumerate(TEXT[:3]))
    )
    here = Path.cwd()
    os.chdir(folder)
    try:
        for arguments in (
            "lm ngram --text text --order 2 --arpa 2.arpa",
            "transcribe --bundle tones audio --lattices slf",
            "lm rnn export rnnlm.ckpt rnnlm",
        ):
            if asr(arguments.split()) != 0:
                raise RuntimeError(f"asr {arguments} failed")
    finally:
        os.chdir(here)


if __name__ == "__main__":
    sys.exit(main())
