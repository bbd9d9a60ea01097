"""Chooses and builds language models and decoder, from the mode, the options, the bundle's parts and the device.

No other module knows the old names of modes and decoders.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from asr.bundle import Bundle
from asr.decoding.interface import Decoder, LanguageModels
from asr.decoding.settings import EXTERNAL_MODE, MODES, OLD_NAMES, DecodingOptions, ResourceOptions, Settings
from asr.decoding.token_passing import LM_FUSIONS, TokenPassingDecoder
from asr.decoding.words import Calibration
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import has_loops
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.checks import CheckedLM
from asr.lm.combine import LISTED_SHARE, Difference, Interpolated, SentencesLM, mapped_to
from asr.lm.hot_words import HotWords, with_phrases
from asr.lm.interface import LanguageModel, device_of
from asr.lm.ngram.model import NgramLM
from asr.lm.offload import HostNgramLM, table_bytes, with_host_tables
from asr.lm.rnn.model import RNNLanguageModel
from asr.options import device_named, require_type

_LOGGER = logging.getLogger(__name__)

OLD_MODES = {"on_the_fly": "rnn"}
"""Old name -> mode. Bundles may use either; users who give an old name get a hint."""


def current_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by their current names."""
    return {OLD_NAMES.get(name, name): value for name, value in options.items()}


def available_modes(bundle: Bundle) -> list[str]:
    """The modes that the bundle's parts allow: its default mode first, then the others from best to worst."""
    parts = ("rnn_lm", "small_ngram", "large_ngram")
    return modes_of([part for part in parts if getattr(bundle, part) is not None], bundle.default_mode)


def modes_of(parts: Container[str], default_mode: str | None) -> list[str]:
    """`available_modes` of a bundle with these parts."""
    has_rnn, has_large = ("small_ngram" in parts and part in parts for part in ("rnn_lm", "large_ngram"))
    allowed = {"rnn": has_rnn, "interpolated": has_rnn, "large_ngram": has_large, "ngram": True}
    best_first = sorted(MODES, key=lambda mode: mode != "interpolated") if has_large else MODES
    modes = [mode for mode in best_first if allowed[mode]]
    return sorted(modes, key=lambda mode: mode != default_mode)


def chosen_mode(bundle: Bundle, mode: str, language_model: LanguageModel | None = None) -> str:
    """Resolves `auto` to the bundle's default mode, or to `external` if the user provides a language model.

    Raises:
        AsrError: the bundle lacks the parts for the mode, or the user gave both a mode and a language model.
    """
    available = available_modes(bundle)
    mode = OLD_MODES.get(mode, mode)
    if language_model is not None:
        if mode not in ("auto", EXTERNAL_MODE):
            raise AsrError(f"your own language model replaces the mode {mode!r}; leave out one of them.")
        if bundle.small_ngram is None:
            raise AsrError(
                f"bundle {bundle.name}: it does not have the n-gram model of its graph, which the language model would "
                "replace; make the bundle again with 'asr bundle --small-ngram'."
            )
        return EXTERNAL_MODE
    if mode == "auto":
        mode = bundle.default_mode or available[0]
    if mode not in available:
        raise AsrError(f"bundle {bundle.name}: the mode {mode!r} is not available; it has {', '.join(available)}.")
    return mode


def recognition_settings(bundle: Bundle, mode: str, overrides: Mapping[str, Any]) -> Settings:
    """The bundle's tuned options for a mode, overridden by the user's.

    The mode `external` takes the options of the first of `available_modes` that was tuned. Other modes that were not
    tuned take those of `ngram`.

    Raises:
        AsrError: an option does not exist or is out of range, or the overrides are not a mapping.
    """
    require_type(overrides, Mapping, "options", "option names with values, such as {'search_beam': 12.0}")
    tuned = _tuned(bundle, mode)
    if not isinstance(tuned, dict):
        raise AsrError(f"bundle {bundle.name}: the decoding options of {mode} are {tuned!r}; give names and numbers.")
    try:
        Settings.of(current_names(tuned), ())
    except AsrError as error:
        raise AsrError(f"bundle {bundle.name}: the decoding options of {mode} are wrong: {error}") from error
    settings = Settings.of({**current_names(tuned), **current_names(overrides)}, overrides)
    if settings.language_models.second_pass != "none":
        chosen_mode(bundle, settings.language_models.second_pass_mode)
    return settings


