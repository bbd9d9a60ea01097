"""`asr doctor`: what is installed, what works, and what to install for the rest.

Each k2 wheel is linked against one version of torch and CUDA, so that only an exact match can be imported. PyPI has the
wheel for torch 1.13.1 on Python 3.10; all others are on k2's own index pages, named `k2-<version>+cpu.torch<torch>` and
`k2-<version>+cuda<cuda>.torch<torch>`.
"""

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

from asr.errors import AsrError

CPU_INDEX = "https://k2-fsa.github.io/k2/cpu.html"
CUDA_INDEX = "https://k2-fsa.github.io/k2/cuda.html"


# Hash of the wheel for Python 3.10 on PyPI, as in constraints/k2.txt.
_PYPI_HASH = "1404589732fdb7f6f5bf62297a20dd73318b7b4f2e10dd52dc3d5b6669688a4c"


# As listed on the index pages for x86-64 Linux: torch -> (k2 version, CUDA versions).
_CUDA_BUILDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "2.13.0": ("1.24.4.dev20260710", ("12.6", "13.0", "13.2")),
    "2.12.1": ("1.24.4.dev20260625", ("12.6", "13.0", "13.2")),
    "2.12.0": ("1.24.4.dev20260520", ("12.6", "13.0", "13.2")),
    "2.11.0": ("1.24.4.dev20260423", ("12.6", "12.8", "12.9", "13.0")),
    "2.10.0": ("1.24.4.dev20260306", ("12.6", "12.8")),
    "2.9.1": ("1.24.4.dev20251118", ("12.6", "12.8", "12.9")),
    "2.9.0": ("1.24.4.dev20251030", ("12.6",)),
    "2.8.0": ("1.24.4.dev20250807", ("12.6", "12.8", "12.9")),
    "2.7.1": ("1.24.4.dev20260625", ("11.8", "12.6", "12.8")),
    "2.5.1": ("1.24.4.dev20250208", ("12.1",)),
    "2.4.1": ("1.24.4.dev20240905", ("11.8", "12.1", "12.4")),
    "2.4.0": ("1.24.4.dev20240725", ("11.8", "12.1", "12.4")),
}


# Wheels for one torch may have several dates. For these (torch, Python) the date differs; only the index page has it.
_OTHER_DAYS = {("2.12.1", (3, 12)), ("2.12.1", (3, 14))}
_CPU_BUILDS: dict[str, str] = {
    "2.9.0": "1.24.4.dev20251029",
    "2.2.1": "1.24.4.dev20240223",
    "2.2.0": "1.24.4.dev20240223",
    "2.0.1": "1.24.3.dev20230719",
}


def install_advice(
    torch_version: str, cuda_version: str | None, python_version: tuple[int, int], machine: str = "x86_64"
) -> list[str]:
    """How to install a matching k2, or why there is none.

    Args:
        torch_version: `torch.__version__`, with or without its suffix `+cu...`.
        cuda_version: `torch.version.cuda`; None for a CPU build of torch.
        python_version: (3, 10).
        machine: `platform.machine()`.

    Returns:
        lines of text.
    """
    torch_version = torch_version.partition("+")[0]
    if machine != "x86_64":
        return [f"k2's Linux wheels with CUDA are for x86-64, not {machine}; see {CPU_INDEX} for CPU wheels."]
    if torch_version == "1.13.1" and python_version == (3, 10):
        # pip 26 refuses the wheel's file name; older versions take a wheel for another Python unless the hash decides.
        return [
            f"echo 'k2==1.23.4 --hash=sha256:{_PYPI_HASH}' > k2.txt && pip install 'pip<26' && "
            "pip install --no-deps --force-reinstall -r k2.txt"
        ]
    index, build = (CPU_INDEX, "cpu") if cuda_version is None else (CUDA_INDEX, f"cuda{cuda_version}")
    if cuda_version is None:
        k2_version = _CPU_BUILDS.get(torch_version)
    else:
        k2_version, cuda_versions = _CUDA_BUILDS.get(torch_version, (None, ()))
        if k2_version is not None and cuda_version not in cuda_versions:
            return [
                f"k2 is built for torch {torch_version} with CUDA {', '.join(cuda_versions)}, not {cuda_version}: "
                f"first install torch {torch_version} for one of these, then run 'asr doctor' again."
            ]
    own_python = ".".join(map(str, python_version))
    if k2_version is not None and (torch_version, python_version) not in _OTHER_DAYS:
        return [f"pip install k2=={k2_version}+{build}.torch{torch_version} -f {index}"]
    return [
        f"this program knows no k2 build for torch {torch_version} ({build}) on Python {own_python}; if {index}",
        f"lists a version that ends in '+{build}.torch{torch_version}', install exactly that version:",
        f"pip install k2==VERSION+{build}.torch{torch_version} -f {index}",
    ]


