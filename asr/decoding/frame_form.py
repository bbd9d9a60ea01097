"""In which form a frame of the token search runs: loops for CPUs, kernels for GPUs, or plain tensor operations."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from asr.decoding.options import DecodingOptions
from asr.decoding.search_graph import Searchable
from asr.decoding.tokens import Tokens
from asr.errors import AsrError

if TYPE_CHECKING:
    from asr.decoding.gpu.fixed_search import FixedSearch

FORMS = ("auto", "tensor", "loops", "kernels", "steps")
"""What may be asked for, see `TorchFirstPass`."""


class FrameHalves(Protocol):
    """What stands for the tensor operations of a frame, with the same outcome."""

    def expand(
        self, tokens: Tokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor, everything: bool = False
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Any]:
        """Arguments as of `FrameStep.read`, paths of a stream side by side.

        Returns:
            source, arc, stream, score of the candidates, (A,) each: with a language model those worth asking it about,
            without one perhaps only those near the best, unless `everything` is asked for; and whether they are all
            there are of a stream, (N,) for `keep`.
        """

    def keep(
        self, stream: Tensor, state: Tensor, context_idx: Tensor | None, score: Tensor, is_complete: Any
    ) -> tuple[Tensor, Tensor, bool]:
        """Candidates (A,) -> winner (A,), the positions of those that stay, and whether none that could is missing."""


def chosen_form(form: str, device: torch.device) -> str:
    """The form for a device: `auto` is the fastest that runs there.

    Raises:
        AsrError: there is no such form, or it does not run here.
    """
    if form not in FORMS:
        raise AsrError(f"there is no form {form!r} of the torch pass; it is one of {', '.join(FORMS)}.")
    loops = device.type == "cpu" and _imports("numba")
    kernels = (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and _imports("triton")
    if form == "auto":
        return "steps" if device.type == "cuda" and kernels else "loops" if loops else "tensor"
    if (form == "loops" and not loops) or (form in ("kernels", "steps") and not kernels):
        needs = "numba and a CPU" if form == "loops" else "triton and a GPU"
        raise AsrError(f"the torch pass in the form {form!r} needs {needs}; ask for auto or tensor.")
    return form


def frame_halves(
    form: str, graph: Searchable, options: DecodingOptions, has_lm: bool, keeps_lattice: bool
) -> FrameHalves | None:
    """What runs a frame in this form; None for tensor operations.

    Args:
        form: as of `chosen_form`.
        graph: on the device where the search runs.
        options: beams.
        has_lm: whether a language model takes part.
        keeps_lattice: whether candidates that lose must be seen.
    """
    device = graph.final_score.device
    form = chosen_form(form, device)
    if form == "tensor":
        return None
    if form == "loops":
        from asr.decoding import frame_kernel
        from asr.decoding.compiled_frame import CompiledFrame

        return CompiledFrame(frame_kernel, graph, options, has_lm, keeps_lattice)
    from asr.decoding.gpu.gpu_frame import GpuFrame
    from asr.decoding.gpu.limits import FrameLimits

    return GpuFrame(graph, FrameLimits(options, has_lm, keeps_lattice, device))


def fixed_search(form: str, graph: Searchable, options: DecodingOptions) -> FixedSearch | None:
    """What reads whole chunks without the host where neither language model nor lattice take part.

    None where frames are read one by one. Arguments as of `frame_halves`.
    """
    device = graph.final_score.device
    if chosen_form(form, device) != "steps" or graph.epsilon is not None:
        return None
    from asr.decoding.gpu.fixed_search import FixedSearch
    from asr.decoding.gpu.limits import FrameLimits

    return FixedSearch(graph, FrameLimits(options, False, False, device))


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
