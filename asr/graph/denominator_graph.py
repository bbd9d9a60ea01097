"""The denominator graph of lattice-free MMI as arrays and as a file.

Training creates it (`asr.models.chain_preparation`). A bundle that contains one can adapt its acoustic model to a
speaker (`asr.models.adaptation`).

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

from asr.errors import AsrError, in_one_line
from asr.serialization import checksum_of_tensors, load_arrays, open_atomic

_CHECKSUM = "sha256"
FloatArray = npt.NDArray[np.float32]


class DenominatorGraph(NamedTuple):
    """A hidden Markov model whose states read one column in their first frame, and one in all further frames.

    Attributes:
        entry: (S,) int64, the column that arcs to a state from other states read.
        loop: (S,) int64, the column that a state's self-loop reads.
        stay: (S,) float32, the probability of the self-loop.
        begin: (S + 1,) int64; the arcs to state s from other states are `begin[s] : begin[s + 1]`.
        source: (A,) int64, the source state of each arc.
        probability: (A,) float32, of each arc.
        initial: (S,) float32, the probability of each state before a segment's first frame; sums to 1.
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
        """The destination state of each arc, (A,)."""
        return np.repeat(np.arange(self.num_states), np.diff(self.begin))

    @property
    def num_columns(self) -> int:
        """The minimum number of columns of the acoustic model."""
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
        expected = None  # NumPy archives have their own checksums; files of earlier versions have none
        try:
            if path.suffix == ".npz":
                archive = load_arrays(path)
                arrays: dict[str, Any] = {name: archive[name] for name in cls._fields}
            else:
                with safe_open(path, framework="np") as file:
                    arrays = {name: file.get_tensor(name) for name in cls._fields}
                    expected = (file.metadata() or {}).get(_CHECKSUM)
            graph = cls(**arrays)
            reason = graph._misfit()
            if not reason and expected is not None and expected != graph._checksum():
                reason = "it does not match its checksum, so it is damaged"
        except Exception as error:  # readers of a damaged archive may raise anything
            reason = in_one_line(error)
        if reason:
            raise AsrError(
                f"{path}: the file is not a valid denominator graph ({reason}); use one that `asr chain` wrote."
            )
        return graph

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self._asdict().items()}

    def _checksum(self) -> str:
        return checksum_of_tensors("", self._tensors())

    def _misfit(self) -> str:
        """Why the arrays are not a valid graph, or an empty string if they are; compiled loops do not check them."""
        for name, array in self._asdict().items():
            wanted = np.float32 if name in ("stay", "probability", "initial") else np.int64
            if array.ndim != 1 or array.dtype != wanted:
                return f"{name} is not a one-dimensional array of {np.dtype(wanted)}"
        num_states, num_arcs = len(self.initial), len(self.source)
        if not num_states or any(len(each) != num_states for each in (self.entry, self.loop, self.stay)):
            return "its arrays have different numbers of states"
        if len(self.begin) != num_states + 1 or len(self.probability) != num_arcs:
            return "its arrays have different numbers of arcs"
        if self.begin[0] != 0 or self.begin[-1] != num_arcs or (np.diff(self.begin) < 0).any():
            return "begin does not increase"
        if num_arcs and not (self.source.min() >= 0 and self.source.max() < num_states):
            return "the source of an arc is not a state"
        if min(self.entry.min(), self.loop.min()) < 0:
            return "a column is negative"
        scores = np.concatenate((self.stay, self.probability, self.initial))
        if not np.isfinite(scores).all() or scores.min() < 0.0 or scores.max() > 1.0 + 1e-3:
            return "a probability is not between 0 and 1"
        return ""
