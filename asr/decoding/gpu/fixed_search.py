"""Reads whole chunks in rooms of fixed sizes: the host looks at the counts now and then, and makes more room at need.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from asr.decoding.gpu import keeping
from asr.decoding.gpu.frame_room import FrameRoom, Sizes
from asr.decoding.gpu.limits import FrameLimits
from asr.decoding.gpu.replay import FrameReplay
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.reading import Chunk, Traces
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens

_FRAMES_AT_ONCE = 32
_FIRST_ROOM = 1 << 12


class FixedSearch:
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
        self._rooms: dict[tuple[Sizes, bool], tuple[FrameRoom, FrameReplay]] = {}
        self.num_retries = 0

    def read(self, tokens: Tokens, chunk: Chunk, traces: Traces) -> Tokens:
        """As `ChunkReader.read`."""
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
        ended = Tokens.none(order.device)
        own_offset = offset[order]
        longest = int(num_frames[0]) if len(num_frames) else 0
        for begin in range(0, longest, _FRAMES_AT_ONCE):
            if not len(alive):
                break
            some = Chunk(log_prob[:, begin : min(begin + _FRAMES_AT_ONCE, longest)], num_frames - begin, own_offset)
            alive, newly_ended = self._read_at_once(alive, some, backtrace)
            ended = Tokens.join([ended, newly_ended])
            if backtrace.is_due:
                traces.collect([alive, ended, unread])
        offset[order] = own_offset
        ended = Tokens.join([ended, alive])
        ended.stream = order[ended.stream]
        return Tokens.join([unread, ended])

    def _read_at_once(self, alive: Tokens, chunk: Chunk, backtrace: Backtrace) -> tuple[Tokens, Tokens]:
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
                arcs=counts[keeping.MOST_ARCS.value],
                paths=counts[keeping.MOST_PATHS.value],
                ended=counts[keeping.MOST_ENDED.value],
                records=counts[keeping.MOST_RECORDS.value],
            )
            is_short = bool(counts[keeping.IS_SHORT.value])
            if enough == sizes and not is_short:
                break
            sizes, keeps_all = enough, keeps_all or is_short
            self.num_retries += 1
        self._sizes = sizes
        num_records = counts[keeping.NUM_RECORDS.value] - backtrace.num_records
        backtrace.add_blocks(
            room.previous[:num_records], room.record_arc[:num_records], record_begin[: log_prob.shape[1]]
        )
        offset.copy_(room.offset[: len(offset)])
        num_paths, num_ended = counts[keeping.NUM_PATHS.value], counts[keeping.NUM_ENDED.value]
        return _tokens(room, 0, num_paths), _tokens(room, sizes.paths, num_ended)

    def _room(self, sizes: Sizes, keeps_all: bool) -> tuple[FrameRoom, FrameReplay]:
        key = (sizes, keeps_all)
        if key not in self._rooms:
            # Smaller ones are not needed any more.
            self._rooms = {old: both for old, both in self._rooms.items() if old[0] == sizes}
            room = FrameRoom(self._arcs, self._limits, sizes, keeps_all)
            self._rooms[key] = (room, FrameReplay(room, self._captures))
        return self._rooms[key]

    @staticmethod
    def _fill(room: FrameRoom, alive: Tokens, chunk: Chunk, num_records: int) -> None:
        log_prob, num_frames, offset = chunk
        room.log_prob[: log_prob.shape[0], : log_prob.shape[1]] = log_prob
        room.num_frames.zero_()
        room.num_frames[: len(num_frames)] = num_frames
        room.offset.zero_()
        room.offset[: len(offset)] = offset
        for own, part in zip(room.paths, (alive.stream, alive.state, alive.score, alive.record), strict=True):
            own[: len(part)] = part
        room.counts.zero_()
        room.counts[keeping.NUM_PATHS.value] = len(alive)
        room.counts[keeping.NUM_RECORDS.value] = num_records
        room.counts[keeping.FIRST_RECORD.value] = num_records


def _with_room(sizes: Sizes, **needed: int) -> Sizes:
    """Sizes in which so many of each have room: where they had not, the next power of two with some to spare."""
    grown = {
        name: triton.next_power_of_2(number if name == "streams" else 2 * number)
        for name, number in needed.items()
        if number > getattr(sizes, name)
    }
    return replace(sizes, **grown)


def _tokens(room: FrameRoom, begin: int, num: int) -> Tokens:
    stream, state, score, record = (part[begin : begin + num].clone() for part in room.paths)
    no_context = torch.zeros_like(record)
    return Tokens(stream.long(), state.long(), no_context, score, no_context.double(), record)
