"""In which form a frame of the token search runs: loops for CPUs, kernels for GPUs, or plain tensor operations."""

from __future__ import annotations

import torch

from asr.decoding.backend import ChunkBackend, FrameBackend
from asr.decoding.cpu.chunk import NumbaChunkSearch
from asr.decoding.cpu.chunk_lm import NumbaChunkSearchWithLM, NumbaWordSearch
from asr.decoding.cpu.frame import NumbaFrameBackend
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import Searchable
from asr.errors import AsrError
from asr.kernels.jit import has_package, triton_available
from asr.lm.interface import LanguageModel

FORMS = ("auto", "tensor", "loops", "kernels", "steps", "graphs")
"""What may be asked for, see `TokenPassingDecoder`."""


def chosen_form(form: str, device: torch.device) -> str:
    """The form for a device: `auto` is the fastest that runs there.

    Raises:
        AsrError: there is no such form, or it does not run here.
    """
    if form not in FORMS:
        raise AsrError(f"there is no form {form!r} of the torch pass; it is one of {', '.join(FORMS)}.")
    loops = device.type == "cpu" and has_package("numba")
    kernels = triton_available(device)
    if form == "auto":
        return "graphs" if device.type == "cuda" and kernels else "loops" if loops else "tensor"
    runs = {"loops": loops, "kernels": kernels, "steps": kernels, "graphs": kernels and device.type == "cuda"}
    if not runs.get(form, True):
        needs = "numba and a CPU" if form == "loops" else "triton and a GPU"
        raise AsrError(f"the torch pass in the form {form!r} needs {needs}; ask for auto or tensor.")
    return form


def frame_halves(form: str, graph: Searchable, options: DecodingOptions, has_lm: bool) -> FrameBackend | None:
    """What runs a frame in this form; None for tensor operations.

    Args:
        form: as of `chosen_form`.
        graph: on the device where the search runs.
        options: beams.
        has_lm: whether a language model takes part.
    """
    device = graph.final_score.device
    form = chosen_form(form, device)
    if form == "tensor":
        return None
    if form == "loops":
        return NumbaFrameBackend(graph, options, has_lm)
    from asr.decoding.gpu.frame import FrameLimits, TritonFrameBackend

    return TritonFrameBackend(graph, FrameLimits(options, has_lm, device))


def lm_chunk_reader(
    form: str, graph: Searchable, options: DecodingOptions, lm: LanguageModel, keeps_lattice: bool
) -> ChunkBackend | None:
    """What reads whole chunks with a language model; None where frames are read one by one, as for `chunk_reader`."""
    limited = options.max_contexts_per_state is not None
    is_on_cpu = graph.final_score.device.type == "cpu"
    if not is_on_cpu or keeps_lattice or limited or graph.epsilon is not None:
        return None
    if chosen_form(form, graph.final_score.device) != "loops":
        return None
    by_calls = NumbaChunkSearchWithLM(graph, options, lm)
    tables = lm.lookup_tables()
    # Over a decoding graph most of what is asked dies at once; to ask for all streams together costs less there.
    if tables is not None and (graph.is_pushed or tables.always_answers):
        return NumbaWordSearch(graph, options, lm, by_calls)
    return by_calls


def chunk_reader(form: str, graph: Searchable, options: DecodingOptions, keeps_lattice: bool) -> ChunkBackend | None:
    """What reads whole chunks where no language model takes part.

    None where frames are read one by one: by kernels, where a lattice is kept. Other arguments as of `frame_halves`.
    """
    device = graph.final_score.device
    form = chosen_form(form, device)
    forms = ("loops",) if keeps_lattice else ("loops", "steps", "graphs")
    if graph.epsilon is not None or form not in forms:
        return None
    if form == "loops":
        return NumbaChunkSearch(graph, options)
    from asr.decoding.gpu.cuda_graph import CudaGraphSearch
    from asr.decoding.gpu.frame import FrameLimits

    return CudaGraphSearch(graph, FrameLimits(options, False, device), captures=form == "graphs")