def final_pass(
    bundle: Bundle, mode: str, settings: Settings, overrides: Mapping[str, Any]
) -> tuple[str, DecodingOptions]:
    """Mode and decoding options of the last pass: of the second one, with its own scales and beams, if there is one.

    Args:
        bundle, mode, overrides: as for `recognition_settings`, which has returned `settings`.
        settings: of the first pass.
    """
    second = settings.language_models
    if second.second_pass == "none":
        return mode, settings.decoding
    options = recognition_settings(bundle, second.second_pass_mode, overrides).decoding
    if second.second_pass == "nbest":  # the lattice keeps the scores of the first pass
        options = dataclasses.replace(options, mbr_scale=None)
    return second.second_pass_mode, options


def calibration_of(bundle: Bundle, mode: str) -> Calibration | None:
    """The calibration of a mode's confidences, or of the first of `available_modes` that has one.

    Args:
        bundle: the bundle.
        mode: as `chosen_mode` returns it.

    Returns:
        None if the bundle has no calibration or one of an earlier version, or its graph has epsilons, which rules out
        lattices.

    Raises:
        AsrError: the calibration is damaged.
    """
    for fitted in (mode, *available_modes(bundle)):
        if fitted in bundle.confidence and not bundle.graph.has_epsilons:
            if Calibration.is_outdated(bundle.confidence[fitted]):
                _LOGGER.warning(
                    "bundle %s: its confidences were calibrated by an earlier version and are left out; "
                    "calibrate it again with 'asr calibrate'.",
                    bundle.name,
                )
                return None
            return Calibration.from_dict(bundle.confidence[fitted], f"bundle {bundle.name}: confidence of {fitted}")
    return None


def _tuned(bundle: Bundle, mode: str) -> Any:
    by_mode = {OLD_MODES.get(name, name): options for name, options in bundle.decoding.items()}
    if mode == EXTERNAL_MODE:
        mode = next((name for name in (*available_modes(bundle), *MODES) if name in by_mode), "ngram")
    return by_mode.get(mode, by_mode.get("ngram", {}))


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of the large language models.

    Args:
        device: where they answer.
        device_bytes: device memory for the tables of the models; the rest of the tables stays on the host. None puts
            everything on the device.
        hidden_device: where the recurrent model runs its hidden layer; None is `device`. Not with `device_bytes`.
    """

    device: torch.device
    device_bytes: int | None = None
    hidden_device: torch.device | None = None

    @classmethod
    def of(cls, resources: ResourceOptions, search_device: torch.device, in_search: bool) -> Placement:
        """Where a recognizer's language models are, by its options.

        Args:
            resources: the user's options.
            search_device: where the decoding graph is searched.
            in_search: whether the models are queried within that search, not only over lattices.
        """
        hidden = None if resources.lm_hidden_device is None else device_named(resources.lm_hidden_device)
        stays = in_search or resources.lm_device_bytes is not None
        device = search_device if stays else device_with_loops(search_device)
        if resources.lm_output_device is not None:
            device = device_named(resources.lm_output_device)
        return cls(device, resources.lm_device_bytes, hidden)


def has_transformer(bundle: Bundle) -> bool:
    """Whether a bundle's neural language model is a Transformer, see `asr.lm.transformers`."""
    return bundle.rnn_lm is not None and bool(getattr(bundle.rnn_lm.network, "has_exact_states", False))


def refuse_recurrent_options(given: Iterable[str], resources: ResourceOptions) -> None:
    """Refuses what has an effect on recurrent networks only, for a Transformer.

    Args:
        given: the settings that the user has given.
        resources: the user's options.

    Raises:
        AsrError: one of them would have no effect.
    """
    of_layers = ("lm_device_bytes", "lm_hidden_device")
    names = {*given, *(name for name in of_layers if getattr(resources, name) is not None)}
    for name in ("history_precision", "hidden_dtype", "hidden_products", *of_layers):
        if name in names:
            raise AsrError(
                f"{name} has no effect here: it is for recurrent networks, and the language model is a Transformer; "
                "leave it out."
            )


def device_with_loops(device: torch.device) -> torch.device:
    """Where lattices are rescored and streams are searched by default, for a recognizer on a device.

    A GPU takes a hundred launches for each frame of a lattice or of a few streams, whose time exceeds that of compiled
    loops. So this is the CPU if they run there.
    """
    cpu = torch.device("cpu")
    return cpu if has_loops(cpu) else device


