"""Loads acoustic models from Lightning checkpoints, without Lightning."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from asr.bundle import Bundle
from asr.errors import AsrError
from asr.graph.context import TIED_STATES
from asr.models.tdnnf import Ensemble
from asr.serialization import ACOUSTIC_MODEL_CLASSES, ModelSpec, build_network, read_checkpoint, registered_name
from asr.text.documents import parse_yaml, read_text
from asr.text.symbols import TokenTable

_LOGGER = logging.getLogger(__name__)

FBANK = "fbank"  # the field of checkpoints with the arguments of the filterbanks

_AVERAGE_PREFIX = "average.network."


def network_from_checkpoint(
    checkpoint: str | Path | Sequence[str | Path], recipe: str | Path, fbank: Mapping[str, Any] | None = None
) -> tuple[ModelSpec, TokenTable]:
    """The averaged network of a training run, in evaluation mode, and the tokens that it was trained for.

    Args:
        checkpoint: a `.ckpt` file that `asr fit` wrote. Several checkpoints, of one run or of runs that continued it,
            give the mean of their weights, which is often better than any of them.
        recipe: the YAML that the run was started with, or the `config.yaml` that it wrote next to its logs.
        fbank: `Fbank.arguments` of the features that the network will read; None not to check them.

    Raises:
        AsrError: a file is missing or of another kind, or the files do not belong together.
    """
    class_name, arguments = _network_section(Path(recipe))
    registered = build_network(class_name, arguments, ACOUSTIC_MODEL_CLASSES, str(recipe))
    # Parts of the network that only training needs are left out.
    reduced = getattr(registered.network, "inference_arguments", None)
    in_training = registered.network.state_dict().keys()
    if reduced is not None:
        registered = build_network(class_name, reduced(arguments), ACOUSTIC_MODEL_CLASSES, str(recipe))
    left_out = in_training - registered.network.state_dict().keys()
    checkpoints = [checkpoint] if isinstance(checkpoint, (str, Path)) else checkpoint
    mean: dict[str, Tensor] = {}
    tables: list[TokenTable] = []
    for path in checkpoints:
        content = read_checkpoint(path)
        if fbank is not None:
            require_same_features(content.get(FBANK, {}), fbank, str(path), str(recipe))
        try:
            weights = _averaged_weights(content, path)
            registered.network.load_state_dict({name: weights[name] for name in weights.keys() - left_out})
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
            raise AsrError(
                f"{path}: the weights do not fit the network of {recipe} ({reason}); if options of 'asr fit' changed "
                "the network, give the config.yaml that it wrote."
            ) from error
        for name, value in registered.network.state_dict().items():
            share = value / len(checkpoints) if value.is_floating_point() else value
            mean[name] = mean[name] + share if name in mean and value.is_floating_point() else share.clone()
        tables.append(TokenTable(_tokens(content, path), name=str(path)))
        if tables[-1] != tables[0]:
            raise AsrError(
                f"{path}: the checkpoint has other tokens than {tables[0].name}; use checkpoints of one run."
            )
    registered.network.load_state_dict(mean)
    return registered, tables[0]


def require_same_features(trained: Mapping[str, Any], fbank: Mapping[str, Any], name: str, recipe: str) -> None:
    """Checks that a network reads the features that it was trained with.

    Args:
        trained: `Fbank.arguments` of its training; earlier versions did not write them, and an empty one is accepted.
        fbank: `Fbank.arguments` of the features. Dither is for training only and may differ.
        name: of the network, for error messages.
        recipe: where the features are chosen, for error messages.

    Raises:
        AsrError: the network was trained with other features.
    """
    for difference in _differences(trained, fbank, recipe):
        raise AsrError(f"{name}: {difference}; give data.init_args.fbank the arguments of its training.")


def warn_of_other_features(trained: Mapping[str, Any], fbank: Mapping[str, Any], name: str) -> None:
    """Logs a warning if a training starts from a network of other features, to which it has to adapt.

    Args:
        trained: as in `require_same_features`.
        fbank: `Fbank.arguments` of the training that starts.
        name: of the network.
    """
    for difference in _differences(trained, fbank, "this training"):
        _LOGGER.warning("%s: initial_checkpoint: %s", name, difference)


def _differences(trained: Mapping[str, Any], fbank: Mapping[str, Any], recipe: str) -> Iterator[str]:
    for argument, value in trained.items():
        if argument != "dither" and fbank.get(argument) != value:
            yield f"it was trained on filterbanks with {argument} {value}, but {recipe} has {fbank.get(argument)}"


class TrainedNetwork(NamedTuple):
    """What another training starts from.

    Attributes:
        weights: the state dict of the network.
        tokens: its tokens, blank first.
        tied_states: what `TiedStates.from_json` reads; None if its outputs are not tied states.
        fbank: `Fbank.arguments` of its features; empty if they are not known.
    """

    weights: dict[str, Tensor]
    tokens: list[str]
    tied_states: Any
    fbank: Mapping[str, Any]


def trained_network(source: str | Path) -> TrainedNetwork:
    """The weights of a trained network, its tokens, its tied states, and its features.

    Args:
        source: a checkpoint of `asr fit`, whose averaged network is taken, or the folder of a bundle. Of an ensemble,
            the first member is taken.

    Raises:
        AsrError: the source is missing or of another kind.
    """
    if not Path(source).is_dir():
        content = read_checkpoint(source)
        weights, tokens = _averaged_weights(content, source), _tokens(content, source)
        return TrainedNetwork(weights, tokens, content.get(TIED_STATES), content.get(FBANK, {}))
    bundle = Bundle.load(source)
    network = bundle.acoustic_model.network
    trained = network.members[0] if isinstance(network, Ensemble) else network
    tokens, fbank = list(bundle.graph.tokens.tokens), getattr(bundle.features.network, "arguments", {})
    return TrainedNetwork(trained.state_dict(), tokens, bundle.graph.meta.get(TIED_STATES), fbank)


def _averaged_weights(content: dict[str, Any], checkpoint: str | Path) -> dict[str, Tensor]:
    state = content["state_dict"]
    weights = {name[len(_AVERAGE_PREFIX) :]: value for name, value in state.items() if name.startswith(_AVERAGE_PREFIX)}
    if not weights:
        raise AsrError(f"{checkpoint}: it has no averaged network; use one that `asr fit` wrote for an am*.yaml.")
    return weights


def _tokens(content: dict[str, Any], checkpoint: str | Path) -> list[str]:
    if "tokens" not in content:
        raise AsrError(f"{checkpoint}: it has no list of tokens; use one that `asr fit` wrote for an am*.yaml.")
    return list(content["tokens"])


def _network_section(recipe: Path) -> tuple[str, dict[str, Any]]:
    try:
        config = parse_yaml(read_text(recipe, "recipe"))
        section = config["model"]["init_args"]["network"]
        return registered_name(str(section["class_path"]), ACOUSTIC_MODEL_CLASSES), dict(section.get("init_args", {}))
    except (KeyError, TypeError, ValueError) as error:
        raise AsrError(f"{recipe}: it has no model.init_args.network; use the YAML of an acoustic model.") from error
