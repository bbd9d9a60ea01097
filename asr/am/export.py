"""An acoustic model as plain files: weights in safetensors, class and constructor arguments in JSON.

Reading them needs only torch and safetensors; classes come from a fixed list, so a file can name nothing else.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asr.am.conformer import Conformer
from asr.am.spliced_dnn import SplicedDnn
from asr.errors import AsrError

NETWORKS: dict[str, type[nn.Module]] = {"Conformer": Conformer, "SplicedDnn": SplicedDnn}
WEIGHTS_FILE = "am.safetensors"
CONFIG_FILE = "am.json"


def save_network(
    class_name: str,
    arguments: dict[str, Any],
    weights: dict[str, Tensor],
    output_dir: str | Path,
    half: bool = True,
    notes: dict[str, Any] | None = None,
) -> None:
    """Writes `am.json` and `am.safetensors`, each complete or not at all.

    Args:
        class_name: a key of `NETWORKS`.
        arguments: of its constructor.
        weights: its state dict.
        output_dir: made if need be.
        half: store weights as float16; they are widened to float32 when read.
        notes: anything worth knowing of the model that JSON can hold, such as tokens, features and error rates.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (value.half() if half and value.is_floating_point() else value).contiguous() for name, value in weights.items()
    }
    config = {"class": class_name, "arguments": arguments, "notes": notes or {}}
    temporary = output_dir / f".{WEIGHTS_FILE}"
    save_file(stored, temporary)
    os.replace(temporary, output_dir / WEIGHTS_FILE)
    temporary = output_dir / f".{CONFIG_FILE}"
    temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, output_dir / CONFIG_FILE)


def load_network(model_dir: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """The network in evaluation mode with float32 weights, and the notes.

    Raises:
        AsrError: a file is missing or damaged, or weights and configuration do not fit each other.
    """
    config_path, weights_path = Path(model_dir) / CONFIG_FILE, Path(model_dir) / WEIGHTS_FILE
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        class_name, arguments, notes = config["class"], config["arguments"], config["notes"]
    except OSError as error:
        raise AsrError(f"{config_path}: the acoustic model's configuration cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise AsrError(f"{config_path}: the configuration is damaged ({error!r}); export the model again.") from error
    network = build_network(class_name, arguments, str(config_path))
    try:
        weights = load_file(weights_path)
    except Exception as error:  # safetensors raises its own class, which it does not export in all versions
        raise AsrError(f"{weights_path}: the weights cannot be read ({error}); export the model again.") from error
    try:
        network.load_state_dict({name: value.float() if value.is_floating_point() else value for name, value in weights.items()})
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise AsrError(f"{weights_path}: the weights do not fit {config_path.name} ({reason}); export both together.") from error
    return network.eval(), notes


def build_network(class_name: str, arguments: dict[str, Any], source: str) -> nn.Module:
    """A new network by its registered name.

    Raises:
        AsrError: no such class, or arguments that it does not take; `source` is named.
    """
    if class_name not in NETWORKS:
        raise AsrError(f"{source}: the class {class_name!r} is not an acoustic model; there are {', '.join(NETWORKS)}.")
    network_class = NETWORKS[class_name]
    try:
        inspect.signature(network_class).bind(**arguments)
        return network_class(**arguments)
    except (TypeError, ValueError) as error:
        raise AsrError(f"{source}: {class_name} does not take these arguments ({error}).") from error


