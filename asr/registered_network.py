"""Networks that files may name: a class of a fixed registry, its arguments, and its weights; never a pickled object."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from asr.errors import AsrError
from asr.text.vocabulary import Vocabulary

# The only classes that a file can name -> where they are defined.
FEATURE_CLASSES = {"Fbank": "asr.data.fbank"}
ACOUSTIC_MODEL_CLASSES = {"Conformer": "asr.am.conformer", "SplicedDnn": "asr.am.spliced_dnn"}
LANGUAGE_MODEL_CLASSES = {"RnnLm": "asr.lm.rnn.rnn_lm"}


@dataclass
class RegisteredNetwork:
    """A network with what it takes to build it again.

    Args:
        class_name: a name of the registry.
        arguments: of its constructor, JSON values only.
        network: the network itself.
    """

    class_name: str
    arguments: dict[str, Any]
    network: nn.Module


def build_network(
    class_name: str,
    arguments: dict[str, Any],
    classes: dict[str, str],
    where: str,
    vocabulary: Vocabulary | None = None,
) -> RegisteredNetwork:
    """Makes a network of the registry from its arguments; weights are as its constructor leaves them.

    Args:
        class_name: a key of `classes`.
        arguments: of its constructor; of its `<class_name>Config` where there is a vocabulary.
        classes: the part of the registry that may be named here.
        where: the file that names it, for error messages.
        vocabulary: the words of a language model.

    Raises:
        AsrError: the class is not of the registry, or does not take these arguments.
    """
    if not isinstance(class_name, str) or class_name not in classes:
        raise AsrError(f"{where}: the class {class_name!r} is not one that files may name ({', '.join(classes)}).")
    module = importlib.import_module(classes[class_name])
    try:
        if vocabulary is None:
            network = getattr(module, class_name)(**arguments)
        else:
            network = getattr(module, class_name)(vocabulary, getattr(module, f"{class_name}Config")(**arguments))
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise AsrError(f"{where}: {class_name} does not take the arguments given there ({error}).") from error
    return RegisteredNetwork(class_name, arguments, network.eval())


def save_weights(network: nn.Module, path: Path, half_precision: bool) -> None:
    """Writes a state dict as safetensors; tied weights, one tensor under several names, once."""
    state: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, tensor in network.state_dict().items():
        if tensor.numel() and tensor.data_ptr() in stored:
            continue
        stored.add(tensor.data_ptr())
        halved = half_precision and tensor.dtype == torch.float32
        state[name] = tensor.detach().cpu().to(torch.float16 if halved else tensor.dtype).contiguous()
    path.write_bytes(save(state))  # what `save_file` writes can be read by its owner only


def load_weights(network: nn.Module, path: Path) -> None:
    """Loads what `save_weights` wrote; numbers take the network's own precision.

    Raises:
        AsrError: the file cannot be read, has numbers that are none, or does not fit the network.
    """
    try:
        state = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise AsrError(f"{path}: the weights cannot be read ({error}); fetch the file again.") from error
    require_finite(state, path)
    try:
        missing, unexpected = network.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise _misfit(path, str(error).strip().splitlines()[-1].strip()) from error
    # Tied weights are stored once; loading one name has filled the other.
    filled = {tensor.data_ptr() for name, tensor in network.state_dict().items() if name in state}
    missing = [name for name in missing if network.state_dict()[name].data_ptr() not in filled]
    if missing or unexpected:
        raise _misfit(path, f"missing: {missing[:3]}, not wanted: {unexpected[:3]}")


def require_finite(state: dict[str, Tensor], path: Path) -> None:
    """Refuses weights with which nothing can be computed.

    Raises:
        AsrError: a weight is infinite or not a number.
    """
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise AsrError(
                f"{path}: the weights {name!r} are not all finite numbers: the training diverged (take an earlier "
                "checkpoint), or the file is damaged (fetch it again)."
            )


def _misfit(path: Path, reason: str) -> AsrError:
    return AsrError(f"{path}: the weights do not fit the network that its description builds ({reason}).")
