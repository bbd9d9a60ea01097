"""Compiles every kernel to a GPU's machine code, as it would be launched, on a machine without a GPU.

The interpreter in which kernels are tested accepts code that the compiler does not. Here a launch ends when the kernel
is compiled, in the same way as for a GPU, with all that Triton tells the compiler about the arguments, such as which
pointers are aligned and which numbers are 1 or multiples of 16. Host tensors are accepted, too, so that the code that
launches kernels on a GPU can be called with these.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch

from asr.decoding.backend import ActiveTokens, Candidates, Frame, SearchGraph
from asr.decoding.gpu import cut_off, kernels, losing_arcs, spread, traceback, word_scores
from asr.decoding.gpu.cuda_graph import BufferSizes, FrameBuffers, LmInside
from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend
from asr.decoding.rescoring import LatticeGraph
from asr.decoding.settings import DecodingOptions
from asr.decoding.token_passing import TokenPassingDecoder
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels import hash_table_triton
from asr.lm.cached import engine_triton
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.ngram import lookup_triton
from asr.lm.ngram.model import NgramLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.lm.rnn.outputs import softmax_loss_triton

MODULES: tuple[ModuleType, ...] = (
    *(kernels, cut_off, losing_arcs, spread, traceback, word_scores, hash_table_triton, lookup_triton),
    *(engine_triton, softmax_loss_triton),
)
"""All modules with kernels."""

_CPU = torch.device("cpu")


class Compiled(NamedTuple):
    """What the compiler reports about a kernel.

    Attributes:
        seconds: compilation time.
        registers: registers per thread.
        spilled_bytes: bytes per thread spilled to the GPU's local memory.
        shared_bytes: bytes of shared memory per program.
        num_fences: memory fences, which none of the kernels needs.
        num_joined: products that are added without being rounded, which torch's operations do not do.
    """

    seconds: float
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_fences: int
    num_joined: int


class _NoDriver:
    """Replaces Triton's driver, in a process without a GPU."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiled_instead(capability: int) -> Iterator[dict[str, list[Compiled]]]:
    """Within the block, launches compile kernels but do not run them; TRITON_INTERPRET must not be set.

    Args:
        capability: compute capability of the GPU, such as 90.

    Returns:
        The compiler's reports by kernel, one for each combination of argument types.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_NoDriver(capability))
    found: dict[str, list[Compiled]] = {}
    run, known = JITFunction.run, set[int]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        binary = run(self, *args, grid=grid, warmup=True, **kwargs)
        seconds = time.perf_counter() - begin
        if id(binary) not in known:
            known.add(id(binary))
            found.setdefault(self.fn.__name__, []).append(Compiled(seconds, *_assembled(binary, capability)))
        return binary

    with mock.patch.object(JITFunction, "run", compile_only):
        yield found


def _assembled(binary: Any, capability: int) -> tuple[int, int, int, int, int]:
    """The fields of `Compiled` after the seconds. The assembler reports registers, since the kernel is not loaded."""
    import triton

    # Newer wheels include an assembler for each generation of GPUs, and older ones reject code for newer GPUs.
    assemblers = sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))
    text, report = binary.asm["ptx"], ""
    target = re.search(r"\.target (\w+)", text)
    name = target[1] if target else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(text)
        for assembler in assemblers:
            command = [str(assembler), "-v", f"--gpu-name={name}", str(path), "-o", f"{path}.o"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            report = done.stderr if done.returncode == 0 else report
    registers, spilled = (re.search(pattern, report) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill"))
    if registers is None or spilled is None:
        raise OSError(f"none of {[one.name for one in assemblers]} reports on kernels for {name}")
    num_fences = len(re.findall(r"\bfence\.|\bmembar\.|\.acq_rel\b", text))
    num_joined = len(re.findall(r"\bfma\.rn\.", text))
    return int(registers[1]), int(spilled[1]), int(binary.metadata.shared), num_fences, num_joined


def launched_kernels() -> set[str]:
    """The names of all kernels that host code launches; the others are only called by kernels."""
    sources = [Path(str(module.__file__)).parent.glob("*.py") for module in MODULES]
    text = "\n".join(path.read_text("utf-8") for path in sorted({path for paths in sources for path in paths}))
    names = {name for module in MODULES for name, value in vars(module).items() if hasattr(value, "arg_names")}
    return {name for name in names if re.search(rf"\b{name}\[", text)}


def launch_all(graph: DecodingGraph, ngram: NgramLM) -> None:
    """Launches every kernel with arguments of the same types as in the search; their values are arbitrary."""
    # Users also give beams as whole numbers.
    options = DecodingOptions(search_beam=8, output_beam=4, min_active_states=2, max_active_states=30)
    searched = SearchGraph(graph, options)
    sizes = BufferSizes(1, 4, len(graph.tokens), 512, 512, 1024, 4096, 4096)
    for margin in (None, 4.1):
        for num_streams in (1, 3, 16):
            own = replace(sizes, streams=num_streams)
            FrameBuffers(searched.emitting, FrameLimits(options, False, _CPU), own, False, margin).read()
    # Larger buffers need no other code.
    larger = replace(sizes, paths=2048, ended=2048, arcs=4096)
    FrameBuffers(searched.emitting, FrameLimits(options, False, _CPU), larger, False).read()
    _launch_frames_with_lm(graph, options, sizes)
    # Frame by frame with a language model: over the graph, and over a lattice, whose states are int64.
    log_prob = torch.zeros(1, 3, len(graph.tokens)).log_softmax(2)
    found = TokenPassingDecoder(graph, options, backend="torch").search(log_prob, torch.tensor([3]), keep_lattice=True)
    assert found.lattice is not None
    for searchable in (searched, LatticeGraph(found.lattice, options)):
        for num_streams in (1, 16):
            backend = TritonFrameBackend(searchable, FrameLimits(options, True, _CPU), 512)
            begin = torch.zeros(num_streams, dtype=torch.int64)
            frame = Frame(log_prob.flatten(), begin, torch.zeros(num_streams, dtype=torch.float64))
            # More tokens than there is room for, too.
            for num in (num_streams, 601):
                zero = torch.zeros(num, dtype=torch.int64)
                backend.expand(ActiveTokens.initial(zero, zero, zero), frame)
                backend.survivors_counted(Candidates(zero, zero, zero, zero.float(), zero, zero, None, begin == 0))
    _launch_look_ups(ngram)
    _launch_softmax_loss()


def _launch_frames_with_lm(graph: DecodingGraph, options: DecodingOptions, sizes: BufferSizes) -> None:
    arcs = SearchGraph(graph, options).emitting
    network = RNNLanguageModel(graph.vocabulary, RNNLMConfig(embedding_size=8, hidden_size=8, maxent_order=2))
    for capacity_bytes in (None, 1 << 24):
        lm = CachedRNNLM(network, CacheOptions(capacity_bytes=capacity_bytes, compiled=False))
        # As on a GPU, where these are not the CPU's.
        lm.trie.edges._kernels = hash_table_triton
        lm._triton_engine = engine_triton.TritonEngine(lm.expansion, network, lm.capacity)
        for num_words in (16, 17):
            assert lm.reserve(num_words) is not None
            for margin in (None, 4.1):
                own, limits = replace(sizes, words=num_words), FrameLimits(options, True, _CPU)
                FrameBuffers(arcs, limits, own, False, margin, LmInside(lm, 0.7)).read()
            lm.release(0)
    key = torch.arange(16)
    hash_table_triton.store_where(key, key, key, key)


def _launch_look_ups(ngram: NgramLM) -> None:
    table, value = torch.full((16, 8), -1, dtype=torch.int64), torch.zeros(128, dtype=torch.int64)
    for num in (1, 5, 16):
        key = torch.arange(num)
        hash_table_triton.find_places(table, key, 59)
        for some_known in (False, True):
            hash_table_triton._launch_insert(table, value, key, 59, key.clone(), some_known)
        traceback.arcs_of_paths(key - 1, key, key, 1 + num)
        traceback.ancestors(key, key - 1)
        for is_backward in (False, True):
            spread.raised(key.double(), (0 * key, key, 1, num), (key, key, key.double()), is_backward)
        traceback.losses(key.float(), key, 0 * key, key - 1, (key - 1, key, key.float()), (1, num))
        for own in (ngram, ngram.with_index(), ngram.quantized()):
            lookup_triton.score_words(own.arrays, key, key)


def _launch_softmax_loss() -> None:
    for num_words in (999, 1024):
        for num_lengths in (0, 1, 2):
            scores, word_id = torch.zeros(2, 1024)[:, :num_words], torch.zeros(2, dtype=torch.int64)
            places, weight = torch.zeros(2, num_lengths, dtype=torch.int64), torch.zeros(2 * num_words)
            log_z = softmax_loss_triton.add_features(scores, weight[:num_words], weight, places)
            softmax_loss_triton.fill_gradients(scores, log_z, log_z, word_id, places, weight)
