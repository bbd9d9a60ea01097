"""The search as a fixed sequence of kernels per frame that a CUDA graph can capture.

Frames run in buffers of a fixed size, and the host does not wait for the device. Entries that do not fit are dropped,
but counted. The host reads the counts after several frames, and if the buffers were too small, it repeats these frames
with larger ones. A language model inside the search does the same (`LanguageModel.reserve`).

Shapes: N streams, T frames, C tokens, K active tokens, D tokens of streams that have ended, A candidates,
R backpointers, W words queried in a frame. For buffers, these are capacities.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from asr.decoding.backend import ActiveTokens, ArcSet, Searchable
from asr.decoding.backtrace import Backtrace
from asr.decoding.chunk_backend import Chunk, ChunkBackend, SearchSink
from asr.decoding.gpu import frame, kernels
from asr.decoding.gpu.frame import ArcExpansion, FrameLimits, Recombination
from asr.decoding.gpu.losing_arcs import LosingArcBuffers
from asr.decoding.gpu.word_scores import WordScores
from asr.decoding.lattice_records import LatticeRecords
from asr.kernels.hash_table import marked_positions
from asr.lm.interface import LanguageModel


@dataclass(frozen=True)
class BufferSizes:
    """Capacities: streams N, frames T, columns C, paths K, ended paths D, arcs A, records R, losing arcs L, words W."""

    streams: int
    frames: int
    columns: int
    paths: int
    ended: int
    arcs: int
    records: int
    losing: int
    words: int = 0


@dataclass
class Reservation:
    """Calls of a language model that are reserved, see `LanguageModel.reserve`.

    Attributes:
        tensors: what the calls read and write.
        num_queries: number of queries of all calls; set by the search.
        had_room: whether there was room for them; set at the end.
    """

    tensors: tuple[Tensor, ...] = ()
    num_queries: int = 0
    had_room: bool = True


@dataclass(frozen=True)
class LmInside:
    """A language model inside the search.

    Args:
        lm: the language model.
        scale: weight of its scores.
        otherwise: the backend that goes on where the language model cannot be reserved.
    """

    lm: LanguageModel
    scale: float
    otherwise: ChunkBackend | None = None

    @contextlib.contextmanager
    def reserved(self, num_words: int) -> Iterator[Reservation | None]:
        """Reserves calls with this number of queries while it is entered; gives None if that is not possible."""
        tensors = self.lm.reserve(num_words)
        if tensors is None:
            yield None
            return
        reservation = Reservation(tensors)
        try:
            yield reservation
        finally:
            reservation.had_room = self.lm.release(reservation.num_queries)


class Rooms(NamedTuple):
    """Buffers have room for the fewest streams, or for this number times a power of the factor."""

    fewest: int = 8
    factor: int = 4


class FrameBuffers:
    """The buffers of a search, and the kernels of one frame.

    Args:
        arcs: the graph's arcs that read a frame.
        limits: beams and limits.
        sizes: capacities.
        keeps_all: whether to keep all possible candidates before recombination.
        margin: losing arcs with a score gap up to this are kept; None keeps none.
        inside: the language model, if the limits have one. Its calls must be reserved while frames are read.

    Attributes:
        log_prob: (N, T, C) float32, scaled log-probabilities; filled by the caller.
        num_frames: (N,) int64, number of frames of each stream, descending; filled by the caller.
        score_offset: (N,) float64, added to relative scores to give absolute ones.
        paths: stream, state (int32), score (float32), backpointer (int64), (K + D,) each; ended paths from K on.
        path_context, path_lm_score: (K + D,) int64 and float64, with a language model.
        counts: (NUM_COUNTS,) int64, see `kernels.NUM_COUNTS`.
        record_begin: (T,) int64, where each frame's records begin.
        previous, record_arc: (R,) int64, the backpointers.
        record_stream: (R,) int32, their streams, if losing arcs are kept; record_score (R,) float64, the scores of
            their words, if there is a language model as well.
        losing: the losing arcs, or None.
        words: the scores of words, or None.
    """

    def __init__(
        self,
        arcs: ArcSet,
        limits: FrameLimits,
        sizes: BufferSizes,
        keeps_all: bool,
        margin: float | None = None,
        inside: LmInside | None = None,
    ) -> None:
        device = arcs.score.device
        self.sizes = sizes
        self.keeps_all = keeps_all
        self._limits = limits
        self._expansion = ArcExpansion(arcs, limits, sizes.paths, sizes.arcs, sizes.streams)
        self._recombined = Recombination(limits, sizes.arcs, sizes.streams, device)

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.log_prob = torch.zeros(sizes.streams, sizes.frames, sizes.columns, dtype=torch.float32, device=device)
        self._frame_begin = torch.arange(sizes.streams, device=device) * (sizes.frames * sizes.columns)
        self.num_frames = zeros(sizes.streams, torch.int64)
        self.score_offset = zeros(sizes.streams, torch.float64)
        num_paths = sizes.paths + sizes.ended
        self.paths = (
            *(zeros(num_paths, torch.int32), zeros(num_paths, torch.int32)),
            *(zeros(num_paths, torch.float32), zeros(num_paths, torch.int64)),
        )
        self.counts = zeros(kernels.NUM_COUNTS, torch.int64)
        self.record_begin = zeros(sizes.frames, torch.int64)
        self.previous, self.record_arc = zeros(sizes.records, torch.int64), zeros(sizes.records, torch.int64)
        self.record_stream = zeros(0 if margin is None else sizes.records, torch.int32)
        self.losing = None if margin is None else LosingArcBuffers(limits, margin, self._expansion, sizes.losing)
        self.words: WordScores | None = None
        num_with_lm = 0
        if inside is not None:
            self.words = WordScores(arcs, limits, inside.lm, inside.scale, self._expansion, sizes.words)
            num_with_lm = num_paths
        self.path_context, self.path_lm_score = zeros(num_with_lm, torch.int64), zeros(num_with_lm, torch.float64)
        self.record_score = zeros(0 if inside is None else len(self.record_stream), torch.float64)
        num_tiles = self._expansion.num_tiles
        self._tile_count, self._tile_end = zeros(num_tiles, torch.int64), zeros(num_tiles, torch.int64)

    def count(self, which: int) -> Tensor:
        """A view of one of the counts, (1,)."""
        return self.counts[which : which + 1]

    def clear(self) -> None:
        """Empties all tables, whatever a failed frame has left in them."""
        self.counts.zero_()
        self._expansion.empty()
        self._recombined.empty()

    def read(self) -> None:
        """Searches the frame with the number in the counts, and advances the counts to the next one."""
        sizes, limits, found, ended = self.sizes, self._limits, self._expansion, self._recombined
        current = self.count(kernels.FRAME.value)
        found.run(
            self.paths,
            self.count(kernels.NUM_PATHS.value),
            self.log_prob,
            self._frame_begin,
            current,
            sizes.columns,
            self.keeps_all,
        )
        words = self.words
        if words is not None:
            words.run(self.path_context, self.path_lm_score, self.counts)
        context_idx = None if words is None else words.context_idx
        ended.run(found.stream, found.state, context_idx, found.score, found.num_kept)
        # With a language model, all candidates that might survive were kept.
        self._shift_offsets(found.best, limits.min_active if words is None else 0)
        if words is not None:
            self._shift_offsets(words.best, 0)
        kept = (ended.threshold, found.num_kept, sizes.arcs)
        kernels.count_stays[(found.num_tiles,)](
            *(ended.value, found.stream, *kept, self._tile_count),
            *(self.num_frames, current, self.count(kernels.NUM_GOING.value), found.arc, found.arc),
            HAS_ENDS=True,
            HAS_WORDS=False,
            B=limits.block,
        )
        torch.cumsum(self._tile_count, 0, out=self._tile_end)
        capacity = (sizes.paths, sizes.ended)
        kernels.compact_tokens[(found.num_tiles,)](
            *(found.stream, found.state, ended.value, found.backpointer, found.arc, *kept),
            *(self._tile_count, self._tile_end, self.num_frames, self.counts, *self.paths, *capacity),
            *(self.previous, self.record_arc, sizes.records, self.record_stream),
            found.backpointer if self.losing is None else self.losing.number,
            *((found.arc,) * 3 if words is None else (words.context_idx, words.lm_score, words.arc_score)),
            *(self.path_context, self.path_lm_score, self.record_score),
            KEEPS_LATTICE=self.losing is not None,
            HAS_LM=words is not None,
            B=limits.block,
        )
        if self.losing is not None:
            self.losing.run(found, ended, self.counts, None if words is None else words.arc_score)
        kernels.end_frame[(1,)](
            *(self.counts, self.record_begin, found.arcs_end, sizes.paths, self._tile_end, found.num_tiles),
            *(*capacity, sizes.records),
        )

    def _shift_offsets(self, best: Tensor, min_active: int) -> None:
        """Adds the best scores (N,) of the streams, as `ordered` integers, to their offsets."""
        limits, found, num_streams = self._limits, self._expansion, self.sizes.streams
        kernels.shift_offsets[triton.cdiv(num_streams, limits.block),](
            *(best, self.score_offset, self._recombined.num_inside, found.threshold),
            *(self.count(kernels.IS_SHORT.value), min_active, num_streams),
            B=limits.block,
        )


# At first there is room for a word in so many candidates.
_CANDIDATES_PER_WORD = 4

# Only one thread may capture at a time.
_capturing = threading.Lock()

# torch lends 32 streams of each priority in turn. A capture must not get the stream of another thread, whose work it
# would capture as well, so captures alone ask for this priority.
_CAPTURE_PRIORITY = -1


def new_capture_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream to capture in, for all captures of one search: cuBLAS keeps some memory for each stream that has used
    it, 32 MiB on the largest GPUs."""
    return torch.cuda.Stream(device, priority=_CAPTURE_PRIORITY)


