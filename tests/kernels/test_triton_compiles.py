"""Every Triton kernel compiles to the machine code of a GPU (Hopper), which needs no GPU.

The interpreter that the other tests run kernels in takes more than the compiler does.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

GPU, LOSING = "asr.decoding.gpu.kernels", "asr.decoding.gpu.losing_arcs"
_COUNT_LOSING = "*fp32 *fp32 *i32 *i32 *fp32 *i32 fp32 fp32 *i64 i32 *i64"
# Module, kernel, types of its arguments in order, and what is known when it is compiled.
KERNELS = [
    (GPU, "count_arcs", "*i32 *i64 *i64 *i64 i32", {"B": 256}),
    (GPU, "count_arcs", "*i64 *i64 *i64 *i64 i32", {"B": 256}),
    (
        GPU,
        "expand_arcs",
        "*i32 *i32 *fp32 *i64 i32 *i64 *i32 *fp32 *fp32 *i64 *i64 i32 *i32 *i32 *i32 *fp32 *i32 i32",
        {"NUM_STEPS": 13, "B": 256},
    ),
    (
        GPU,
        "expand_arcs",
        "*i64 *i64 *fp32 *i64 i32 *i64 *i32 *fp32 *fp32 *i64 *i64 i32 *i32 *i32 *i32 *fp32 *i32 i32",
        {"NUM_STEPS": 13, "B": 256},
    ),
    (
        GPU,
        "normalize_scores",
        "*i32 *i32 *fp32 *i64 i32 i32 *i32 *i32 *i32 *i32 *i32 fp32 fp32",
        {"B": 256},
    ),
    (GPU, "shift_offsets", "*i32 *fp64 *i32 *fp32 *i64 i32 i32", {"B": 256}),
    (GPU, "pruning_threshold", "*fp32 *i32 *i32 *i32 *fp32 fp32 i32 i32", {"B": 512}),
    (
        GPU,
        "insert",
        "*i32 *i32 *i32 *fp32 *i64 i32 *i32 *i64 *i32 i32",
        {"HAS_CONTEXT": False, "B": 256},
    ),
    (
        GPU,
        "insert",
        "*i64 *i64 *i64 *fp32 *i64 i32 *i32 *i64 *i32 i32",
        {"HAS_CONTEXT": True, "B": 256},
    ),
    (GPU, "resolve", "*i32 *fp32 *i64 i32 *i64 *i32 *i32 *fp32 *i32 *i32 *i32 fp32", {"B": 256}),
    (GPU, "resolve", "*i64 *fp32 *i64 i32 *i64 *i32 *i32 *fp32 *i32 *i32 *i32 fp32", {"B": 256}),
    (GPU, "clear", "*i64 i32 *i32 *i64 *i32", {"B": 256}),
    (
        GPU,
        "count_stays",
        "*fp32 *i32 *fp32 *i64 i32 *i64 *i64 *i64 *i64 *i32 *i32",
        {"HAS_ENDS": True, "HAS_WORDS": False, "B": 256},
    ),
    (
        GPU,
        "count_stays",
        "*fp32 *i32 *fp32 *i64 i32 *i64 *i64 *i64 *i64 *i32 *i32",
        {"HAS_ENDS": False, "HAS_WORDS": True, "B": 256},
    ),
    (
        GPU,
        "gather_candidates",
        "*i32 *i32 *i32 *fp32 *fp32 *i64 i32 *i64 *i64 *i32 *i64 *i32 *i32 *i32 *i32 *fp32 *i64 *i32 *i64",
        {"HAS_WORDS": True, "B": 256},
    ),
    *(
        (
            GPU,
            "compact_tokens",
            "*i32 *i32 *fp32 *i64 *i32 *fp32 *i64 i32 *i64 *i64 *i64 *i64 *i32 *i32 *fp32 *i64 i32 i32 *i64 *i64 i32 "
            "*i32 *i64",
            {"KEEPS_LATTICE": keeps_lattice, "B": 256},
        )
        for keeps_lattice in (False, True)
    ),
    (GPU, "end_frame", "*i64 *i64 *i64 i32 *i64 i32 i32 i32 i32", {}),
    (LOSING, "find_worst", "*fp32 *i32 *fp32 *i64 i32 *i32", {"B": 256}),
    (LOSING, "count_losing", _COUNT_LOSING, {"B": 256}),
    (LOSING, "write_losing", f"{_COUNT_LOSING} *i64 *i64 *i32 *i64 *i64 *i64 *i64 *i64 *fp32 i32", {"B": 256}),
    (LOSING, "end_losing", "*i64 *i64 i32 i32", {}),
    ("asr.kernels.hash_table_triton", "_find", "*i64 i32 *i64 i32 i64 i32 i32 *i64", {"L": 256}),
    *(
        (
            "asr.kernels.hash_table_triton",
            "_insert",
            "*i64 i32 *i64 i32 i64 i32 i32 *i64 *i64",
            {"SOME_KNOWN": some_known, "L": 256},
        )
        for some_known in (False, True)
    ),
    ("asr.decoding.gpu.traceback", "trace_back", "*i64 i32 *i64 *i64 i32 *i64", {"B": 128}),
    (
        "asr.lm.ngram.lookup_triton",
        "_score_words",
        "*i64 *i64 i32 *i64 i32 i64 i64 i32 i32 *i32 *i32 *i32 *fp32 *fp32 *fp32 *i32 *fp32 *i64",
        {"HAS_INDEX": True, "IS_QUANTIZED": False, "L": 128},
    ),
    (
        "asr.lm.ngram.lookup_triton",
        "_score_words",
        "*i64 *i64 i32 *i32 i32 i32 i32 i32 i32 *i32 *i32 *i32 *fp32 *u8 *fp32 *i32 *fp32 *i64",
        {"HAS_INDEX": False, "IS_QUANTIZED": True, "L": 128},
    ),
]


def test_every_kernel_compiles() -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    # In a process of its own: this one is the interpreter's.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [name for _, name, _, _ in KERNELS]


def main() -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    for module, name, types, constants in KERNELS:
        kernel = getattr(importlib.import_module(module), name)
        free = [argument for argument in kernel.arg_names if argument not in constants]
        signature = dict(zip(free, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
        compiled = triton.compile(
            triton.compiler.ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32)
        )
        assert len(compiled.asm["cubin"]) > 0
        print(name)


if __name__ == "__main__":
    main()
