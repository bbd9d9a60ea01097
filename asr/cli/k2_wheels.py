"""Which build of k2 matches which torch: the exact install line, where one is known.

k2's wheels are linked against one torch and one CUDA version, so that only an exact match imports. PyPI holds the
wheel for torch 1.13.1 on Python 3.10; all others are on k2's own index pages, named
`k2-<version>+cpu.torch<torch>` and `k2-<version>+cuda<cuda>.torch<torch>`.
"""

from __future__ import annotations

CPU_INDEX = "https://k2-fsa.github.io/k2/cpu.html"
CUDA_INDEX = "https://k2-fsa.github.io/k2/cuda.html"

# Of the wheel for Python 3.10 on PyPI, as in constraints/k2.txt.
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
    "2.4.1": ("1.24.4.dev20250715", ("12.4",)),
    "2.4.0": ("1.24.4.dev20250715", ("12.4",)),
}
_CPU_BUILDS: dict[str, str] = {
    "2.9.0": "1.24.4.dev20251029",
    "2.2.1": "1.24.4.dev20240223",
    "2.2.0": "1.24.4.dev20240223",
    "2.0.1": "1.24.3.dev20230719",
}


def install_advice(
    torch_version: str, cuda_version: str | None, python_version: tuple[int, int], machine: str = "x86_64"
) -> list[str]:
    """What to type for a k2 that fits, or why there is none; one line an entry.

    Args:
        torch_version: `torch.__version__`, with or without its `+cu...` ending.
        cuda_version: `torch.version.cuda`, None for a CPU build of torch.
        python_version: (3, 10).
        machine: `platform.machine()`.
    """
    torch_version = torch_version.partition("+")[0]
    if machine != "x86_64":
        return [f"k2's Linux wheels with CUDA are for x86-64, not {machine}; see {CPU_INDEX} for CPU wheels."]
    if torch_version == "1.13.1" and python_version == (3, 10):
        # pip 26 refuses the wheel's file name, older ones take a wheel for any Python unless the hash says which.
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
                f"install a torch {torch_version} for one of those first, then run 'asr doctor' again."
            ]
    if k2_version is not None:
        return [f"pip install k2=={k2_version}+{build}.torch{torch_version} -f {index}"]
    return [
        f"no k2 build for torch {torch_version} ({build}) is known to this program; if {index}",
        f"lists a version that ends in '+{build}.torch{torch_version}', install exactly that one:",
        f"pip install k2==VERSION+{build}.torch{torch_version} -f {index}",
    ]