def language_models(
    bundle: Bundle,
    mode: str,
    rnn_weight: float,
    placement: Placement | torch.device,
    cache: CacheOptions | None = None,
    external: LanguageModel | None = None,
    hot_words: HotWords | None = None,
    joins_sentences: bool = False,
) -> LanguageModels:
    """Builds a mode's language model.

    Args:
        bundle: its `rnn_lm` network is copied if it is on another device.
        mode: as `chosen_mode` returns it.
        rnn_weight: weight of the recurrent model in the linear interpolation.
        placement: devices of the model; a single device puts everything there.
        cache: memory and approximations of the recurrent model; exact and unlimited if None.
        external: the user's own model, for the mode `external`.
        hot_words: those that the graph's scores prefer.
        joins_sentences: whether paths of the graph may have several sentences.

    Raises:
        AsrError: the budget is too small, or the user's model has none of the graph's words.
    """
    if isinstance(placement, torch.device):
        placement = Placement(placement)
    models = _of_mode(bundle, OLD_MODES.get(mode, mode), rnn_weight, placement, cache, external)
    vocabulary = bundle.graph.vocabulary if models.model is None else models.model.vocabulary
    phrases = None if hot_words is None else hot_words.model(vocabulary)
    if phrases is not None:
        models = dataclasses.replace(models, model=with_phrases(models.model, phrases.to(placement.device)))
    if models.model is None or not joins_sentences:
        return models
    return dataclasses.replace(models, model=SentencesLM(models.model))


def _of_mode(
    bundle: Bundle,
    mode: str,
    rnn_weight: float,
    placement: Placement,
    cache: CacheOptions | None,
    external: LanguageModel | None,
) -> LanguageModels:
    """`language_models` without hot words."""
    device = placement.device
    if mode == "ngram":
        return LanguageModels(None, None)
    assert bundle.small_ngram is not None
    if mode == EXTERNAL_MODE:
        assert external is not None
        small = bundle.small_ngram.to(device_of(external))
        return LanguageModels(Difference(_mapped(CheckedLM(external), small, warn=True), small), None)
    small = bundle.small_ngram.to(device)
    network = bundle.rnn_lm.network if bundle.rnn_lm is not None and mode != "large_ngram" else None
    large_ngram = bundle.large_ngram if mode != "rnn" else None
    network_budget, ngram_budget = _shares(placement.device_bytes, network, large_ngram)
    ngram: LanguageModel = small
    if large_ngram is not None:
        placed = large_ngram.to(device) if ngram_budget is None else HostNgramLM(large_ngram, device, ngram_budget)
        ngram = _mapped(placed, small)
    if mode == "large_ngram":
        return LanguageModels(Difference(ngram, small), None)
    assert network is not None
    if network_budget is not None:
        network, _ = with_host_tables(network.to("cpu"), device, network_budget)  # type: ignore[arg-type]
    engine = _cached(network, placement, CacheOptions() if cache is None else cache)
    large = _mapped(engine, small)
    if mode == "interpolated":
        large = Interpolated([large, ngram], [rnn_weight, 1.0 - rnn_weight])
    return LanguageModels(Difference(large, small), engine)


def _cached(network: nn.Module, placement: Placement, cache: CacheOptions) -> CachedRNNLM:
    """The query engine, with each layer of the network on its device."""
    home, hidden = placement.device, placement.hidden_device or placement.device
    network = _on(network, home)
    others: Any = None if hidden == home else [_on(network, hidden)]
    if network.has_exact_states:  # of a Transformer, to which what a bundle says of its recurrent model does not apply
        cache = cache.exact()
    return CachedRNNLM(network, cache, hidden_networks=others)  # type: ignore[arg-type]


def _on(network: nn.Module, device: torch.device) -> nn.Module:
    """The network, or a copy of it, on a device."""
    here: torch.device = network.initial_state().device  # type: ignore[operator]
    is_there = here == torch.empty(0, device=device).device
    return network if is_there else copy.deepcopy(network).to(device)


