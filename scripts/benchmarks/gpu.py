"""GPU code: counted without a GPU (--quick), checked and measured on one (scripts/gpu_check, see `gpu_plan`)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from asr.errors import AsrError
from scripts.benchmarks.gpu_plan import BUDGET_SECONDS, run_checks
from scripts.benchmarks.inputs import ROOT, argument_parser


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
