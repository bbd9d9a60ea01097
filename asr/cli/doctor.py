"""`asr doctor`: the stack that is installed, what works on it, and what to install for the rest."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass

from asr.cli.k2_wheels import install_advice

NAME = "doctor"
HELP = """Shows the installed stack, what works on it, and what to install for the rest.

Each line says 'ok', 'no' (an optional part is not there) or 'bad' (a needed part does not work); the
command ends with 0 unless something needed is bad."""

_REQUIRED = ("numpy", "soundfile", "safetensors", "kaldialign", "yaml", "rich")
_OPTIONAL = {
    "numba": "compiled loops on CPUs: search, look-up, training",
    "lhotse": "corpora and training data",
    "pytorch_lightning": "training",
    "jsonargparse": "training from YAML",
    "tensorboard": "training curves",
    "kaldifst": "compiling decoding graphs",
}
_DISTRIBUTIONS = {"yaml": "PyYAML", "pytorch_lightning": "pytorch-lightning"}


@dataclass
class Finding:
    """One line of the report: `state` is 'ok', 'no' or 'bad'."""

    part: str
    state: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")


def run(args: argparse.Namespace) -> int:
    findings = examine()
    for finding in findings:
        print(json.dumps(asdict(finding)) if args.json else f"{finding.state:<4}{finding.part:<20}{finding.text}")
    return 1 if any(finding.state == "bad" for finding in findings) else 0


def examine() -> list[Finding]:
    """Tries every part."""
    findings = [_python(), _torch()]
    if findings[-1].state == "bad":
        return findings
    findings += [_stack(), _cpu(), *_gpus(), _k2(), _first_pass(), _torchaudio(), _triton()]
    findings += [_package(name, "needed", "bad") for name in _REQUIRED]
    findings.append(_mp3())
    findings += [_package(name, purpose, "no") for name, purpose in _OPTIONAL.items()]
    return findings


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "bad", f"does not import: {error}")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return Finding("torch", "ok", f"{torch.__version__} ({build})")


def _stack() -> Finding:
    import torch

    torch_version = torch.__version__.partition("+")[0]
    if sys.version_info[:2] == (3, 10) and torch_version == "1.13.1":
        return Finding("stack", "ok", "A (Python 3.10, torch 1.13.1, k2)")
    if sys.version_info >= (3, 11) and int(torch_version.split(".")[0]) >= 2:
        return Finding("stack", "ok", "B (Python 3.11 or newer, torch 2; k2 is optional)")
    return Finding("stack", "no", "neither A nor B: this pair of Python and torch is not tested")


def _cpu() -> Finding:
    import torch

    # torch 1.13 has no torch.backends.cpu.
    name = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else platform.machine()
    return Finding("CPU", "ok", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {name}")


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        reason = "torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA device"
        return [Finding("GPU", "no", f"{reason}; decoding runs on the CPU")]
    findings = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        text = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        supported = torch.cuda.get_arch_list()
        # Code for a smaller minor version of the same generation runs, too.
        if any(
            arch.startswith(f"sm_{major}") and int(arch[3:].rstrip("af")) <= major * 10 + minor for arch in supported
        ):
            findings.append(Finding(f"GPU {index}", "ok", text))
        else:
            findings.append(Finding(f"GPU {index}", "bad", f"{text}: this torch has no code for it; take stack B"))
    return findings


def _k2() -> Finding:
    import torch

    try:
        k2 = importlib.import_module("k2")
        version = importlib.metadata.version("k2")
        with_cuda = bool(getattr(k2, "with_cuda", False))
    except ModuleNotFoundError as error:
        # Without its compiled part it is a wheel for another Python.
        reason = "not installed" if error.name == "k2" else f"installed, but does not import ({error})"
    except (ImportError, OSError, AttributeError) as error:
        reason = f"installed, but does not import ({str(error).splitlines()[0]})"
    else:
        return Finding("k2", "ok", f"{version} ({'with' if with_cuda else 'without'} CUDA)")
    advice = install_advice(torch.__version__, torch.version.cuda, sys.version_info[:2], platform.machine())
    return Finding(
        "k2", "no", "\n".join([f"{reason}; the first pass is torch's. For k2:", *(" " * 24 + a for a in advice)])
    )


def _first_pass() -> Finding:
    import torch

    from asr.first_pass_choice import default_first_pass

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Finding("first pass", "ok", f"{default_first_pass(device)} (by default on {device})")


def _torchaudio() -> Finding:
    try:
        torchaudio = importlib.import_module("torchaudio")
    except ModuleNotFoundError:
        return Finding("torchaudio", "no", "not installed; only optional augmentation and comparisons need it")
    except (ImportError, OSError) as error:
        return Finding(
            "torchaudio", "no", f"does not fit this torch ({str(error).splitlines()[0]}); nothing here needs it"
        )
    return Finding("torchaudio", "ok", torchaudio.__version__)


def _triton() -> Finding:
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return Finding("triton", "no", "not installed; GPU kernels fall back to plain torch")
    return Finding("triton", "ok", triton.__version__)


def _package(name: str, purpose: str, state_if_missing: str) -> Finding:
    try:
        importlib.import_module(name)
        version = importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
    except (ImportError, OSError) as error:
        return Finding(name, state_if_missing, f"does not import ({error}); {purpose}: run scripts/setup")
    return Finding(name, "ok", f"{version} ({purpose})")


def _mp3() -> Finding:
    """Writes and reads a tenth of a second of MP3: libsndfile can since 1.1."""
    try:
        import numpy as np
        import soundfile

        buffer = io.BytesIO()
        soundfile.write(buffer, np.zeros(1600, dtype=np.float32), 16000, format="MP3")
        buffer.seek(0)
        soundfile.read(buffer)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return Finding("MP3", "no", f"libsndfile cannot read MP3 ({error}); WAV and FLAC work")
    return Finding("MP3", "ok", f"libsndfile {soundfile.__libsndfile_version__} reads WAV, FLAC, OGG and MP3")
