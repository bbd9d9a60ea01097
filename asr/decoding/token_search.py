"""Token passing over many streams at once, fed in chunks of any size.

Shapes: N streams, T frames, C acoustic tokens, K partial paths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.decoding.backend import Chunk, ChunkBackend, SearchSink
from asr.decoding.backtrace import Backtrace
from asr.decoding.frame import FrameStep
from asr.decoding.interface import DecodingOptions
from asr.decoding.lattice import LatticeRecords
from asr.decoding.search_graph import Searchable
from asr.decoding.selection import chunk_reader, lm_chunk_reader
from asr.decoding.tokens import ActiveTokens
from asr.lm.interface import LanguageModel

_FRAMES_BETWEEN_MARKS = 16


class TokenSearch:
    """The search behind the torch pass; streams may join and leave between chunks.

    Args:
        graph: the prepared graph, or a lattice made ready in its stead.
        options: beams and scales.
        lm: language model that takes part in the search, or None.
        backtrace: where the paths are remembered.
        lattice: where the alternatives are remembered, or None.
        form: in which form frames run, see `TokenPassingDecoder`.
        reader: what reads whole chunks without a language model, made before for a search of the same graph and options
            that has ended, or None.
        held: (H,) int64, contexts that others hold, which the language model shall not forget for this search.
    """

    def __init__(
        self,
        graph: Searchable,
        options: DecodingOptions,
        lm: LanguageModel | None,
        backtrace: Backtrace,
        lattice: LatticeRecords | None = None,
        form: str = "auto",
        reader: ChunkBackend | None = None,
        held: Tensor | None = None,
    ) -> None:
        self._am_scale = options.am_scale
        self._lm = lm
        self._held = () if held is None else (held,)
        self._backtrace = backtrace
        self._lattice = lattice
        self._step = FrameStep(graph, options, lm, backtrace, lattice, form)
        self.reader = reader
        if lm is not None:
            self.reader = lm_chunk_reader(form, graph, options, lm, lattice is not None)
        elif reader is None:
            self.reader = chunk_reader(form, graph, options, lattice is not None)
        self._device = graph.final_score.device
        self._tokens = ActiveTokens.none(self._device)
        self._score_offset = torch.zeros(0, dtype=torch.float64, device=self._device)
        self._free_streams: list[int] = []

    def start(self, state: Tensor) -> Tensor:
        """Adds streams that have read nothing yet, state (N,) int64 where each begins -> their numbers (N,) int64."""
        num_streams = len(state)
        num_new = max(0, num_streams - len(self._free_streams))
        self._free_streams += range(len(self._score_offset), len(self._score_offset) + num_new)
        self._score_offset = torch.cat([self._score_offset, self._score_offset.new_zeros(num_new)])
        chosen, self._free_streams = self._free_streams[:num_streams], self._free_streams[num_streams:]
        stream = torch.tensor(chosen, dtype=torch.int64, device=self._device)
        self._score_offset[stream] = 0.0
        context_idx = torch.zeros_like(stream) if self._lm is None else self._lm.start(num_streams)
        tokens = ActiveTokens.starting(torch.arange(num_streams, device=self._device), state, context_idx)
        offset = self._score_offset.new_zeros(num_streams)
        tokens = self._step.follow_epsilons(tokens, offset)
        self._score_offset[stream] += offset
        tokens.stream = stream.index_select(0, tokens.stream)
        self._tokens = ActiveTokens.join([self._tokens, tokens])
        return stream

    def advance(self, stream: Tensor, log_prob: Tensor, num_frames: Tensor) -> None:
        """Reads a chunk.

        Args:
            stream: (N,) int64, distinct.
            log_prob: (N, T, C) float32.
            num_frames: (N,) int64.
        """
        max_frames, num_columns = log_prob.shape[1:]
        log_prob = log_prob * self._am_scale
        flat = log_prob.reshape(-1)
        row_begin = torch.arange(len(stream), device=self._device) * (max_frames * num_columns)
        row_of = torch.full_like(self._score_offset, -1, dtype=torch.int64)
        row_of[stream] = torch.arange(len(stream), device=self._device)
        row = row_of.index_select(0, self._tokens.stream)
        waiting = [self._tokens.select((row < 0).nonzero().squeeze(1))]
        chosen = (row >= 0).nonzero().squeeze(1)
        tokens = self._tokens.select(chosen)
        tokens.stream = row.index_select(0, chosen)
        offset = self._score_offset.index_select(0, stream)
        if self.reader is not None:
            with torch.cuda.device_of(offset):
                traces = SearchSink(self._backtrace, self._lattice, lambda parts: self._tell([*waiting, *parts]))
                tokens = self.reader.read(tokens, Chunk(log_prob, num_frames, offset), traces)
            max_frames = 0
        ends = set(num_frames.tolist())
        for frame in range(max_frames):
            if frame in ends:
                going = num_frames.index_select(0, tokens.stream) > frame
                done = tokens.select((~going).nonzero().squeeze(1))
                done.stream = stream.index_select(0, done.stream)
                waiting.append(done)
                tokens = tokens.select(going.nonzero().squeeze(1))
            if not len(tokens):
                break
            if self._backtrace.is_due or frame % _FRAMES_BETWEEN_MARKS == 0:
                self._tell([*waiting, tokens])
            tokens = self._step.read(tokens, flat, row_begin + frame * num_columns, offset)
        tokens.stream = stream.index_select(0, tokens.stream)
        self._score_offset[stream] = offset
        self._tokens = ActiveTokens.join([*waiting, tokens])

    def alive(self, stream: int) -> tuple[ActiveTokens, float]:
        """What is alive in a stream, and what is to be added to its relative scores."""
        tokens = self._tokens.select((self._tokens.stream == stream).nonzero().squeeze(1))
        return tokens, float(self._score_offset[stream])

    def alive_in_all(self) -> list[tuple[ActiveTokens, float]]:
        """`alive` of each stream that has been started, in order of their numbers."""
        positions = self._tokens.by_stream(len(self._score_offset))
        return [
            (self._tokens.select(position), offset)
            for position, offset in zip(positions, self._score_offset.tolist(), strict=True)
        ]

    def keep(self, stream: int, kept: Tensor) -> None:
        """Drops those that are alive in a stream but not kept; (K,) bool in the order of `alive`."""
        others = (self._tokens.stream != stream).nonzero().squeeze(1)
        own = (self._tokens.stream == stream).nonzero().squeeze(1)
        self._tokens = self._tokens.select(torch.cat([others, own[kept]]))

    def drop(self, stream: int) -> None:
        """Forgets a stream; its number may be given to another."""
        self._tokens = self._tokens.select((self._tokens.stream != stream).nonzero().squeeze(1))
        self._free_streams.append(stream)

    def _tell(self, parts: list[ActiveTokens]) -> None:
        """Tells the language model and the back-pointers, where these are due, what is alive."""
        if self._lm is not None:
            self._lm.retain(torch.cat([*(part.context_idx for part in parts), *self._held]))
        if self._backtrace.is_due:
            records = self._backtrace.collect(torch.cat([part.record for part in parts]))
            for part, record in zip(parts, torch.split(records, [len(part) for part in parts]), strict=True):
                part.record = record
