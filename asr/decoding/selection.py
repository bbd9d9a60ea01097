"""Chooses the backend of a search: plain torch, numba loops, or Triton kernels and CUDA graphs.

| backend | needs | single frames | whole chunks |
| --- | --- | --- | --- |
| `torch` | nothing | `TorchFrameBackend`, the reference | frame by frame |
| `numba` | a CPU, numba | `NumbaFrameBackend` | `NumbaChunkSearch`, `NumbaChunkSearchWithLM`, `NumbaLatticeSearch` |
| `triton` | a GPU, Triton | `TritonFrameBackend` | `CudaGraphSearch`, `TritonChunkSearchWithLM` |
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asr.decoding.backend import FrameBackend, Searchable, SearchGraph
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.cpu.chunk import NumbaChunkSearch
from asr.decoding.cpu.chunk_lm import NumbaChunkSearchWithLM
from asr.decoding.cpu.frame import NumbaFrameBackend
from asr.decoding.cpu.lattice_search import NumbaLatticeSearch
from asr.decoding.frame import FrameSearch, SplitFrameBackend, TorchFrameBackend
from asr.decoding.lattice_records import lattice_margin
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.kernels.jit import has_loops, triton_available
from asr.lm.interface import LanguageModel

BACKENDS = ("auto", "torch", "numba", "triton")
"""The names that `select_backend` accepts. `auto` is the fastest backend that runs on the device."""

BackendFactory = Callable[[Searchable, DecodingOptions, "LanguageModel | None", bool], ChunkBackend]
"""Makes the backend of one search: graph, options, language model, and whether a lattice is kept."""


def backend_name(name: str, device: torch.device) -> str:
    """The backend for a device: `name` itself, or for `auto` the fastest that runs there.

    Raises:
        AsrError: there is no such backend, or it does not run on this device.
    """
    if name not in BACKENDS:
        raise AsrError(f"There is no search backend {name!r}; choose one of {', '.join(BACKENDS)}.")
    if name == "torch":
        return name
    runs = {"numba": has_loops(device), "triton": triton_available(device)}
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
) -> ChunkBackend:
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
    by_chunks: ChunkBackend | None = None
    # Only single frames can follow epsilons or limit the contexts of a state.
    if graph.epsilon is None and (lm is None or options.max_contexts_per_state is None):
        if name == "numba":
            by_chunks = _numba_search(graph, options, lm)
        elif name == "triton":
            by_chunks = _triton_search(graph, options, lm, keep_lattice)
    return by_chunks or FrameSearch(graph, options, lm, frame_backend(graph, options, lm is not None, name))


def frame_backend(graph: Searchable, options: DecodingOptions, has_lm: bool, name: str = "auto") -> FrameBackend:
    """The backend for single frames of a search.

    Args:
        graph, options, name: as for `select_backend`.
        has_lm: whether a language model takes part.
    """
    name = backend_name(name, graph.final_score.device)
    if name == "torch":
        return TorchFrameBackend(graph, options, has_lm)
    if name == "numba":
        found: FrameBackend = NumbaFrameBackend(graph, options, has_lm)
    else:
        from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend

        found = TritonFrameBackend(graph, FrameLimits(options, has_lm, graph.final_score.device))
    if has_lm and options.max_contexts_per_state is not None:
        # Only the torch backend can limit the contexts per state.
        return SplitFrameBackend(found, TorchFrameBackend(graph, options, has_lm))
    return found


def _numba_search(graph: Searchable, options: DecodingOptions, lm: LanguageModel | None) -> ChunkBackend:
    if lm is None:
        return NumbaChunkSearch(graph, options)
    tables = lm.lookup_tables()
    if tables is not None and graph.is_pushed and tables.always_answers:
        return NumbaLatticeSearch(graph, options, lm)
    return NumbaChunkSearchWithLM(graph, options, lm)


def _triton_search(
    graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, keep_lattice: bool
) -> ChunkBackend:
    from asr.decoding.gpu.chunk_lm import TritonChunkSearchWithLM
    from asr.decoding.gpu.cuda_graph import CudaGraphSearch, LmInside
    from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend

    limits = FrameLimits(options, lm is not None, graph.final_score.device)
    margin = lattice_margin(options) if keep_lattice else None
    if lm is None:
        return CudaGraphSearch(graph, limits, margin=margin)
    frame_by_frame = TritonChunkSearchWithLM(graph, options, lm, TritonFrameBackend(graph, limits))
    if not isinstance(graph, SearchGraph):
        return frame_by_frame  # a lattice is searched once, which is not worth a capture
    inside = LmInside(lm, options.lm_scale, frame_by_frame)
    return CudaGraphSearch(graph, limits, margin=margin, inside=inside)
