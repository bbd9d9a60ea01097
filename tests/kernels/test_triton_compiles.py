"""Every Triton kernel compiles to the machine code of a GPU, as the search launches it, which needs no GPU.

The interpreter that the other tests run kernels in takes more than the compiler does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# A multiprocessor has 65,536: with more for each of a program's 128 threads, fewer than 8 programs run there at a time.
MOST_REGISTERS = 64
# Kernels are compiled anew for other types of arguments, and a service waits for that in the middle of its work.
MOST_VARIANTS = 95


def test_every_kernel_compiles() -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    # In a process of its own: this one is the interpreter's.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["launched"] == sorted(told["compiled"])
    variants = [one for each in told["compiled"].values() for one in each]
    assert len(variants) <= MOST_VARIANTS
    assert max(registers for _, registers, *_ in variants) <= MOST_REGISTERS
    assert {(spilled, fences) for _, _, spilled, _, fences, _ in variants} == {(0, 0)}
    # Scores are those of torch's operations, bit for bit, except in training.
    joined = {name for name, each in told["compiled"].items() if any(one[-1] for one in each)}
    assert joined <= {"_add_features", "_fill_gradients"}


def main() -> None:
    from asr.lm.corpus import read_word_stream
    from asr.lm.ngram.estimate import estimate_kneser_ney
    from asr.lm.ngram.model import NgramLM
    from asr.testing.kernel_compilation import compiled_instead, launch_all, launched_kernels
    from tests.decoding.random_graphs import random_graph
    from tests.reference.ngram_oracle import toy_sentences

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        path.write_text("\n".join(toy_sentences(0, 200)))
        ngram = NgramLM.from_trie(estimate_kneser_ney(read_word_stream([path]), 3).trie)
    with compiled_instead(90) as found:
        launch_all(random_graph(1, num_states=12, num_arcs=50), ngram)
    print(json.dumps({"compiled": found, "launched": sorted(launched_kernels())}))


if __name__ == "__main__":
    main()
