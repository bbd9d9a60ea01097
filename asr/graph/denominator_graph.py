"""The denominator graph of lattice-free MMI as arrays and as a file.

Training makes one (`asr.models.denominator`), and a bundle that has one can adapt its acoustic model to a speaker
(`asr.models.adaptation`).

Shapes: S states, A arcs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save

from asr.errors import AsrError
from asr.serialization import checksum_of_tensors, open_atomic

_CHECKSUM = "sha256"
FloatArray = npt.NDArray[np.float32]


class DenominatorGraph(NamedTuple):
    """A hidden Markov model whose states read one column on arrival and another, or the same, while they last.

    Attributes:
        entry: (S,) int64, the column read by every arc that leads to a state from another.
        loop: (S,) int64, the column read by the arc from a state to itself.
        stay: (S,) float32, the probability of that arc.
        begin: (S + 1,) int64; the arcs to state s from others are `begin[s] : begin[s + 1]`.
        source: (A,) int64, where an arc comes from.
        probability: (A,) float32.
        initial: (S,) float32, the state in front of a piece's first frame; sums to 1.
    """

    entry: npt.NDArray[np.int64]
    loop: npt.NDArray[np.int64]
    stay: FloatArray
    begin: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    probability: FloatArray
    initial: FloatArray

    @property
    def num_states(self) -> int:
        """S."""
        return len(self.initial)

    def target(self) -> npt.NDArray[np.int64]:
        """Where each arc leads, (A,)."""
        return np.repeat(np.arange(self.num_states), np.diff(self.begin))

    @property
    def num_columns(self) -> int:
        """The least number of columns that the acoustic model must have."""
        return int(max(self.entry.max(), self.loop.max())) + 1

    def save(self, path: Path) -> None:
        """Writes a safetensors file with a checksum."""
        with open_atomic(path) as file:
            file.write(save(self._tensors(), {_CHECKSUM: self._checksum()}))

    @classmethod
    def load(cls, path: Path) -> DenominatorGraph:
        """Reads the file that `save` wrote, or the `denominator.npz` of a training.

        Raises:
            AsrError: it cannot be read, does not match its checksum, or its arrays do not fit each other.
        """
        expected = None  # an archive of numpy has checksums of its own, files of earlier versions have none
        try:
            if path.suffix == ".npz":
                with np.load(path, allow_pickle=False) as archive:
                    arrays: dict[str, Any] = {name: archive[name] for name in cls._fields}
            else:
                with safe_open(path, framework="np") as file:
                    arrays = {name: file.get_tensor(name) for name in cls._fields}
                    expected = (file.metadata() or {}).get(_CHECKSUM)
            graph = cls(**arrays)
            reason = graph._misfit()
            if not reason and expected is not None and expected != graph._checksum():
                reason = "it does not match its checksum, so it is damaged"
        except Exception as error:  # a damaged archive raises whatever its reader stumbles over
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if reason:
            raise AsrError(f"{path}: no denominator graph can be read there ({reason}); take 'asr chain's.")
        return graph

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self._asdict().items()}

    def _checksum(self) -> str:
        return checksum_of_tensors("", self._tensors())

    def _misfit(self) -> str:
        """Why the arrays cannot be a graph; compiled loops trust them. Empty if they can."""
        for name, array in self._asdict().items():
            wanted = np.float32 if name in ("stay", "probability", "initial") else np.int64
            if array.ndim != 1 or array.dtype != wanted:
                return f"{name} is not a row of {np.dtype(wanted)}"
        num_states, num_arcs = len(self.initial), len(self.source)
        if not num_states or any(len(each) != num_states for each in (self.entry, self.loop, self.stay)):
            return "its states differ in number"
        if len(self.begin) != num_states + 1 or len(self.probability) != num_arcs:
            return "its arcs differ in number"
        if self.begin[0] != 0 or self.begin[-1] != num_arcs or (np.diff(self.begin) < 0).any():
            return "begin is not in order"
        if num_arcs and not (self.source.min() >= 0 and self.source.max() < num_states):
            return "an arc comes from no state"
        if min(self.entry.min(), self.loop.min()) < 0:
            return "a column is negative"
        scores = np.concatenate((self.stay, self.probability, self.initial))
        if not np.isfinite(scores).all() or scores.min() < 0.0 or scores.max() > 1.0 + 1e-3:
            return "a probability is none"
        return ""
