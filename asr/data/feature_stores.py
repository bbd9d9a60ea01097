"""Features kept between epochs, in memory or in a folder, so that they are computed once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.whole_file import whole_path

_CONFIG_NAME = "fbank.json"


class FeatureStore(Protocol):
    """Features (T, F) by name."""

    def get(self, key: str) -> Tensor | None:
        """The features, or None where they are not kept."""

    def put(self, key: str, features: Tensor) -> None:
        """Keeps them, if there is room."""


class FeatureMemory:
    """Features in this process's memory.

    Args:
        gigabytes: how much to keep at most.
    """

    def __init__(self, gigabytes: float) -> None:
        self._features: dict[str, Tensor] = {}
        self._bytes = 0
        self.limit_gigabytes(gigabytes)

    def limit_gigabytes(self, gigabytes: float) -> None:
        """Changes how much to keep from now on."""
        self._limit = gigabytes * 2**30

    def __len__(self) -> int:
        return len(self._features)

    def get(self, key: str) -> Tensor | None:
        return self._features.get(key)

    def put(self, key: str, features: Tensor) -> None:
        size = features.numel() * features.element_size()
        if key not in self._features and self._bytes + size <= self._limit:
            self._features[key] = features
            self._bytes += size


class FeatureFolder:
    """Features as float32 `.npy` files, shared by any number of processes and runs.

    Args:
        folder: made if need be.
        config: what the features are made with; a folder made with something else is refused.

    Raises:
        AsrError: the folder was made with another configuration, or cannot be made.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        wanted = json.dumps(dict(config), sort_keys=True)
        config_path = self.folder / _CONFIG_NAME
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not config_path.exists():
                config_path.write_text(wanted, encoding="utf-8")
            found = config_path.read_text(encoding="utf-8")
        except OSError as error:
            raise AsrError(f"{folder}: the feature folder cannot be used ({error.strerror}); name another.") from error
        if found != wanted:
            raise AsrError(f"{folder}: holds features made with {found}, not {wanted}; name another feature_dir.")

    def get(self, key: str) -> Tensor | None:
        try:
            return torch.from_numpy(np.load(self._path(key)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise AsrError(
                f"{self._path(key)}: the stored features are damaged ({error}); delete that file."
            ) from error

    def put(self, key: str, features: Tensor) -> None:
        path = self._path(key)
        with whole_path(path) as partial:
            path.parent.mkdir(exist_ok=True)
            np.save(partial, features.numpy())

    def _path(self, key: str) -> Path:
        # 256 folders: a corpus has hundreds of thousands of utterances, and their ids may hold a slash.
        digest = hashlib.sha1(key.encode()).hexdigest()
        return self.folder / digest[:2] / f"{key.replace('/', '_')}-{digest[2:10]}.npy"