HELP = """Shows what is installed, what works, and what to install for the rest.

Each line begins with 'ok', 'no' (an optional part is missing) or 'bad' (a required part does not work). The exit code
is 1 if a line is bad, else 0."""


_REQUIRED = ("numpy", "soundfile", "safetensors", "kaldialign", "yaml", "rich")
_OPTIONAL = {
    "numba": "compiled loops on CPUs: search, lookup, training",
    "av": "m4a, mp4, webm and other formats of FFmpeg",
    "aiohttp": "asr serve",
    "lhotse": "corpora and training data",
    "pytorch_lightning": "training",
    "jsonargparse": "training from YAML",
    "tensorboard": "training curves",
    "kaldifst": "compiling decoding graphs",
}


_DISTRIBUTIONS = {"yaml": "PyYAML", "pytorch_lightning": "pytorch-lightning"}


@dataclass
class Finding:
    """A line of the report; `state` is 'ok', 'no' or 'bad'."""

    part: str
    state: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of the table")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the loops of recognition for this machine first, so that the first recording does not wait",
    )
    parser.add_argument(
        "--bundle",
        nargs="+",
        default=[],
        help="with --compile: folders or names of the bundles to compile for (default: those in checkpoints/)",
    )


def run(args: argparse.Namespace) -> int:
    if args.bundle and not args.compile:
        raise AsrError("--bundle has no effect without --compile; give both, or see 'asr bundle info'.")
    if args.compile:
        from asr.kernels.jit import has_package

        if has_package("numba"):
            from asr.cli.compile import compile_loops
            from asr.cli.options import fetched_bundle_folder

            compile_loops([fetched_bundle_folder(name) for name in args.bundle])
        else:
            print("asr: numba is not installed, so there is nothing to compile.", file=sys.stderr)
    findings = examine()
    for finding in findings:
        print(json.dumps(asdict(finding)) if args.json else f"{finding.state:<4}{finding.part:<20}{finding.text}")
    return 1 if any(finding.state == "bad" for finding in findings) else 0


def examine() -> list[Finding]:
    """Tries all parts."""
    findings = [Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})"), _torch()]
    if findings[-1].state == "bad":
        return findings
    findings += [_stack(), _cpu(), *_gpus(), _k2(), _decoder(), _loops(), _torchaudio(), _triton()]
    findings += [_package(name, "needed", "bad") for name in _REQUIRED]
    findings.append(_mp3())
    findings += [_package(name, purpose, "no") for name, purpose in _OPTIONAL.items()]
    return findings


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "bad", f"cannot be imported: {error}")
    try:
        torch.zeros(1).numpy()
    except RuntimeError:
        return Finding(
            "torch", "bad", f"{torch.__version__} does not support the installed numpy; pip install 'numpy<2'"
        )
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return Finding("torch", "ok", f"{torch.__version__} ({build})")


def _stack() -> Finding:
    import torch

    torch_version = torch.__version__.partition("+")[0]
    if sys.version_info[:2] == (3, 10) and torch_version == "1.13.1":
        return Finding("stack", "ok", "A (Python 3.10, torch 1.13.1, k2)")
    if sys.version_info >= (3, 11) and int(torch_version.split(".")[0]) >= 2:
        return Finding("stack", "ok", "B (Python 3.11 or newer, torch 2; k2 is optional)")
    return Finding("stack", "no", "neither A nor B: this combination of Python and torch is not tested")


