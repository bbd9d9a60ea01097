"""From a Lightning checkpoint to the network that recognizes; needs no Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from asr.bundle import Bundle
from asr.errors import AsrError
from asr.serialization import ACOUSTIC_MODEL_CLASSES, ModelSpec, build_network, read_checkpoint, registered_name
from asr.text.symbols import TokenTable

_AVERAGE_PREFIX = "average.network."


def network_from_checkpoint(
    checkpoint: str | Path | Sequence[str | Path], recipe: str | Path
) -> tuple[ModelSpec, TokenTable]:
    """The averaged network of a training run, in evaluation mode, and the tokens that it was trained for.

    Args:
        checkpoint: a `.ckpt` file that `asr fit` wrote; of several, states of one run or of runs that went on from it,
            the mean of their weights, which is often better than any of them.
        recipe: the YAML that the run was started with, or the `config.yaml` that it left beside its logs.

    Raises:
        AsrError: one of the files is missing or of another kind, or they do not belong together.
    """
    class_name, arguments = _network_section(Path(recipe))
    registered = build_network(class_name, arguments, ACOUSTIC_MODEL_CLASSES, str(recipe))
    checkpoints = [checkpoint] if isinstance(checkpoint, (str, Path)) else checkpoint
    mean: dict[str, Tensor] = {}
    tables: list[TokenTable] = []
    for path in checkpoints:
        content = read_checkpoint(path)
        try:
            registered.network.load_state_dict(_averaged_weights(content, path))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise AsrError(f"{path}: the weights do not fit the network of {recipe} ({reason}).") from error
        for name, value in registered.network.state_dict().items():
            share = value / len(checkpoints) if value.is_floating_point() else value
            mean[name] = mean[name] + share if name in mean and value.is_floating_point() else share.clone()
        tables.append(TokenTable(_tokens(content, path), name=str(path)))
        if tables[-1] != tables[0]:
            raise AsrError(f"{path}: the checkpoint is for other tokens than {tables[0].name}; take one run's.")
    registered.network.load_state_dict(mean)
    return registered, tables[0]


def weights_and_tokens(source: str | Path) -> tuple[dict[str, Tensor], list[str]]:
    """What a training can start from: a network's state dict and its tokens, blank first.

    Args:
        source: a checkpoint of `asr fit`, of which the averaged network counts, or the folder of a bundle.

    Raises:
        AsrError: it is missing, or something else.
    """
    if not Path(source).is_dir():
        content = read_checkpoint(source)
        return _averaged_weights(content, source), _tokens(content, source)
    bundle = Bundle.load(source)
    return bundle.acoustic_model.network.state_dict(), list(bundle.graph.tokens.tokens)


def averaged_weights(checkpoint: str | Path) -> dict[str, Tensor]:
    """The averaged network's state dict in a Lightning checkpoint.

    Raises:
        AsrError: the file is missing, or was written by something else.
    """
    return _averaged_weights(read_checkpoint(checkpoint), checkpoint)


def _averaged_weights(content: dict[str, Any], checkpoint: str | Path) -> dict[str, Tensor]:
    state = content["state_dict"]
    weights = {name[len(_AVERAGE_PREFIX) :]: value for name, value in state.items() if name.startswith(_AVERAGE_PREFIX)}
    if not weights:
        raise AsrError(f"{checkpoint}: it holds no averaged network; take one that `asr fit` wrote for an am*.yaml.")
    return weights


def _tokens(content: dict[str, Any], checkpoint: str | Path) -> list[str]:
    if "tokens" not in content:
        raise AsrError(f"{checkpoint}: it does not say its tokens; take one that `asr fit` wrote for an am*.yaml.")
    return list(content["tokens"])


def _network_section(recipe: Path) -> tuple[str, dict[str, Any]]:
    try:
        config = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        section = config["model"]["init_args"]["network"]
        return registered_name(str(section["class_path"]), ACOUSTIC_MODEL_CLASSES), dict(section.get("init_args", {}))
    except OSError as error:
        raise AsrError(f"{recipe}: the recipe cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
        raise AsrError(f"{recipe}: it has no model.init_args.network; take the YAML of an acoustic model.") from error
