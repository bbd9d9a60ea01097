"""What a backend of the search provides, and what it is given.

`asr.decoding.frame` is the algorithm in plain torch. A backend does the same with numba or Triton, bit for bit: a
`FrameBackend` the parts of one frame before and after the language model, a `ChunkBackend` whole chunks in one call.
`asr.decoding.selection.select_backend` chooses.

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
        log_prob: scaled log-probabilities of all streams and frames, flat.
        begin: (N,) int64, where the stream's frame begins in `log_prob`.
        score_offset: (N,) float64, what relative scores lack; changed in place.
    """

    log_prob: Tensor
    begin: Tensor
    score_offset: Tensor


class FrameBackend(Protocol):
    """A frame of the search, but for the language model; the reference is `asr.decoding.frame.TorchFrameBackend`."""

    def expand(self, tokens: ActiveTokens, frame: Frame, *, prune: bool = True) -> Expansion:
        """Extends tokens over the arcs that leave their states.

        Args:
            tokens: those of a stream side by side, `stream` numbering the rows of the frame.
            frame: the best score of each stream is added to its `score_offset`.
            prune: whether candidates far behind the best may be left out.

        Returns:
            With a language model, the candidates that it is to be asked about. Without one, at least all that survive.
        """

    def recombine_and_prune(self, candidates: Candidates) -> Survivors:
        """Keeps the best candidate of each (stream, state, context), and of these what the beam and limits allow."""


class Chunk(NamedTuple):
    """Frames of some streams.

    Attributes:
        log_prob: (N, T, C) float32, scaled.
        num_frames: (N,) int64, how many of the T frames are the stream's.
        score_offset: (N,) float64, what relative scores lack; changed in place.
    """

    log_prob: Tensor
    num_frames: Tensor
    score_offset: Tensor


@dataclass(frozen=True)
class SearchSink:
    """Where a search writes what it has done.

    Args:
        backtrace: takes the back-pointers.
        lattice: takes the losing arcs of whole utterances, or None.
        collect: to be called now and then, and wherever the backtrace is due for collection, with all living tokens in
            any number of parts. It tells the language model which contexts are held and may renumber back-pointers.
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
            tokens: those of a stream side by side, `stream` numbering the rows of the chunk.
            chunk: `score_offset` is changed in place.
            sink: takes back-pointers and losing arcs.
        """


@dataclass(frozen=True)
class Backend:
    """How one search runs. It belongs to one graph and one language model, and to one thread at a time.

    Args:
        frame: runs single frames.
        chunk: runs whole chunks; None where the frames of a chunk go through `frame` one by one.
    """

    frame: FrameBackend
    chunk: ChunkBackend | None = None