def _shares(
    device_budget: int | None, network: nn.Module | None, ngram: NgramLM | None
) -> tuple[int | None, int | None]:
    """Splits a memory budget between the recurrent and the n-gram model, in proportion to their sizes."""
    if device_budget is None:
        return None, None
    network_bytes = table_bytes(network) if isinstance(network, RNNLanguageModel) else 0
    ngram_bytes = sum(ngram.arrays.num_bytes().values()) if ngram is not None else 0
    network_budget = device_budget * network_bytes // max(1, network_bytes + ngram_bytes)
    return network_budget, device_budget - network_budget


def _mapped(model: LanguageModel, small: NgramLM, warn: bool = False) -> LanguageModel:
    """The model with the word ids of `small`. A bundle's model may lack words of the graph on purpose."""
    return mapped_to(model, small.vocabulary, LISTED_SHARE, warn)


DECODERS = {
    "auto": "token-passing on CPUs with numba; elsewhere k2 where it works, else token-passing",
    "token-passing": "the frame-synchronous search of this program",
    "k2": "k2's pruned intersection; needs a k2 that fits torch",
}
"""Decoder -> its description."""


OLD_FIRST_PASSES = {
    "auto": ("auto", "lattice"),
    "torch": ("token-passing", "lattice"),
    "torch-search": ("token-passing", "search"),
    "k2": ("k2", "lattice"),
}
"""Old value of `--first-pass` -> (decoder, where the language model acts)."""


def old_first_pass(decoder: str, lm_fusion: str) -> str:
    """The old name of a decoder, which the JSON output of `asr evaluate` keeps."""
    named = (name for name, new in OLD_FIRST_PASSES.items() if new == (decoder, lm_fusion))
    return next(named, f"torch-{lm_fusion}")


def chosen_decoder(decoder: str, lm_fusion: str, graph: DecodingGraph, device: torch.device) -> tuple[str, str]:
    """Resolves `auto` for a graph and a device -> (`token-passing` or `k2`, a key of `LM_FUSIONS`).

    The fusion `auto` is one pass in chunks where it is as fast as a second pass: in token passing with compiled loops.
    Elsewhere it is `lattice`.

    Raises:
        AsrError: there is no such decoder or fusion, or the decoder or device does not support the fusion.
    """
    if decoder not in DECODERS:
        raise AsrError(f"there is no decoder {decoder!r}; choose one of {', '.join(DECODERS)}.")
    if lm_fusion not in ("auto", *LM_FUSIONS):
        raise AsrError(
            f"there is no fusion {lm_fusion!r} of the language model; choose auto or one of {', '.join(LM_FUSIONS)}."
        )
    may_be_k2 = lm_fusion in ("auto", "lattice")
    if decoder == "k2" and not may_be_k2:
        raise AsrError(f"k2 does not support lm_fusion {lm_fusion}; choose lattice or the decoder token-passing.")
    if lm_fusion == "chunks" and device.type != "cpu":
        raise AsrError(f"lm_fusion chunks needs a CPU, but the recognizer is on {device}; choose lattice.")
    if decoder == "auto":
        is_ours = graph.has_epsilons or not may_be_k2
        decoder = "token-passing" if is_ours else default_decoder(device)
    if lm_fusion == "auto":
        lm_fusion = "chunks" if decoder == "token-passing" and has_loops(device) else "lattice"
    if decoder == "token-passing" and graph.has_epsilons:
        # Token passing cannot make a lattice from a graph with epsilons.
        lm_fusion = "search"
    return decoder, lm_fusion


def build_decoder(
    decoder: str, lm_fusion: str, graph: DecodingGraph, options: DecodingOptions, keep_lattices: bool
) -> Decoder:
    """Builds the decoder that `chosen_decoder` has chosen, on the graph's device.

    Raises:
        AsrError: the decoder cannot run here, or cannot make the requested lattices.
    """
    if decoder == "k2":
        from asr.decoding.k2 import K2Decoder

        return K2Decoder(graph, options, keep_lattice=keep_lattices)
    return TokenPassingDecoder(graph, options, lm_fusion=lm_fusion, keep_lattice=keep_lattices)


def default_decoder(device: torch.device) -> str:
    """The fastest decoder that runs on a device.

    On a CPU that is `token-passing` if its compiled loops run; otherwise `k2` if that works, or `token-passing`.
    """
    if has_loops(device):
        return "token-passing"
    from asr.decoding.k2 import k2_works

    return "k2" if k2_works(device) else "token-passing"
