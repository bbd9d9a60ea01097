"""GPU code: counted without a GPU (--quick), checked and measured on one (scripts/gpu_check).

Each check runs in its own process with its own time limit, the most valuable ones first, and writes its result as a
line of JSON to FOLDER/results.jsonl when it ends. A check that crashes, hangs or leaves the device unusable does not
hide the others. The sum of the limits is known in advance. Checks that do not fit into the budget are recorded as left
out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asr.errors import AsrError
from scripts.benchmarks.inputs import ROOT, argument_parser

BUDGET_SECONDS = 540.0
_ENDING_SECONDS = 2.0  # for a process that is asked to stop
_SIMULATION_SLOWDOWN, _MOST_SIMULATED = 5.0, 100.0


class Check(NamedTuple):
    """A check by its name in `scripts.benchmarks.gpu_tasks`, with the seconds that it may take."""

    name: str
    limit: float


CHECKS = (
    Check("environment", 10),
    Check("kernels", 66),
    Check("acoustic_model", 14),
    Check("recognition", 38),
    Check("speed_one_pass", 34),
    Check("compile", 50),
    Check("streams", 22),
    Check("ctc", 30),
    Check("workers", 22),
    Check("speed_ngram", 28),
    Check("speed_default", 30),
    Check("queries", 20),
    Check("profile", 20),
    Check("speed_gru_512", 22),
    Check("speed_large_ngram", 16),
    Check("training", 18),
    Check("external", 14),
    Check("placements", 14),
    Check("k2", 8),
    Check("sanitizer", 24),
)
"""Most valuable first: what is right, then the speed of one pass, of streams and of `CTCDecoder`, then the others."""


def planned_seconds(checks: Sequence[Check] = CHECKS) -> float:
    """The maximum time of all checks together."""
    return sum(check.limit + _ENDING_SECONDS for check in checks)


def run_plan(
    command: Sequence[str], budget: float, out: Path, checks: Sequence[Check] = CHECKS
) -> list[dict[str, Any]]:
    """Runs the checks one after the other -> their results, which are in `out`/results.jsonl as well.

    Args:
        command: the name of a check is appended to it; it prints a JSON object as its last line.
        budget: seconds for all of them.
        out: the folder; it also receives the output of each check.
        checks: run in this order; a check whose limit exceeds the rest of the budget is left out.
    """
    out.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + budget, []
    with (out / "results.jsonl").open("a", encoding="utf-8") as lines:
        for check in checks:
            left = end - time.monotonic()
            if left < check.limit + _ENDING_SECONDS:
                result: dict[str, Any] = {"check": check.name, "state": "left out", "seconds": 0.0}
            else:
                result = _run(command, check, out)
            lines.write(json.dumps(result) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
            print(f"{result['state']:<9} {check.name:<18} {result['seconds']:6.1f} s", flush=True)
            results.append(result)
    return results


def _run(command: Sequence[str], check: Check, out: Path) -> dict[str, Any]:
    """The result of one check; the output of its processes is in a file."""
    begin, path = time.monotonic(), out / f"{check.name}.log"
    with path.open("w", encoding="utf-8") as log:
        # A group of its own, so that nothing which it has started stays behind.
        process = subprocess.Popen([*command, check.name], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(check.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    result: dict[str, Any] = {"check": check.name, "seconds": round(time.monotonic() - begin, 1)}
    lines = path.read_text("utf-8", errors="replace").splitlines() or [""]
    last = _object(lines[-1])
    if code == 0 and last is not None:
        return {**result, "state": "wrong" if last.get("wrong") else "ok", **last}
    # What it had measured until then.
    so_far = next(filter(None, map(_object, reversed(lines))), {})
    if code is None:
        return {**result, "state": "unfinished", "limit": check.limit, **so_far}
    return {**result, "state": "crashed", "code": code, "last_line": lines[-1][-300:], **so_far}


def _object(line: str) -> dict[str, Any] | None:
    """The JSON object in a line; None if the line is not one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process group and waits for the process, but no longer than planned."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_ENDING_SECONDS)
    except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
        pass  # one that the driver holds cannot be ended; the others must run all the same


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The number of checks with each outcome."""
    states = [result["state"] for result in results]
    return {
        state.replace(" ", "_"): states.count(state) for state in ("ok", "wrong", "crashed", "unfinished", "left out")
    }


def run_checks(budget: float, out: Path, is_simulated: bool) -> int:
    """Runs the plan with this Python -> the exit code; see `run_plan`."""
    checks, options = CHECKS, list[str]()
    if is_simulated:
        checks = tuple(Check(name, min(_SIMULATION_SLOWDOWN * limit, _MOST_SIMULATED)) for name, limit in CHECKS)
        options = ["--simulate"]
    print(f"{len(checks)} checks, at most {planned_seconds(checks):.0f} s; the budget is {budget:.0f} s", flush=True)
    command = [sys.executable, "-m", "scripts.benchmarks.gpu_tasks", *options]
    counts = summary(run_plan(command, budget, out, checks))
    print(json.dumps(counts))
    return 1 if counts["wrong"] or counts["crashed"] or counts["unfinished"] else 0


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("gpu", __doc__)
    parser.add_argument("--quick", action="store_true", help="only counts that need no GPU")
    parser.add_argument("--out", type=Path, help="folder for the results of the checks")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_SECONDS, help="seconds for all checks (default: %(default)g)"
    )
    parser.add_argument("--simulate", action="store_true", help="run the checks on a simulated device, as a test")
    args = parser.parse_args(argv)
    if args.quick:
        return _quick()
    if args.out is None:
        raise AsrError("the checks need a folder for their results; give it with --out.")
    return run_checks(args.budget_s, args.out, args.simulate)


def _quick() -> int:
    """Counts on a simulated device, in a process in which Triton interprets kernels from its first import on."""
    python = Path(sys.executable)
    if torch.__version__ < "2" or importlib.util.find_spec("triton") is None:
        python = ROOT / ".venv-b" / "bin" / "python"
        if not python.is_file():
            raise AsrError(
                "counting needs torch 2 and triton; install them with scripts/setup --stack b --tests, or name a "
                "Python that has them in ASR_PYTHON."
            )
    command = [str(python), "-c", "from scripts.benchmarks.gpu_counts import main; main()"]
    return subprocess.run(command, check=False, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode
