"""Token passing over many streams at once, fed in chunks of any size.

Shapes: N streams of a call, T frames, C acoustic tokens, K active tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asr.decoding.backend import ActiveTokens, Backend, Chunk, Searchable, SearchSink
from asr.decoding.backtrace import Backtrace
from asr.decoding.frame import FrameSearch
from asr.decoding.interface import DecodingOptions
from asr.decoding.lattice import LatticeRecords
from asr.decoding.selection import select_backend
from asr.lm.interface import LanguageModel


class TokenSearch:
    """A search whose streams may join and leave between chunks.

    Args:
        graph: the prepared graph, or a prepared lattice.
        options: beams and scales.
        lm: language model inside the search, or None.
        backtrace: stores the backpointers.
        lattice: stores the losing arcs, or None.
        backend: a backend made for the same graph, options, language model and lattice setting, which no other search
            uses at the same time; None selects one.
        held: (H,) int64, contexts in use elsewhere, which the language model must not forget because of this search.
    """

    def __init__(
        self,
        graph: Searchable,
        options: DecodingOptions,
        lm: LanguageModel | None,
        backtrace: Backtrace,
        lattice: LatticeRecords | None = None,
        *,
        backend: Backend | None = None,
        held: Tensor | None = None,
    ) -> None:
        self._am_scale = options.am_scale
        self._lm = lm
        self._held = () if held is None else (held,)
        self._backtrace = backtrace
        self._lattice = lattice
        if backend is None:
            backend = select_backend(graph, options, lm, keep_lattice=lattice is not None)
        self._frames = FrameSearch(graph, options, lm, backend.frame)
        self._chunks = self._frames if backend.chunk is None else backend.chunk
        self._device = graph.final_score.device
        self._tokens = ActiveTokens.empty(self._device)
        self._score_offset = torch.zeros(0, dtype=torch.float64, device=self._device)
        self._free_streams: list[int] = []

    def start(self, state: Tensor) -> Tensor:
        """Opens streams that begin in the given states (N,) int64 -> their numbers (N,) int64."""
        num_streams = len(state)
        num_new = max(0, num_streams - len(self._free_streams))
        self._free_streams += range(len(self._score_offset), len(self._score_offset) + num_new)
        self._score_offset = torch.cat([self._score_offset, self._score_offset.new_zeros(num_new)])
        chosen, self._free_streams = self._free_streams[:num_streams], self._free_streams[num_streams:]
        stream = torch.tensor(chosen, dtype=torch.int64, device=self._device)
        self._score_offset[stream] = 0.0
        context_idx = torch.zeros_like(stream) if self._lm is None else self._lm.start(num_streams)
        tokens = ActiveTokens.initial(torch.arange(num_streams, device=self._device), state, context_idx)
        score_offset = self._score_offset.new_zeros(num_streams)
        tokens = self._frames.follow_epsilons(tokens, score_offset, self._backtrace)
        self._score_offset[stream] += score_offset
        tokens.stream = stream.index_select(0, tokens.stream)
        self._tokens = ActiveTokens.join([self._tokens, tokens])
        return stream

    def resume(self, tokens: ActiveTokens, num_streams: int) -> Tensor:
        """Begins a search that has no streams yet with tokens of streams 0 to N - 1 -> these numbers, (N,) int64."""
        self._score_offset = torch.zeros(num_streams, dtype=torch.float64, device=self._device)
        self._tokens = tokens
        return torch.arange(num_streams, device=self._device)

    def advance(self, stream: Tensor, log_prob: Tensor, num_frames: Tensor, *, is_end: Tensor | None = None) -> None:
        """Searches a chunk.

        Args:
            stream: (N,) int64, distinct.
            log_prob: (N, T, C) float32.
            num_frames: (N,) int64.
            is_end: see `SearchSink`.
        """
        row_of = torch.full_like(self._score_offset, -1, dtype=torch.int64)
        row_of[stream] = torch.arange(len(stream), device=self._device)
        row = row_of.index_select(0, self._tokens.stream)
        if len(stream) == len(self._score_offset) - len(self._free_streams):
            # All open streams advance: no search for their tokens, for which the host would wait for a GPU.
            waiting, tokens = ActiveTokens.empty(self._device), replace(self._tokens, stream=row)
        else:
            waiting = self._tokens.select((row < 0).nonzero().squeeze(1))
            chosen = (row >= 0).nonzero().squeeze(1)
            tokens = self._tokens.select(chosen)
            tokens.stream = row.index_select(0, chosen)
        chunk = Chunk(log_prob * self._am_scale, num_frames, self._score_offset.index_select(0, stream))
        sink = SearchSink(self._backtrace, self._lattice, lambda parts: self._collect([waiting, *parts]), is_end)
        tokens = self._chunks.search(tokens, chunk, sink)
        tokens.stream = stream.index_select(0, tokens.stream)
        self._score_offset[stream] = chunk.score_offset
        self._tokens = ActiveTokens.join([waiting, tokens])

    def alive(self, stream: int) -> tuple[ActiveTokens, float]:
        """A stream's active tokens, and the offset that makes their scores absolute."""
        tokens = self._tokens.select((self._tokens.stream == stream).nonzero().squeeze(1))
        return tokens, float(self._score_offset[stream])

    def alive_in_all(self) -> tuple[ActiveTokens, Tensor]:
        """The active tokens of all streams, and the score offset of each stream, (N,) float64."""
        return self._tokens, self._score_offset

    def keep(self, stream: int, kept: Tensor) -> None:
        """Drops a stream's tokens that are not kept; (K,) bool in the order of `alive`."""
        others = (self._tokens.stream != stream).nonzero().squeeze(1)
        own = (self._tokens.stream == stream).nonzero().squeeze(1)
        self._tokens = self._tokens.select(torch.cat([others, own[kept]]))

    def drop(self, stream: int) -> None:
        """Closes a stream; its number may be reused."""
        self._tokens = self._tokens.select((self._tokens.stream != stream).nonzero().squeeze(1))
        self._free_streams.append(stream)

    def _collect(self, parts: list[ActiveTokens]) -> None:
        """Tells the language model which contexts are in use, and collects backpointers if that is due."""
        if self._lm is not None:
            self._lm.retain(torch.cat([*(part.context_idx for part in parts), *self._held]))
        if self._backtrace.is_due:
            living = torch.cat([part.backpointer for part in parts])
            backpointers = (
                self._backtrace.collect(living)
                if self._lattice is None
                else self._lattice.collect(self._backtrace, living)
            )
            for part, own in zip(parts, torch.split(backpointers, [len(part) for part in parts]), strict=True):
                part.backpointer = own
