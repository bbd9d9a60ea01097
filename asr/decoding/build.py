"""Which language model decides: the ways in which a bundle's models can be put together.

Which first pass searches, and where the language model acts in it."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import nn

from asr.bundle import Bundle
from asr.decoding.interface import Decoder, DecodingOptions
from asr.decoding.token_passing import RescoringPass, TokenPassingDecoder
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import has_package
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import RemappedLM, difference_lm, interpolated_difference_lm, interpolated_lm
from asr.lm.interface import LanguageModel
from asr.lm.ngram.model import NgramLM
from asr.lm.offload import HostNgramLM, table_bytes, with_host_tables
from asr.lm.rnn.model import RNNLanguageModel

# mode -> what it is; `auto` takes the first that the bundle has parts for. A small n-gram beside a well trained
# recurrent model adds more time than words, so that interpolation is there to be asked for; a large one is worth it.
MODES = {
    "on_the_fly": "the recurrent language model on the fly",
    "interpolated": "recurrent and n-gram language model interpolated, on the fly",
    "large_ngram": "the larger n-gram model on the fly",
    "ngram": "the first pass with the graph's own n-gram alone",
}


# Settings beside those of DecodingOptions that a mode may have.
_RNN_WEIGHT = "rnn_weight"


_DEFAULT_RNN_WEIGHT = 0.5


# On a CPU so many rows cost hardly more than two: products are made in blocks of them.
_ROWS_AHEAD = 8


def available_modes(bundle: Bundle) -> list[str]:
    """The modes that the bundle's parts allow, best first."""
    has_rnn = bundle.rnn_lm is not None and bundle.small_ngram is not None
    has_large = bundle.large_ngram is not None and bundle.small_ngram is not None
    allowed = {"on_the_fly": has_rnn, "interpolated": has_rnn, "large_ngram": has_large, "ngram": True}
    best_first = sorted(MODES, key=lambda mode: mode != "interpolated") if has_large else MODES
    return [mode for mode in best_first if allowed[mode]]


def chosen_mode(bundle: Bundle, mode: str) -> str:
    """The mode itself, or for `auto` the bundle's best.

    Raises:
        AsrError: the bundle lacks the parts for it.
    """
    available = available_modes(bundle)
    if mode == "auto":
        return available[0]
    if mode not in available:
        raise AsrError(f"bundle {bundle.name}: the mode {mode!r} is not available; it has {', '.join(available)}.")
    return mode


