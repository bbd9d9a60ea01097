"""A whole frame in room of a fixed size, from paths to paths: a fixed list of kernels, which a CUDA graph may hold.

Nothing here waits for the device or asks it how many there are. What finds no room is left out and counted as needed,
so that whoever reads the counts later can take the frames once more in more room.

Shapes: K room for paths, D room for paths of streams that have ended, A room for candidates, N room for streams,
T frames, C tokens, R room for records.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from asr.decoding.gpu import compaction, expansion, keeping
from asr.decoding.gpu.arc_expansion import ArcExpansion
from asr.decoding.gpu.limits import FrameLimits
from asr.decoding.gpu.recombined import Recombined
from asr.decoding.search.search_graph import ArcSet


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


class FrameRoom:
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
        self.counts = room(keeping.NUM_COUNTS, torch.int64)
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
        frame = self.count(keeping.FRAME.value)
        found.run(
            self.paths,
            self.count(keeping.NUM_PATHS.value),
            self.log_prob,
            self._frame_begin,
            frame,
            sizes.columns,
            self.keeps_all,
        )
        ended.run(found.stream, found.state, None, found.score, found.num_kept)
        expansion.shift_offsets[triton.cdiv(sizes.streams, limits.block),](
            *(found.best, self.offset, ended.num_inside, found.threshold, self.count(keeping.IS_SHORT.value)),
            *(limits.min_active, sizes.streams),
            B=limits.block,
        )
        kept = (ended.threshold, found.num_kept, sizes.arcs)
        compaction.count_stays[(found.num_tiles,)](
            *(ended.value, found.stream, *kept, self._tile_count),
            *(self.num_frames, frame, self.count(keeping.NUM_GOING.value)),
            HAS_ENDS=True,
            B=limits.block,
        )
        torch.cumsum(self._tile_count, 0, out=self._tile_end)
        room = (sizes.paths, sizes.ended)
        keeping.keep_paths[(found.num_tiles,)](
            *(found.stream, found.state, ended.value, found.record, found.arc, *kept),
            *(self._tile_count, self._tile_end, self.num_frames, self.counts, *self.paths, *room),
            *(self.previous, self.record_arc, sizes.records),
            B=limits.block,
        )
        keeping.end_frame[(1,)](
            *(self.counts, self.record_begin, found.arcs_end, sizes.paths, self._tile_end, found.num_tiles),
            *(*room, sizes.records),
        )
