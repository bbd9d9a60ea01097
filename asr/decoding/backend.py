"""The interface of search backends.

`asr.decoding.frame` is the algorithm in plain torch. A backend computes the same with numba or Triton, bit for bit. A
`FrameBackend` does the parts of a frame before and after the language model; a `ChunkBackend` processes whole chunks in
one call. `asr.decoding.selection.select_backend` chooses.

Shapes: N streams, T frames, C tokens, K active tokens, A candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from asr.decoding.backtrace import Backtrace
from asr.decoding.lattice import LatticeRecords
from asr.decoding.tokens import ActiveTokens, Candidates, Expansion, Survivors


class Frame(NamedTuple):
    """One frame of all streams.

    Attributes:
        log_prob: scaled log-probabilities of all streams and frames, flattened.
        begin: (N,) int64, where each stream's frame begins in `log_prob`.
        score_offset: (N,) float64, added to relative scores to give absolute ones; changed in place.
    """

    log_prob: Tensor
    begin: Tensor
    score_offset: Tensor


class FrameBackend(Protocol):
    """One frame of the search without the language model; the reference is `asr.decoding.frame.TorchFrameBackend`."""

    def expand(self, tokens: ActiveTokens, frame: Frame, *, prune: bool = True) -> Expansion:
        """Extends tokens over the arcs that leave their states.

        Args:
            tokens: grouped by stream; `stream` indexes the rows of the frame.
            frame: the best score of each stream is added to its `score_offset`.
            prune: whether candidates far below the best may be left out.

        Returns:
            With a language model, the candidates whose words it must score. Without one, at least all survivors.
        """

    def recombine_and_prune(self, candidates: Candidates) -> Survivors:
        """Keeps the best candidate of each (stream, state, context), and prunes these by beam and limits."""


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
    """A search over whole chunks."""

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """Tokens before the chunk -> tokens after each stream's last frame.

        Args:
            tokens: grouped by stream; `stream` indexes the rows of the chunk.
            chunk: `score_offset` is changed in place.
            sink: receives backpointers and losing arcs.
        """


@dataclass(frozen=True)
class Backend:
    """The backend of one search. It belongs to one graph and one language model, and to one thread at a time.

    Args:
        frame: processes single frames.
        chunk: processes whole chunks; None to process the frames of a chunk one by one with `frame`.
    """

    frame: FrameBackend
    chunk: ChunkBackend | None = None
