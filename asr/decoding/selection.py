"""Chooses the backend of a search: plain torch, numba loops, or Triton kernels and CUDA graphs.

| backend | needs | single frames | whole chunks |
| --- | --- | --- | --- |
| `torch` | nothing | `TorchFrameBackend`, the reference | frame by frame |
| `numba` | a CPU, numba | `NumbaFrameBackend` | `NumbaChunkSearch`, `NumbaChunkSearchWithLM`, `NumbaLatticeSearch` |
| `triton` | a GPU, Triton | `TritonFrameBackend` | `CudaGraphSearch`, `TritonChunkSearchWithLM` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from asr.decoding.backend import Backend, Searchable
from asr.decoding.cpu.chunk import NumbaChunkSearch
from asr.decoding.cpu.chunk_lm import NumbaChunkSearchWithLM
from asr.decoding.cpu.frame import NumbaFrameBackend
from asr.decoding.cpu.lattice_search import NumbaLatticeSearch
from asr.decoding.frame import SplitFrameBackend, TorchFrameBackend
from asr.decoding.interface import DecodingOptions
from asr.decoding.lattice import lattice_margin
from asr.errors import AsrError
from asr.kernels.jit import has_package, triton_available
from asr.lm.interface import LanguageModel

BACKENDS = ("auto", "torch", "numba", "triton")
"""The names that `select_backend` accepts. `auto` is the fastest backend that runs on the device."""

BackendFactory = Callable[[Searchable, DecodingOptions, "LanguageModel | None", bool], Backend]
"""Makes the backend of one search: graph, options, language model, and whether a lattice is kept."""


def backend_name(name: str, device: torch.device) -> str:
    """The backend for a device: `name` itself, or for `auto` the fastest that runs there.

    Raises:
        AsrError: there is no such backend, or it does not run on this device.
    """
    if name not in BACKENDS:
        raise AsrError(f"There is no search backend {name!r}; choose one of {', '.join(BACKENDS)}.")
    runs = {
        "torch": True,
        "numba": device.type == "cpu" and has_package("numba"),
        "triton": triton_available(device),
    }
    if name == "auto":
        return "triton" if device.type == "cuda" and runs["triton"] else "numba" if runs["numba"] else "torch"
    if not runs[name]:
        needs = "numba and a CPU" if name == "numba" else "triton and a GPU"
        raise AsrError(f"The search backend {name!r} needs {needs}; choose auto or torch.")
    return name


def select_backend(
    graph: Searchable,
    options: DecodingOptions,
    lm: LanguageModel | None,
    keep_lattice: bool = False,
    name: str = "auto",
) -> Backend:
    """The backend for one search.

    Args:
        graph: a prepared graph or lattice, on the device of the search.
        options: beams and scales.
        lm: language model inside the search, or None.
        keep_lattice: whether the search keeps a lattice.
        name: one of `BACKENDS`.

    Raises:
        AsrError: as for `backend_name`.
    """
    name = backend_name(name, graph.final_score.device)
    if name == "torch":
        return Backend(TorchFrameBackend(graph, options, lm is not None))
    found = _numba_backend(graph, options, lm) if name == "numba" else _triton_backend(graph, options, lm, keep_lattice)
    if lm is not None and options.max_contexts_per_state is not None:
        # Only the torch backend can limit the contexts per state.
        frame = SplitFrameBackend(found.frame, TorchFrameBackend(graph, options, has_lm=True))
        return replace(found, frame=frame)
    return found


def _numba_backend(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None) -> Backend:
    frame = NumbaFrameBackend(graph, options, lm is not None)
    if graph.epsilon is not None:
        return Backend(frame)
    if lm is None:
        return Backend(frame, NumbaChunkSearch(graph, options))
    if options.max_contexts_per_state is not None:
        return Backend(frame)
    tables = lm.lookup_tables()
    if tables is None:
        return Backend(frame, NumbaChunkSearchWithLM(graph, options, lm))
    if graph.is_pushed and tables.always_answers:
        return Backend(frame, NumbaLatticeSearch(graph, options, lm))
    # In a decoding graph, most queried histories are pruned at once. If the model must expand them first, it is cheaper
    # to query it for all streams together.
    looks_up = graph.is_pushed or tables.always_answers
    return Backend(frame, NumbaChunkSearchWithLM(graph, options, lm, looks_up))


def _triton_backend(
    graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, keep_lattice: bool
) -> Backend:
    from asr.decoding.gpu.chunk_lm import TritonChunkSearchWithLM
    from asr.decoding.gpu.cuda_graph import CudaGraphSearch
    from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend

    device = graph.final_score.device
    limits = FrameLimits(options, lm is not None, device)
    frame = TritonFrameBackend(graph, limits)
    if graph.epsilon is not None:
        return Backend(frame)
    if lm is None:
        margin = lattice_margin(options) if keep_lattice else None
        return Backend(frame, CudaGraphSearch(graph, limits, capture=device.type == "cuda", margin=margin))
    if options.max_contexts_per_state is not None:
        return Backend(frame)
    return Backend(frame, TritonChunkSearchWithLM(graph, options, lm, frame))
