"""A recurrent language model as a folder: `network.json`, `network.safetensors`, `words.txt`; no Lightning needed."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path

from asr.errors import AsrError
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.serialization import (
    LANGUAGE_MODEL_CLASSES,
    atomic_folder,
    build_network,
    checksums,
    load_weights,
    read_checkpoint,
    read_description,
    require_finite,
    require_intact,
    save_weights,
    sealed,
)
from asr.text.symbols import Vocabulary

_FORMAT = 1
_FILES = "network.safetensors", "words.txt"
NETWORK_FILES = ("network.json", *_FILES)


def save_network(
    network: RNNLanguageModel, folder: Path, *, half_precision: bool = True, num_maxent_weights: int | None = None
) -> None:
    """Writes a network, all files or none; `num_maxent_weights` keeps only that many n-gram weights, the largest.

    Raises:
        AsrError: the folder cannot be written; an earlier network there is left unchanged.
    """
    network = copy.deepcopy(network)
    maxent = network.maxent
    if maxent is not None and num_maxent_weights is not None:
        maxent.prune(num_maxent_weights)
    with atomic_folder(folder) as partial:
        network.vocabulary.save(partial / "words.txt")
        save_weights(network, partial / "network.safetensors", half_precision)
        description = {"format": _FORMAT, "class": "RnnLm", "arguments": asdict(network.config)}
        description["files"] = checksums(partial, _FILES)
        (partial / "network.json").write_text(json.dumps(sealed(description), indent=2) + "\n", encoding="utf-8")


def load_network(folder: str | Path) -> RNNLanguageModel:
    """Reads what `save_network` wrote, in float32, ready to score.

    Raises:
        AsrError: a file is missing, damaged, or does not fit the others.
    """
    folder = Path(folder)
    path = folder / "network.json"
    try:
        description = read_description(path, "language model")
        class_name, arguments = description["class"], dict(description["arguments"])
        files = dict(description.get("files", {}))  # exports of earlier versions have none
    except (ValueError, KeyError, TypeError) as error:
        raise AsrError(f"{path}: not the description of a language model ({error}); export it again.") from error
    for name, expected in files.items():
        require_intact(folder / name, expected, "language model")
    vocabulary, weights = Vocabulary.from_file(folder / "words.txt"), folder / "network.safetensors"
    network = build_network(class_name, arguments, LANGUAGE_MODEL_CLASSES, str(path), vocabulary, weights).network
    assert isinstance(network, RNNLanguageModel)
    load_weights(network, weights)
    return network.eval()


def read_network(path: str | Path) -> RNNLanguageModel:
    """Reads a network from its folder, or from a Lightning checkpoint of `LitRNNLM`.

    Raises:
        AsrError: the path is neither of these, or it is damaged.
    """
    return load_network(path) if Path(path).is_dir() else network_from_checkpoint(path)


def network_from_checkpoint(path: str | Path) -> RNNLanguageModel:
    """The network of a Lightning checkpoint of `LitRNNLM`, read without Lightning.

    Raises:
        AsrError: the file is not such a checkpoint.
    """
    checkpoint = read_checkpoint(path)
    try:
        network = RNNLanguageModel(
            Vocabulary(checkpoint["rnn_lm_words"], name=str(path)), RNNLMConfig(**checkpoint["rnn_lm_config"])
        )
        prefix, state = "network.", checkpoint["state_dict"]
        state = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        network.load_state_dict(state)
    except (KeyError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise AsrError(f"{path}: not a checkpoint of a recurrent language model ({error}).") from error
    require_finite(state, Path(path))
    return network.eval()
