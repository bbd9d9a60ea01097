"""Which first pass searches, and where the language model acts in it."""

from __future__ import annotations

import importlib

import torch

from asr.compiled_forms import imports
from asr.decoding.first_pass import FirstPass
from asr.decoding.options import DecodingOptions
from asr.decoding.rescoring_pass import RescoringPass
from asr.decoding.torch_pass import TorchFirstPass
from asr.errors import AsrError
from asr.graph.artefact import DecodingGraph

FIRST_PASSES = {
    "auto": "torch on CPUs, k2 on GPUs where it works, else torch",
    "k2": "k2's search; the language model rescores its lattice on the fly",
    "torch": "the search in torch; the language model rescores its lattice on the fly",
    "torch-search": "the same with the language model inside, deciding what is pruned: slower",
}
"""What may be asked for."""


def chosen_first_pass(wanted: str, graph: DecodingGraph, device: torch.device) -> str:
    """`k2`, `torch` or `torch-search`.

    Raises:
        AsrError: there is no such first pass.
    """
    if wanted not in FIRST_PASSES:
        raise AsrError(f"there is no first pass {wanted!r}; it is one of {', '.join(FIRST_PASSES)}.")
    if wanted == "auto":
        wanted = "torch" if graph.has_epsilons else default_first_pass(device)
    # Of a graph with arcs that read nothing the torch pass makes no lattice.
    return "torch-search" if wanted == "torch" and graph.has_epsilons else wanted


def build_first_pass(name: str, graph: DecodingGraph, options: DecodingOptions, keep_lattices: bool) -> FirstPass:
    """What `chosen_first_pass` has chosen, for a graph on the device where it shall run.

    Raises:
        AsrError: it cannot run here, or lattices are asked for that it cannot make.
    """
    if name == "k2":
        k2_pass = importlib.import_module("asr.decoding.k2_pass")
        first_pass: FirstPass = k2_pass.K2FirstPass(graph, options, keep_lattices)
        return first_pass
    return (RescoringPass if name == "torch" else TorchFirstPass)(graph, options, keep_lattices)


def default_first_pass(device: torch.device) -> str:
    """The fastest that runs: on a CPU `torch` where its compiled loops run; else `k2` where it works, or `torch`."""
    if device.type == "cpu" and imports("numba"):
        return "torch"
    try:
        k2 = importlib.import_module("k2")
    except (ImportError, OSError, AttributeError):
        # A k2 that was built for another torch fails in any of these ways.
        return "torch"
    if device.type == "cpu" or (device.type == "cuda" and bool(getattr(k2, "with_cuda", False))):
        return "k2"
    return "torch"