def _cpu() -> Finding:
    import torch

    # torch 1.13 has no torch.backends.cpu.
    name = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else platform.machine()
    return Finding("CPU", "ok", f"{os.cpu_count()} cores, of which torch uses {torch.get_num_threads()}, {name}")


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [Finding("GPU", "no", f"{_why_no_gpu()}; decoding runs on the CPU")]
    from asr.options import device_named

    findings = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        text = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        supported = torch.cuda.get_arch_list()
        # Code for a lower minor version of the same generation runs as well.
        if any(
            arch.startswith(f"sm_{major}") and int(arch[3:].rstrip("af")) <= major * 10 + minor for arch in supported
        ):
            try:
                device_named(f"cuda:{index}")
                findings.append(Finding(f"GPU {index}", "ok", text))
            except AsrError as error:
                findings.append(Finding(f"GPU {index}", "bad", f"{text}: {error.__cause__ or error}".splitlines()[0]))
        else:
            findings.append(Finding(f"GPU {index}", "bad", f"{text}: this torch does not support it; use stack B"))
    return findings


def _why_no_gpu() -> str:
    """Why torch finds no GPU, as it says itself when it is to use one: no driver, an old driver, or no device."""
    import torch

    if torch.version.cuda is None:
        return "torch is a CPU build"
    try:
        torch.cuda.init()
    except Exception as error:  # of various types
        return str(error).splitlines()[0].rstrip(".")
    return "torch sees no CUDA device"


def _k2() -> Finding:
    import torch

    try:
        k2 = importlib.import_module("k2")
        version = importlib.metadata.version("k2")
        with_cuda = bool(getattr(k2, "with_cuda", False))
    except ModuleNotFoundError as error:
        # A k2 without its compiled part is a wheel for another Python.
        reason = "not installed" if error.name == "k2" else f"installed, but cannot be imported ({error})"
    except (ImportError, OSError, AttributeError) as error:
        reason = f"installed, but cannot be imported ({str(error).splitlines()[0]})"
    else:
        return Finding("k2", "ok", f"{version} ({'with' if with_cuda else 'without'} CUDA)")
    advice = install_advice(torch.__version__, torch.version.cuda, sys.version_info[:2], platform.machine())
    return Finding(
        "k2", "no", "\n".join([f"{reason}; decoding uses token passing. For k2:", *(" " * 24 + a for a in advice)])
    )


def _decoder() -> Finding:
    import torch

    from asr.decoding.build import default_decoder

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Finding("decoder", "ok", f"{default_decoder(device)} (by default on {device})")


def _loops() -> Finding:
    from asr.cli.compile import compiled_state

    is_compiled, text = compiled_state()
    return Finding("compiled loops", "ok" if is_compiled else "no", text)


def _torchaudio() -> Finding:
    try:
        torchaudio = importlib.import_module("torchaudio")
    except ModuleNotFoundError:
        return Finding("torchaudio", "no", "not installed; only used for optional augmentation and comparisons")
    except (ImportError, OSError) as error:
        return Finding(
            "torchaudio", "no", f"does not match this torch ({str(error).splitlines()[0]}); nothing requires it"
        )
    return Finding("torchaudio", "ok", torchaudio.__version__)


def _triton() -> Finding:
    import torch

    from asr.kernels.jit import OLDEST_TRITON, triton_is_new_enough, triton_problem

    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return Finding("triton", "no", "not installed; GPU kernels fall back to plain torch")
    if not triton_is_new_enough():
        oldest = ".".join(map(str, OLDEST_TRITON))
        return Finding(
            "triton", "no", f"{triton.__version__} is older than {oldest}; searches on a GPU use plain torch"
        )
    problem = triton_problem(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    if problem is not None:
        return Finding(
            "triton",
            "no",
            f"{triton.__version__} does not run on the GPU ({problem}), so that searches use plain torch; it needs a C "
            "compiler, Python's header files (Debian: apt install gcc python3-dev) and a folder that it can write "
            "(TRITON_CACHE_DIR)",
        )
    return Finding("triton", "ok", triton.__version__)


def _package(name: str, purpose: str, state_if_missing: str) -> Finding:
    from asr.cli.main import how_to_install

    try:
        importlib.import_module(name)
        version = importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
    except Exception as error:  # a package may raise anything: lhotse wants a home folder
        return Finding(name, state_if_missing, f"cannot be imported ({error}); {purpose}: {how_to_install(name)}")
    return Finding(name, "ok", f"{version} ({purpose})")


def _mp3() -> Finding:
    """Writes and reads a tenth of a second of MP3, which libsndfile can do since version 1.1."""
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
