"""The interface of searches over whole chunks: the frames that they get, and where they write their records.

`asr.decoding.backend` has what all backends share. One may search a chunk in one call, or frame by frame with
`asr.decoding.frame.FrameSearch`.

Shapes: N streams, T frames, C tokens of the acoustic model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from asr.decoding.backend import ActiveTokens
from asr.decoding.backtrace import Backtrace
from asr.decoding.lattice_records import LatticeRecords


class Chunk(NamedTuple):
    """Several frames of all streams.

    Attributes:
        log_prob: (N, T, C) float32, scaled.
        num_frames: (N,) int64, number of valid frames of each stream.
        score_offset: (N,) float64, added to relative scores to give absolute ones; changed in place.
    """

    log_prob: Tensor
    num_frames: Tensor
    score_offset: Tensor


@dataclass(frozen=True)
class SearchSink:
    """Where a search writes its records.

    Args:
        backtrace: stores the backpointers.
        lattice: stores the losing arcs of whole utterances; None to keep none.
        collect: to be called from time to time, and whenever the backtrace is due for garbage collection, with all
            active tokens in any number of parts. It tells the language model which contexts are in use, and may
            renumber backpointers.
        is_end: (N,) bool on a CPU, whether a stream whose lattice is kept ends with the chunk; None if all do.
    """

    backtrace: Backtrace
    lattice: LatticeRecords | None
    collect: Callable[[list[ActiveTokens]], None]
    is_end: Tensor | None = None


class ChunkBackend(Protocol):
    """A search over whole chunks, for one graph and one language model, used by one thread at a time.

    `asr.decoding.frame.FrameSearch` makes one of a `FrameBackend`.
    """

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """Tokens before the chunk -> tokens after each stream's last frame.

        Args:
            tokens: grouped by stream; `stream` indexes the rows of the chunk.
            chunk: `score_offset` is changed in place.
            sink: receives backpointers and losing arcs.
        """
