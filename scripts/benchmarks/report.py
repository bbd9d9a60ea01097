"""Printing of results: Markdown tables, and the provenance of figures."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.inputs import ROOT


def table(title: str, rows: list[dict[str, Any]], thousands: str = "") -> None:
    """Prints rows with equal keys as a Markdown table; `thousands` separates groups of three digits."""
    print(f"\n### {title}\n\n| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(_cell(value, thousands) for value in row.values())} |", flush=True)


def _cell(value: Any, thousands: str) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:{thousands}}" if isinstance(value, int) else str(value)


def provenance(arguments: Sequence[str]) -> str:
    """One line with command, commit, machine and torch version, to quote with the figures."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    commit = done.stdout.strip() or "no git"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    command = shlex.join(["scripts/bench", *arguments])
    return f"`{command}`, commit {commit}, {_processor()}, {cores} cores, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