def decoding_options(bundle: Bundle, mode: str, overrides: dict[str, Any]) -> tuple[DecodingOptions, float]:
    """A mode's options as the bundle was tuned, the user's own on top, and the recurrent model's weight.

    A mode that the bundle was not tuned for takes what `ngram` was tuned to.

    Raises:
        AsrError: an option does not exist or is out of its range.
    """
    tuned = bundle.decoding.get(mode, bundle.decoding.get("ngram", {}))
    if not isinstance(tuned, dict):
        raise AsrError(f"bundle {bundle.name}: the decoding options of {mode} are {tuned!r}; give names and numbers.")
    settings = {**tuned, **overrides}
    rnn_weight = settings.pop(_RNN_WEIGHT, _DEFAULT_RNN_WEIGHT)
    if not isinstance(rnn_weight, (int, float)) or not 0.0 <= rnn_weight <= 1.0:
        raise AsrError(f"the recurrent model's rnn_weight is {rnn_weight!r}; it lies between 0 and 1.")
    known = {field.name for field in dataclasses.fields(DecodingOptions)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise AsrError(f"there is no decoding option {unknown[0]!r}; there are {', '.join(sorted(known))}.")
    return DecodingOptions(**settings), float(rnn_weight)


@dataclasses.dataclass
class LanguageModels:
    """A mode's language model as the first pass asks it.

    Args:
        model: the large model minus the graph's own; None where the graph's own decides.
        engine: the recurrent model's query engine inside it, for its statistics; None without one.
    """

    model: LanguageModel | None
    engine: CachedRNNLM | None


def language_models(
    bundle: Bundle,
    mode: str,
    rnn_weight: float,
    device: torch.device,
    device_budget: int | None = None,
    capacity_bytes: int | None = None,
) -> LanguageModels:
    """Puts a mode's language model together on a device.

    Args:
        bundle: its `rnn_lm` network is moved to the device.
        mode: an available one.
        rnn_weight: of the recurrent model in the linear interpolation.
        device: where queries come from.
        device_budget: bytes of device memory for the tables of the large models, the rest of them staying on the host;
            None puts all on the device.
        capacity_bytes: what the recurrent model's histories may take; no limit if None.

    Raises:
        AsrError: the budget is too small.
    """
    if mode == "ngram":
        return LanguageModels(None, None)
    assert bundle.small_ngram is not None
    small = bundle.small_ngram.to(device)
    network = bundle.rnn_lm.network if bundle.rnn_lm is not None and mode != "large_ngram" else None
    large_ngram = bundle.large_ngram if mode != "on_the_fly" else None
    network_budget, ngram_budget = _shares(device_budget, network, large_ngram)
    ngram: LanguageModel = small
    if large_ngram is not None:
        placed = large_ngram.to(device) if ngram_budget is None else HostNgramLM(large_ngram, device, ngram_budget)
        ngram = _mapped(placed, small)
    if mode == "large_ngram":
        return LanguageModels(difference_lm(ngram, small), None)
    assert network is not None
    if network_budget is not None:
        network, _ = with_host_tables(network.to("cpu"), device, network_budget)  # type: ignore[arg-type]
    ahead = _ROWS_AHEAD if device.type == "cpu" else 0
    engine = CachedRNNLM(network.to(device), capacity_bytes=capacity_bytes, rows_ahead=ahead)  # type: ignore[arg-type]
    large = _mapped(engine, small)
    if mode == "interpolated" and ngram is small:
        return LanguageModels(interpolated_difference_lm(large, small, rnn_weight), engine)
    if mode == "interpolated":
        large = interpolated_lm([large, ngram], [rnn_weight, 1.0 - rnn_weight])
    return LanguageModels(difference_lm(large, small), engine)


def _shares(
    device_budget: int | None, network: nn.Module | None, ngram: NgramLM | None
) -> tuple[int | None, int | None]:
    """What the recurrent and the n-gram model may take of a budget: their part of both together."""
    if device_budget is None:
        return None, None
    network_bytes = table_bytes(network) if isinstance(network, RNNLanguageModel) else 0
    ngram_bytes = sum(ngram.arrays.num_bytes().values()) if ngram is not None else 0
    network_budget = device_budget * network_bytes // max(1, network_bytes + ngram_bytes)
    return network_budget, device_budget - network_budget


def _mapped(model: LanguageModel, small: NgramLM) -> LanguageModel:
    """The model asked with the small model's word ids."""
    return model if model.vocabulary == small.vocabulary else RemappedLM(model, small.vocabulary)


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


def build_first_pass(name: str, graph: DecodingGraph, options: DecodingOptions, keep_lattices: bool) -> Decoder:
    """What `chosen_first_pass` has chosen, for a graph on the device where it shall run.

    Raises:
        AsrError: it cannot run here, or lattices are asked for that it cannot make.
    """
    if name == "k2":
        k2_pass = importlib.import_module("asr.decoding.k2")
        first_pass: Decoder = k2_pass.K2Decoder(graph, options, keep_lattices)
        return first_pass
    return (RescoringPass if name == "torch" else TokenPassingDecoder)(graph, options, keep_lattices)


def default_first_pass(device: torch.device) -> str:
    """The fastest that runs: on a CPU `torch` where its compiled loops run; else `k2` where it works, or `torch`."""
    if device.type == "cpu" and has_package("numba"):
        return "torch"
    try:
        k2 = importlib.import_module("k2")
    except (ImportError, OSError, AttributeError):
        # A k2 that was built for another torch fails in any of these ways.
        return "torch"
    if device.type == "cpu" or (device.type == "cuda" and bool(getattr(k2, "with_cuda", False))):
        return "k2"
    return "torch"