class FrameReplay:
    """Runs the kernels of frames repeatedly: as a CUDA graph with one launch per frame, or one by one.

    Args:
        buffers: buffers without tokens, whose tensors must not be replaced.
        stream: where to capture a CUDA graph, a stream of `new_capture_stream`; None for no graph. If capturing fails,
            there is a warning, and the kernels are launched one by one, with the same results.
        tensors: what the frames read and write besides: those of the language model.
    """

    def __init__(self, buffers: FrameBuffers, stream: torch.cuda.Stream | None, tensors: Sequence[Tensor] = ()) -> None:
        self._buffers = buffers
        # They live as long as the graph, which may otherwise be replayed on memory that belongs to others.
        self._tensors = tensors
        self._graph = None if stream is None else self._captured(stream)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that it was made for."""
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))

    def read(self, num_frames: int) -> None:
        """Searches this many frames, without waiting for them."""
        for _ in range(num_frames):
            if self._graph is None:
                self._buffers.read()
            else:
                self._graph.replay()

    def _captured(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | None:
        graph, is_captured = torch.cuda.CUDAGraph(), True
        with _capturing:
            # Kernels are compiled and loaded at their first launch, which must not happen during the capture. What
            # fails here is no matter of capturing, and may have changed a language model.
            stream.wait_stream(torch.cuda.current_stream(self._buffers.counts.device))
            try:
                with torch.cuda.stream(stream):
                    self._buffers.read()
            finally:
                stream.synchronize()
            try:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self._buffers.read()
            except Exception as error:  # torch, the driver and Triton's compiler raise various types
                is_captured = False
                warnings.warn(
                    f"a frame could not be captured as a CUDA graph; its kernels are launched one by one: {error}",
                    stacklevel=3,
                )
        self._buffers.clear()
        return graph if is_captured else None


class CudaGraphSearch:
    """A `ChunkBackend` without input epsilons, in which the host rarely waits for the device.

    After `frames_per_call` frames, the host reads the counts. If the buffers were too small, it creates larger ones and
    repeats these frames, from a copy of the tokens before them. As streams end, the others move to smaller buffers,
    because the time of a kernel also depends on the room in its buffers.

    Args:
        graph: on the device of the search, without input epsilons.
        limits: beams and limits.
        capture: whether to capture frames as CUDA graphs; ignored without a GPU.
        frames_per_call: number of frames after which the host reads the counts.
        initial_capacity: first capacity of the buffers, `FIRST_CAPACITY` if None; they grow.
        margin: `asr.decoding.lattice_records.lattice_margin` if a lattice, which is one of whole utterances, is kept;
            None otherwise.
        rooms: for how many streams buffers have room.
        inside: the language model inside the search, if there is one.
    """

    def __init__(
        self,
        graph: Searchable,
        limits: FrameLimits,
        capture: bool = True,
        frames_per_call: int = 32,
        initial_capacity: int | None = None,
        margin: float | None = None,
        *,
        rooms: Rooms | None = None,
        inside: LmInside | None = None,
    ) -> None:
        initial_capacity = initial_capacity or frame.FIRST_CAPACITY
        self._margin = margin
        self._rooms = rooms or Rooms()
        self._frames_per_call = frames_per_call
        self._arcs = graph.emitting
        self._limits = limits
        self._inside = inside
        device = graph.final_score.device
        self._capture_stream = new_capture_stream(device) if capture and device.type == "cuda" else None
        self._initial_capacity = initial_capacity
        # By the number of streams that they have room for.
        self._sizes: dict[int, BufferSizes] = {}
        self._buffers: dict[int, dict[tuple[BufferSizes, bool], tuple[FrameBuffers, FrameReplay]]] = {}
        self.num_retries = 0

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.search`."""
        # Triton launches on the current device.
        with torch.cuda.device_of(chunk.log_prob):
            return self._search(tokens, chunk, sink)

    def _search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        (log_prob, num_frames, score_offset), backtrace = chunk, sink.backtrace
        order = torch.sort(num_frames, descending=True, stable=True).indices
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        num_frames, log_prob = num_frames[order], log_prob.index_select(0, order)
        if not len(order):
            return tokens
        reads = num_frames[rank[tokens.stream]] > 0
        *lengths, num_reading = torch.cat([num_frames, reads.sum(0, keepdim=True)]).tolist()
        longest = lengths[0]
        unread = tokens.select(marked_positions(~reads, len(tokens) - num_reading))
        tokens = tokens.select(marked_positions(reads, num_reading))
        tokens.stream = rank[tokens.stream]
        alive = tokens.select(torch.sort(tokens.stream, stable=True).indices)
        ended = ActiveTokens.empty(order.device)
        own_score_offset = score_offset[order]
        for begin in range(0, longest, self._frames_per_call):
            if not len(alive):
                break
            num_going, end = sum(length > begin for length in lengths), min(begin + self._frames_per_call, longest)
            some = Chunk(log_prob[:num_going, begin:end], num_frames[:num_going] - begin, own_score_offset[:num_going])
            first = backtrace.num_records
            read = self._read_at_once(alive, some, backtrace)
            if read is None:
                score_offset[order] = own_score_offset
                ended.stream = order[ended.stream]
                alive.stream = order[alive.stream]
                rest = Chunk(chunk.log_prob[:, begin:], (chunk.num_frames - begin).clamp(min=0), score_offset)
                return self._search_otherwise(alive, [unread, ended], rest, sink, begin)
            counts, buffers = read
            alive, newly_ended = (
                _tokens(buffers, 0, counts[kernels.NUM_PATHS.value]),
                _tokens(buffers, buffers.sizes.paths, counts[kernels.NUM_ENDED.value]),
            )
            if sink.lattice is not None:
                frames, records = range(begin, begin + some.log_prob.shape[1]), range(first, backtrace.num_records)
                self._add_losing(buffers, sink.lattice, frames, records, counts[kernels.NUM_LOSING.value], order)
            ended = ActiveTokens.join([ended, newly_ended])
            if backtrace.is_due or self._inside is not None:
                sink.collect([alive, ended, unread])
        score_offset[order] = own_score_offset
        ended = ActiveTokens.join([ended, alive])
        ended.stream = order[ended.stream]
        return ActiveTokens.join([unread, ended])

    def _read_at_once(
        self, alive: ActiveTokens, chunk: Chunk, backtrace: Backtrace
    ) -> tuple[list[int], FrameBuffers] | None:
        """Searches a few frames -> the counts, and the buffers, which still hold everything except the backpointers.

        None if the language model has no room for the frames.
        """
        log_prob, _, score_offset = chunk
        sizes, keeps_all = self._sizes_for(len(score_offset), log_prob.shape[2]), False
        sizes = _ensure_capacity(sizes, paths=len(alive))
        while True:
            with self._reserved(sizes.words) as reservation:
                if reservation is None:
                    return None
                buffers, replay = self._buffers_of(sizes, keeps_all, reservation, alive.context_idx[:1])
                self._fill(buffers, alive, chunk, backtrace.num_records)
                replay.read(log_prob.shape[1])
                # The only place where the host waits, apart from the language model's.
                counts = torch.cat([buffers.counts, buffers.record_begin]).tolist()
                reservation.num_queries = counts[kernels.NUM_QUERIES.value]
            counts, record_begin = counts[: kernels.NUM_COUNTS], counts[kernels.NUM_COUNTS :]
            enough = _ensure_capacity(
                sizes,
                arcs=counts[kernels.MOST_ARCS.value],
                paths=counts[kernels.MOST_PATHS.value],
                ended=counts[kernels.MOST_ENDED.value],
                records=counts[kernels.MOST_RECORDS.value],
                losing=counts[kernels.MOST_LOSING.value],
                words=counts[kernels.MOST_WORDS.value],
            )
            is_short = bool(counts[kernels.IS_SHORT.value])
            if enough == sizes and not is_short and reservation.had_room:
                break
            sizes, keeps_all = enough, keeps_all or is_short
            self.num_retries += 1
        self._sizes[sizes.streams] = sizes
        num_records = counts[kernels.NUM_RECORDS.value] - backtrace.num_records
        graph_arc = self._arcs.arc_of(buffers.record_arc[:num_records])
        backtrace.add_blocks(buffers.previous[:num_records], graph_arc, record_begin[: log_prob.shape[1]])
        score_offset.copy_(buffers.score_offset[: len(score_offset)])
        return counts, buffers

    def _reserved(self, num_words: int) -> contextlib.AbstractContextManager[Reservation | None]:
        return contextlib.nullcontext(Reservation()) if self._inside is None else self._inside.reserved(num_words)

    def _search_otherwise(
        self, alive: ActiveTokens, others: list[ActiveTokens], rest: Chunk, sink: SearchSink, begin: int
    ) -> ActiveTokens:
        """Searches the rest of a chunk, from frame `begin` on, with the other backend -> all tokens, `others` too."""
        assert self._inside is not None and self._inside.otherwise is not None, "there is no other backend"
        if sink.lattice is not None:
            sink.lattice.begin_chunk(begin)
        collecting = replace(sink, collect=lambda parts: sink.collect([*others, *parts]))
        alive = alive.select(torch.sort(alive.stream, stable=True).indices)
        return ActiveTokens.join([*others, self._inside.otherwise.search(alive, rest, collecting)])

    def _add_losing(
        self,
        buffers: FrameBuffers,
        lattice: LatticeRecords,
        frames: range,
        records: range,
        num_losing: int,
        order: Tensor,
    ) -> None:
        """Adds the records of some frames to the lattice; order (N,) maps the sorted streams to the original ones."""
        losing = buffers.losing
        assert losing is not None, "the search was made without a margin"
        utt_idx = order.index_select(0, buffers.record_stream[: len(records)].long())
        record = torch.arange(records.start, records.stop, device=order.device)
        begin = buffers.record_begin[: len(frames)]
        frame = frames.start + torch.searchsorted(begin, record, right=True)
        src, dst, arc, score_gap = (
            part[:num_losing].clone() for part in (losing.src, losing.dst, losing.arc, losing.score_gap)
        )
        lm_scores = None
        if self._inside is not None:
            lm_scores = buffers.record_score[: len(records)].clone(), losing.lm_score[:num_losing].clone()
        lattice.add_frames(utt_idx, frame, (src, dst, self._arcs.arc_of(arc), score_gap), lm_scores)

    def _sizes_for(self, num_streams: int, num_columns: int) -> BufferSizes:
        """Sizes for this many streams: those of the last call, or a share of those for another number of streams."""
        room = self._rooms.fewest
        while room < num_streams:
            room *= self._rooms.factor
        if room in self._sizes:
            return replace(self._sizes[room], columns=num_columns)
        num_words = 0 if self._inside is None else max(1, self._initial_capacity // _CANDIDATES_PER_WORD)
        sizes = BufferSizes(room, self._frames_per_call, num_columns, *(5 * (self._initial_capacity,)), num_words)
        if not self._sizes:
            return sizes
        known = self._sizes[min(self._sizes, key=lambda other: abs(other.bit_length() - room.bit_length()))]
        names = ("paths", "ended", "arcs", "records", "losing", "words")
        shares = {name: triton.next_power_of_2(getattr(known, name) * room // known.streams) for name in names}
        return replace(sizes, **{name: max(getattr(sizes, name), share) for name, share in shares.items()})

    def _buffers_of(
        self, sizes: BufferSizes, keeps_all: bool, reservation: Reservation, some_context: Tensor
    ) -> tuple[FrameBuffers, FrameReplay]:
        held, key = self._buffers.setdefault(sizes.streams, {}), (sizes, keeps_all)
        if key not in held:
            # Buffers of other sizes are no longer needed.
            held = self._buffers[sizes.streams] = {old: both for old, both in held.items() if old[0] == sizes}
            buffers = FrameBuffers(self._arcs, self._limits, sizes, keeps_all, self._margin, self._inside)
        else:
            buffers, replay = held[key]
        if buffers.words is not None:
            buffers.words.some_context.copy_(some_context)
        if key not in held or not replay.is_of(reservation.tensors):
            buffers.clear()
            held[key] = (buffers, FrameReplay(buffers, self._capture_stream, reservation.tensors))
        return held[key]

    @staticmethod
    def _fill(buffers: FrameBuffers, alive: ActiveTokens, chunk: Chunk, num_records: int) -> None:
        log_prob, num_frames, score_offset = chunk
        buffers.log_prob[: log_prob.shape[0], : log_prob.shape[1]] = log_prob
        buffers.num_frames.zero_()
        buffers.num_frames[: len(num_frames)] = num_frames
        buffers.score_offset.zero_()
        buffers.score_offset[: len(score_offset)] = score_offset
        for own, part in zip(buffers.paths, (alive.stream, alive.state, alive.score, alive.backpointer), strict=True):
            own[: len(part)] = part
        if buffers.words is not None:
            buffers.path_context[: len(alive)] = alive.context_idx
            buffers.path_lm_score[: len(alive)] = alive.lm_score
        buffers.counts.zero_()
        # A number that is assigned to a single element would be copied to the device, for which the host waits.
        buffers.count(kernels.NUM_PATHS.value).fill_(len(alive))
        buffers.count(kernels.NUM_RECORDS.value).fill_(num_records)
        buffers.count(kernels.FIRST_RECORD.value).fill_(num_records)


def _ensure_capacity(sizes: BufferSizes, **needed: int) -> BufferSizes:
    """Sizes with room for these numbers; those that grow become powers of two, with room to spare."""
    grown = {
        name: triton.next_power_of_2(2 * number) for name, number in needed.items() if number > getattr(sizes, name)
    }
    return replace(sizes, **grown)


def _tokens(buffers: FrameBuffers, begin: int, num: int) -> ActiveTokens:
    stream, state, score, backpointer = (part[begin : begin + num].clone() for part in buffers.paths)
    if buffers.words is None:
        context_idx = torch.zeros_like(backpointer)
        lm_score = context_idx.double()
    else:
        own = slice(begin, begin + num)
        context_idx, lm_score = buffers.path_context[own].clone(), buffers.path_lm_score[own].clone()
    return ActiveTokens(stream.long(), state.long(), context_idx, score, lm_score, backpointer)
