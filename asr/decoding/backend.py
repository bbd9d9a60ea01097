"""What reads frames in the place of tensor operations, with the same outcome.

Shapes: N streams, T frames, C tokens, K partial paths, A candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from asr.decoding.backtrace import Backtrace
from asr.decoding.lattice import LatticeRecords
from asr.decoding.tokens import ActiveTokens


class FrameBackend(Protocol):
    """What stands for the tensor operations of a frame."""

    def expand(
        self, tokens: ActiveTokens, log_prob: Tensor, frame_begin: Tensor, offset: Tensor, everything: bool = False
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Any]:
        """Arguments as of `FrameStep.read`, paths of a stream side by side.

        Returns:
            source, arc, stream, score of the candidates, (A,) each: with a language model those worth asking it about,
            without one perhaps only those near the best, unless `everything` is asked for; and whether they are all
            there are of a stream, (N,) for `keep`.
        """

    def keep(
        self, stream: Tensor, state: Tensor, context_idx: Tensor | None, score: Tensor, is_complete: Any
    ) -> tuple[Tensor, Tensor, bool]:
        """Candidates (A,) -> winner (A,), the positions of those that stay, and whether none that could is missing."""


class Chunk(NamedTuple):
    """Frames of some streams.

    Attributes:
        log_prob: (N, T, C) scaled.
        num_frames: (N,) int64, how many of the T frames are the stream's.
        offset: (N,) float64, what relative scores lack; changed in place.
    """

    log_prob: Tensor
    num_frames: Tensor
    offset: Tensor


@dataclass(frozen=True)
class SearchSink:
    """What remembers what a search has been through.

    Args:
        backtrace: takes the records.
        lattice: takes what else belongs to a lattice of utterances that end with the chunk, or None.
        collect: called now and then, always where the backtrace is due, with all that is alive, in any parts: may
            renumber their records.
    """

    backtrace: Backtrace
    lattice: LatticeRecords | None
    collect: Callable[[list[ActiveTokens]], None]


class ChunkBackend(Protocol):
    """What reads whole chunks at a time."""

    def read(self, tokens: ActiveTokens, chunk: Chunk, traces: SearchSink) -> ActiveTokens:
        """Reads a chunk.

        Args:
            tokens: what is alive, `stream` numbering the rows of the chunk, paths of a stream side by side.
            chunk: the frames.
            traces: what remembers.

        Returns:
            What is alive behind the last frames.
        """
