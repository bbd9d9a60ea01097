"""A whole frame in room of a fixed size, from paths to paths: a fixed list of kernels, which a CUDA graph may hold.

Nothing here waits for the device or asks it how many there are. What finds no room is left out and counted as needed,
so that whoever reads the counts later can take the frames once more in more room.

Shapes: K room for paths, D room for paths of streams that have ended, A room for candidates, N room for streams,
T frames, C tokens, R room for records.


Runs the kernels of a frame again and again: as a CUDA graph, one launch a frame, or one by one.

Reads whole chunks in rooms of fixed sizes: the host looks at the counts now and then, and makes more room at need.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from asr.decoding.backend import Chunk, SearchSink
from asr.decoding.backtrace import Backtrace
from asr.decoding.gpu import kernels
from asr.decoding.gpu.frame import ArcExpansion, FrameLimits, Recombined
from asr.decoding.search_graph import ArcSet, Searchable
from asr.decoding.tokens import ActiveTokens


@dataclass(frozen=True)
class Sizes:
    """How much there is room for.

    Args:
        streams, frames, columns: N, T, C.
        paths, ended, arcs, records: K, D, A, R.
    """

    streams: int
    frames: int
    columns: int
    paths: int
    ended: int
    arcs: int
    records: int


class FrameBuffers:
    """The room, and the kernels of a frame.

    Attributes:
        log_prob: (N, T, C) float32, to be filled: scaled log-probabilities.
        num_frames: (N,) int64, to be filled, descending: how many of them are the stream's.
        offset: (N,) float64, what relative scores lack.
        paths: stream, state (int32), score (float32), record (int64), (K + D,) each; those that have ended from K on.
        counts: (11,) int64, see `keeping`.
        record_begin: (T,) int64, where each frame's records begin.
        previous, record_arc: (R,) int64, the back-pointers.
    """

    def __init__(self, arcs: ArcSet, limits: FrameLimits, sizes: Sizes, keeps_all: bool) -> None:
        device = arcs.score.device
        self.sizes = sizes
        self.keeps_all = keeps_all
        self._limits = limits
        self._expansion = ArcExpansion(arcs, limits, sizes.paths, sizes.arcs, sizes.streams)
        self._recombined = Recombined(limits, sizes.arcs, sizes.streams, device)

        def room(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.log_prob = torch.zeros(sizes.streams, sizes.frames, sizes.columns, device=device)
        self._frame_begin = torch.arange(sizes.streams, device=device) * (sizes.frames * sizes.columns)
        self.num_frames = room(sizes.streams, torch.int64)
        self.offset = room(sizes.streams, torch.float64)
        num_paths = sizes.paths + sizes.ended
        self.paths = (
            *(room(num_paths, torch.int32), room(num_paths, torch.int32)),
            *(room(num_paths, torch.float32), room(num_paths, torch.int64)),
        )
        self.counts = room(kernels.NUM_COUNTS, torch.int64)
        self.record_begin = room(sizes.frames, torch.int64)
        self.previous, self.record_arc = room(sizes.records, torch.int64), room(sizes.records, torch.int64)
        num_tiles = self._expansion.num_tiles
        self._tile_count, self._tile_end = room(num_tiles, torch.int64), room(num_tiles, torch.int64)

    def count(self, which: int) -> Tensor:
        """One of the counts, (1,)."""
        return self.counts[which : which + 1]

    def read(self) -> None:
        """Reads the frame that the counts name, and lets them name the next one."""
        sizes, limits, found, ended = self.sizes, self._limits, self._expansion, self._recombined
        frame = self.count(kernels.FRAME.value)
        found.run(
            self.paths,
            self.count(kernels.NUM_PATHS.value),
            self.log_prob,
            self._frame_begin,
            frame,
            sizes.columns,
            self.keeps_all,
        )
        ended.run(found.stream, found.state, None, found.score, found.num_kept)
        kernels.shift_offsets[triton.cdiv(sizes.streams, limits.block),](
            *(found.best, self.offset, ended.num_inside, found.threshold, self.count(kernels.IS_SHORT.value)),
            *(limits.min_active, sizes.streams),
            B=limits.block,
        )
        kept = (ended.threshold, found.num_kept, sizes.arcs)
        kernels.count_stays[(found.num_tiles,)](
            *(ended.value, found.stream, *kept, self._tile_count),
            *(self.num_frames, frame, self.count(kernels.NUM_GOING.value)),
            HAS_ENDS=True,
            B=limits.block,
        )
        torch.cumsum(self._tile_count, 0, out=self._tile_end)
        room = (sizes.paths, sizes.ended)
        kernels.compact_tokens[(found.num_tiles,)](
            *(found.stream, found.state, ended.value, found.record, found.arc, *kept),
            *(self._tile_count, self._tile_end, self.num_frames, self.counts, *self.paths, *room),
            *(self.previous, self.record_arc, sizes.records),
            B=limits.block,
        )
        kernels.end_frame[(1,)](
            *(self.counts, self.record_begin, found.arcs_end, sizes.paths, self._tile_end, found.num_tiles),
            *(*room, sizes.records),
        )


# While a thread captures, no other may begin to.
_capturing = threading.Lock()


class FrameReplay:
    """Reads frames in a room.

    Args:
        room: must stay where it is; without paths in it.
        captures: whether to make a graph of a frame; on a GPU only. Where that fails, a warning says so, and the
            kernels are launched one by one, with the same outcome.
    """

    def __init__(self, room: FrameBuffers, captures: bool) -> None:
        self._room = room
        self._graph: torch.cuda.CUDAGraph | None = None
        if captures and room.counts.is_cuda:
            try:
                self._graph = self._captured()
            except RuntimeError as error:
                warnings.warn(
                    f"no CUDA graph could be made of a frame, kernels are launched one by one: {error}", stacklevel=2
                )

    def read(self, num_frames: int) -> None:
        """Reads so many frames of the room, without waiting for them."""
        for _ in range(num_frames):
            if self._graph is None:
                self._room.read()
            else:
                self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        device = self._room.counts.device
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        with _capturing:
            # Kernels are compiled and loaded at their first launch, which must not fall into the capture.
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._room.read()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._room.read()
        self._room.counts.zero_()
        return graph


_FRAMES_AT_ONCE = 32


_FIRST_ROOM = 1 << 12


class CudaGraphSearch:
    """The search without a language model, lattice or arcs that read nothing, which never asks how many there are.

    After `_FRAMES_AT_ONCE` frames the host reads the counts. Where there was too little room, it makes more and has
    these frames taken once more, from a copy of what was alive before them.

    Args:
        graph: where the search runs, without arcs that read nothing.
        limits: beams, for a search without a language model and lattice.
        captures: whether frames are captured as CUDA graphs, where there is a GPU.
    """

    def __init__(self, graph: Searchable, limits: FrameLimits, captures: bool = True) -> None:
        self._arcs = graph.emitting
        self._limits = limits
        self._captures = captures
        self._sizes = Sizes(1, _FRAMES_AT_ONCE, 1, _FIRST_ROOM, _FIRST_ROOM, _FIRST_ROOM, _FIRST_ROOM)
        self._rooms: dict[tuple[Sizes, bool], tuple[FrameBuffers, FrameReplay]] = {}
        self.num_retries = 0

    def read(self, tokens: ActiveTokens, chunk: Chunk, traces: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.read`."""
        (log_prob, num_frames, offset), backtrace = chunk, traces.backtrace
        order = torch.sort(num_frames, descending=True, stable=True).indices
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        num_frames, log_prob = num_frames[order], log_prob.index_select(0, order)
        reads = num_frames[rank[tokens.stream]] > 0
        unread = tokens.select((~reads).nonzero().squeeze(1))
        tokens = tokens.select(reads.nonzero().squeeze(1))
        tokens.stream = rank[tokens.stream]
        alive = tokens.select(torch.sort(tokens.stream, stable=True).indices)
        ended = ActiveTokens.none(order.device)
        own_offset = offset[order]
        longest = int(num_frames[0]) if len(num_frames) else 0
        for begin in range(0, longest, _FRAMES_AT_ONCE):
            if not len(alive):
                break
            some = Chunk(log_prob[:, begin : min(begin + _FRAMES_AT_ONCE, longest)], num_frames - begin, own_offset)
            alive, newly_ended = self._read_at_once(alive, some, backtrace)
            ended = ActiveTokens.join([ended, newly_ended])
            if backtrace.is_due:
                traces.collect([alive, ended, unread])
        offset[order] = own_offset
        ended = ActiveTokens.join([ended, alive])
        ended.stream = order[ended.stream]
        return ActiveTokens.join([unread, ended])

    def _read_at_once(
        self, alive: ActiveTokens, chunk: Chunk, backtrace: Backtrace
    ) -> tuple[ActiveTokens, ActiveTokens]:
        """A few frames, all arguments in the order of the rows -> what goes on, what has ended."""
        log_prob, _, offset = chunk
        sizes, keeps_all = replace(self._sizes, columns=log_prob.shape[2]), False
        sizes = _with_room(sizes, streams=len(offset), paths=len(alive))
        while True:
            room, replay = self._room(sizes, keeps_all)
            self._fill(room, alive, chunk, backtrace.num_records)
            replay.read(log_prob.shape[1])
            # The one time that the host waits.
            counts, record_begin = (
                part.tolist()
                for part in torch.cat([room.counts, room.record_begin]).split(
                    [len(room.counts), len(room.record_begin)]
                )
            )
            enough = _with_room(
                sizes,
                arcs=counts[kernels.MOST_ARCS.value],
                paths=counts[kernels.MOST_PATHS.value],
                ended=counts[kernels.MOST_ENDED.value],
                records=counts[kernels.MOST_RECORDS.value],
            )
            is_short = bool(counts[kernels.IS_SHORT.value])
            if enough == sizes and not is_short:
                break
            sizes, keeps_all = enough, keeps_all or is_short
            self.num_retries += 1
        self._sizes = sizes
        num_records = counts[kernels.NUM_RECORDS.value] - backtrace.num_records
        backtrace.add_blocks(
            room.previous[:num_records], room.record_arc[:num_records], record_begin[: log_prob.shape[1]]
        )
        offset.copy_(room.offset[: len(offset)])
        num_paths, num_ended = counts[kernels.NUM_PATHS.value], counts[kernels.NUM_ENDED.value]
        return _tokens(room, 0, num_paths), _tokens(room, sizes.paths, num_ended)

    def _room(self, sizes: Sizes, keeps_all: bool) -> tuple[FrameBuffers, FrameReplay]:
        key = (sizes, keeps_all)
        if key not in self._rooms:
            # Smaller ones are not needed any more.
            self._rooms = {old: both for old, both in self._rooms.items() if old[0] == sizes}
            room = FrameBuffers(self._arcs, self._limits, sizes, keeps_all)
            self._rooms[key] = (room, FrameReplay(room, self._captures))
        return self._rooms[key]

    @staticmethod
    def _fill(room: FrameBuffers, alive: ActiveTokens, chunk: Chunk, num_records: int) -> None:
        log_prob, num_frames, offset = chunk
        room.log_prob[: log_prob.shape[0], : log_prob.shape[1]] = log_prob
        room.num_frames.zero_()
        room.num_frames[: len(num_frames)] = num_frames
        room.offset.zero_()
        room.offset[: len(offset)] = offset
        for own, part in zip(room.paths, (alive.stream, alive.state, alive.score, alive.record), strict=True):
            own[: len(part)] = part
        room.counts.zero_()
        room.counts[kernels.NUM_PATHS.value] = len(alive)
        room.counts[kernels.NUM_RECORDS.value] = num_records
        room.counts[kernels.FIRST_RECORD.value] = num_records


def _with_room(sizes: Sizes, **needed: int) -> Sizes:
    """Sizes in which so many of each have room: where they had not, the next power of two with some to spare."""
    grown = {
        name: triton.next_power_of_2(number if name == "streams" else 2 * number)
        for name, number in needed.items()
        if number > getattr(sizes, name)
    }
    return replace(sizes, **grown)


def _tokens(room: FrameBuffers, begin: int, num: int) -> ActiveTokens:
    stream, state, score, record = (part[begin : begin + num].clone() for part in room.paths)
    no_context = torch.zeros_like(record)
    return ActiveTokens(stream.long(), state.long(), no_context, score, no_context.double(), record)
