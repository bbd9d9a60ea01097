"""Several frames of one stream in one call, as loops for `jit`, where no language model takes part.

A stream is followed by itself, so that the part of the graph around its paths stays in the processor's cache. What the
paths became over arcs is left where it was written until the last frame is read; only what leads there is looked at
again.

Shapes: K partial paths, A candidates of a frame, T frames, S states, P paths before the first frame and behind each,
one after the other, R records, L losing_arcs.


Reads whole chunks on a CPU, many frames to a call of numba's loops.

Shapes: N streams, T frames, C tokens, K partial paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr.decoding.backend import Chunk, SearchSink
from asr.decoding.cpu.frame import expand_paths, num_arcs, pruning_threshold
from asr.decoding.interface import DecodingOptions
from asr.decoding.search_graph import Searchable
from asr.decoding.tokens import ActiveTokens
from asr.kernels.jit import jit_required, kernel

_NONE = -1


@kernel(fastmath=False)
def read_frames(
    state: Any,
    score: Any,
    backpointer: Any,
    arcs: Any,
    log_prob: Any,
    frame_begin: Any,
    score_offset: Any,
    table: Any,
    rooms: Any,
    beam: Any,
    min_active: int,
    max_active: int,
    margin: Any,
    final_score: Any,
    first_record: int,
) -> tuple[Any, Any, Any]:
    """Reads some frames.

    Args:
        state, score, backpointer: (K,) the partial paths before.
        arcs: arc_begin, token_id, score, num_words and dst_state of the graph's arcs.
        log_prob, frame_begin: scores, flat, and where each frame begins in them (T,).
        score_offset: (1,) float64; what scores lack is added in place.
        table: (S,) int32, all -1, which they are again afterwards.
        rooms: buffers of any size: the source and the arc of each candidate; two entries a candidate for the next one
            that it lost to and, as float32, its score; and the candidate that each path was.
        beam, min_active, max_active: what stays, as of `pruning_threshold`.
        margin: what loses by no more is told, too, below 0 nothing.
        final_score: (S,) what ending scores where the stream ends behind these frames, else (0,). Then only paths that
            may end, and lose by no more than `margin` against the best of them, are left, if there are any.
        first_record: the number of the first backpointer to be made.

    Returns:
        The paths behind the last frame: state, score, backpointer (K',).
        Records: previous and arc (R,), the number of each frame's first one (T,), and the frames read at each (R,).
        They are of the paths that lead to one behind the last frame and lose by no more than `margin` on the way, by
        nothing where no lattice is kept. Losing arcs: the back-pointer before each, the one that it lost, its arc, and
        by how much it lost (L,).
        The rooms, which may have grown.
    """
    arc_begin, token_id, arc_score, num_words, dst_state = arcs
    source, arc, standing, candidate = rooms
    value = np.empty(0, dtype=np.float32)
    num_frames = len(frame_begin)
    # Before each frame and behind the last: where its candidates and its paths begin; the worst score that stayed.
    begin, path_begin = np.zeros(num_frames + 1, dtype=np.int64), np.zeros(num_frames + 2, dtype=np.int64)
    lowest = np.full(num_frames, -beam, dtype=np.float32)
    path_begin[1] = len(state)
    for frame in range(num_frames):
        first, first_path = begin[frame], path_begin[frame + 1]
        frame_reach, end = beam, first
        new_state, kept = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
        while len(state):
            room = num_arcs(state, arc_begin)
            source, arc = ensure_capacity(source, first + room), ensure_capacity(arc, first + room)
            standing, value = ensure_capacity(standing, 2 * (first + room)), ensure_capacity(value, room)
            num, best, left_out = expand_paths(
                state, score, 0, len(state), arc_begin, token_id, arc_score, num_words, log_prob, frame_begin[frame],
                frame_reach, beam, np.float32(np.inf), min_active, False, source[first:], arc[first:], value, 0,
            )  # fmt: skip
            end, new_state = first + num, np.empty(num, dtype=np.int32)
            for i in range(num):
                new_state[i] = dst_state[arc[first + i]]
                value[i] -= best
            kept, num_inside = _kept(
                new_state, value[:num], standing[2 * first : 2 * end], table, beam, min_active, max_active
            )
            if num_inside >= min_active or not left_out:
                if best > -np.inf:
                    score_offset[0] += best
                break
            # Fewer than min_active are near the best: those that were left out count after all.
            frame_reach = np.float32(np.inf)
        state, score = np.empty(len(kept), dtype=np.int64), np.empty(len(kept), dtype=np.float32)
        candidate = ensure_capacity(candidate, first_path + len(kept))
        for k in range(len(kept)):
            state[k], score[k] = new_state[kept[k]], value[kept[k]]
            candidate[first_path + k] = kept[k]
            # As everywhere in the search, what falls behind its beam is gone, unless so few survive that worse ones do.
            lowest[frame] = min(lowest[frame], score[k])
        begin[frame + 1], path_begin[frame + 2] = end, first_path + len(kept)
    rooms = source, arc, standing, candidate
    loss = np.full(path_begin[-1], np.inf, dtype=np.float32)
    ends = _ends(state, score, final_score, margin, loss[path_begin[num_frames] :])
    paths, lost = _traced(rooms, begin, path_begin, lowest, margin, loss)
    told, number = _told(rooms, begin, path_begin, paths, lost, backpointer, first_record)
    return (state[ends], score[ends], number[path_begin[num_frames] + ends]), told, rooms


@kernel(fastmath=False)
def _kept(
    state: Any, score: Any, standing: Any, table: Any, beam: Any, min_active: int, max_active: int
) -> tuple[Any, int]:
    """Recombines candidates (A,) and prunes them.

    Args:
        state, score: (A,) the candidates.
        standing: (2 A,) is filled in: of a winner the first that lost to it, of that one the second, and so on, each
            followed by the candidate's own score.
        table, beam, min_active, max_active: as of `read_frames`.

    Returns:
        The places of those that stay, ascending, and how many are inside the beam.
    """
    num, own_score = len(state), standing.view(np.float32)
    for i in range(num):
        other = table[state[i]]
        own_score[2 * i + 1] = score[i]
        if other < 0:
            table[state[i]], standing[2 * i] = i, _NONE
        elif score[i] > score[other]:
            table[state[i]], standing[2 * i] = i, other
        else:
            standing[2 * i], standing[2 * other] = standing[2 * other], i
    kept, value, num_kept, num_inside = np.empty(num, dtype=np.int32), np.empty(num, dtype=np.float32), 0, 0
    for i in range(num):
        if table[state[i]] == i:
            table[state[i]] = -1
            kept[num_kept], value[num_kept] = i, score[i]
            num_kept += 1
    if num_kept:
        num_won, num_kept = num_kept, 0
        threshold = pruning_threshold(value[:num_won], beam, min_active, max_active)
        for k in range(num_won):
            kept[num_kept] = kept[k]
            num_kept += int(value[k] >= threshold)
            num_inside += int(value[k] >= threshold and value[k] >= -beam)
    return kept[:num_kept], num_inside


@kernel(fastmath=False)
def _ends(state: Any, score: Any, final_score: Any, margin: Any, loss: Any) -> Any:
    """Which of the last paths (K,) are left; their loss (K,) is filled in, for others it stays infinite."""
    best = np.float32(-np.inf)
    for k in range(len(state) if len(final_score) else 0):
        best = max(best, score[k] + final_score[state[k]])
    if best == -np.inf:
        loss[:] = 0.0
        return np.arange(len(state))
    for k in range(len(state)):
        by = best - (score[k] + final_score[state[k]])
        if by <= margin:
            loss[k] = by
    return np.nonzero(loss < np.inf)[0]


@kernel(fastmath=False)
def _traced(rooms: Any, begin: Any, path_begin: Any, lowest: Any, margin: Any, loss: Any) -> tuple[Any, Any]:
    """The paths that lead to the last ones, latest first, and the losing_arcs within `margin`, earliest first.

    Args:
        loss: (P,) float32, that of the last paths, infinite before; becomes that of the best way on from each path.

    Returns:
        The paths (R,); of each losing arc its place among all candidates, shifted up 32 bits, with the winner (L,).
    """
    source, _, standing, candidate = rooms
    score = standing.view(np.float32)
    paths, num_paths = np.empty(len(loss), dtype=np.int32), 0
    lost, num_lost = np.empty(256, dtype=np.int64), 0
    for frame in range(len(lowest) - 1, -1, -1):
        first, first_before = begin[frame], path_begin[frame]
        for path in range(path_begin[frame + 2] - 1, path_begin[frame + 1] - 1, -1):
            if loss[path] == np.inf:
                continue
            winner = first + candidate[path]
            before = first_before + source[winner]
            loss[before] = min(loss[before], loss[path])
            paths[num_paths] = path
            num_paths += 1
            losing_arc = standing[2 * winner] if margin >= 0 else _NONE
            while losing_arc >= 0:
                at = first + losing_arc
                score_gap = score[2 * winner + 1] - score[2 * at + 1]
                if score[2 * at + 1] >= lowest[frame] and loss[path] + score_gap <= margin:
                    before = first_before + source[at]
                    loss[before] = min(loss[before], loss[path] + score_gap)
                    lost = ensure_capacity(lost, num_lost + 1)
                    lost[num_lost] = (at << 32) | path
                    num_lost += 1
                losing_arc = standing[2 * at]
    return paths[:num_paths], np.sort(lost[:num_lost])


@kernel(fastmath=False)
def _told(
    rooms: Any, begin: Any, path_begin: Any, paths: Any, lost: Any, backpointer: Any, first_record: int
) -> tuple[Any, Any]:
    """Records and losing_arcs as `read_frames` returns them, and the number of each path's backpointer (P,)."""
    source, arc, standing, candidate = rooms
    score = standing.view(np.float32)
    previous, record_arc = np.empty(len(paths), dtype=np.int64), np.empty(len(paths), dtype=np.int64)
    record_frame, block_begin = np.empty(len(paths), dtype=np.int64), np.empty(len(begin) - 1, dtype=np.int64)
    src, dst = np.empty(len(lost), dtype=np.int64), np.empty(len(lost), dtype=np.int64)
    lost_arc, score_gap = np.empty(len(lost), dtype=np.int64), np.empty(len(lost), dtype=np.float32)
    number = np.empty(path_begin[-1], dtype=np.int64)
    number[: len(backpointer)] = backpointer
    num, num_lost = 0, 0
    for frame in range(len(begin) - 1):
        block_begin[frame] = first_record + num
        while num < len(paths) and paths[len(paths) - 1 - num] < path_begin[frame + 2]:
            path = paths[len(paths) - 1 - num]
            winner = begin[frame] + candidate[path]
            previous[num], record_arc[num] = number[path_begin[frame] + source[winner]], arc[winner]
            record_frame[num], number[path] = frame + 1, first_record + num
            num += 1
        while num_lost < len(lost) and (lost[num_lost] >> 32) < begin[frame + 1]:
            at, path = lost[num_lost] >> 32, lost[num_lost] & 0xFFFFFFFF
            src[num_lost], dst[num_lost] = number[path_begin[frame] + source[at]], number[path]
            winner = begin[frame] + candidate[path]
            lost_arc[num_lost], score_gap[num_lost] = arc[at], score[2 * winner + 1] - score[2 * at + 1]
            num_lost += 1
    return (previous, record_arc, block_begin, record_frame, src, dst, lost_arc, score_gap), number


@kernel(fastmath=False)
def ensure_capacity(array: Any, size: int) -> Any:
    """The array, or a larger one that begins with it."""
    if size <= len(array):
        return array
    larger = np.empty(2 * size, dtype=array.dtype)
    larger[: len(array)] = array
    return larger


_NO_LOSERS = -1.0


_NO_SCORES = np.zeros(0, dtype=np.float32)


class NumbaChunkSearch:
    """The search without a language model or arcs that read nothing; the same paths as frame by frame.

    Args:
        graph: on the CPU, without arcs that read nothing.
        options: beams and limits.
        frames_per_call: after this many frames of a stream, tokens that lead nowhere are forgotten.
    """

    def __init__(self, graph: Searchable, options: DecodingOptions, frames_per_call: int = 256) -> None:
        arcs = graph.emitting
        self._frames_per_call = frames_per_call
        self._loop = jit_required(read_frames)
        self._arcs = tuple(
            part.numpy() for part in (arcs.arc_begin, arcs.token_id, arcs.score, arcs.words.num_words, arcs.dst_state)
        )
        self._table = np.full(graph.num_states, -1, dtype=np.int32)
        # Of the chunk before, so that they need not grow again.
        self._rooms = (np.empty(0, dtype=np.int32),) * 4
        self._final_score = graph.final_score.numpy()
        self._limits = (np.float32(options.search_beam), options.min_active_states, options.max_active_states)

    def search(self, tokens: ActiveTokens, chunk: Chunk, sink: SearchSink) -> ActiveTokens:
        """As `ChunkBackend.search`."""
        if not len(tokens):
            return tokens
        max_frames, num_columns = chunk.log_prob.shape[1:]
        own, num_paths = torch.unique_consecutive(tokens.stream, return_counts=True)
        parts = list(map(tokens.select, torch.arange(len(tokens)).split(num_paths.tolist())))
        for position, stream in enumerate(own.tolist()):
            begin = stream * max_frames
            frame_begin = num_columns * torch.arange(begin, begin + int(chunk.num_frames[stream]))
            for num_before in range(0, len(frame_begin), self._frames_per_call):
                if sink.backtrace.is_due:
                    sink.collect(parts)
                some = frame_begin[num_before : num_before + self._frames_per_call]
                parts[position] = self._read_some(stream, parts[position], chunk, some, num_before, sink)
        return ActiveTokens.join(parts)

    def _read_some(
        self, stream: int, tokens: ActiveTokens, chunk: Chunk, frame_begin: Tensor, num_before: int, sink: SearchSink
    ) -> ActiveTokens:
        """Some frames of one stream, which begin at these places of the log-probabilities; so many were before."""
        backtrace, lattice = sink.backtrace, sink.lattice
        margin = np.float32(_NO_LOSERS if lattice is None else lattice.margin)
        # A lattice is of a whole utterance.
        is_end = lattice is not None and num_before + len(frame_begin) == int(chunk.num_frames[stream])
        score_offset = chunk.score_offset[stream : stream + 1].numpy()
        paths, told, self._rooms = self._loop(
            *(tokens.state.numpy(), tokens.score.numpy(), tokens.backpointer.numpy(), self._arcs),
            *(chunk.log_prob.reshape(-1).numpy(), frame_begin.numpy(), score_offset, self._table, self._rooms),
            *(*self._limits, margin, self._final_score if is_end else _NO_SCORES, backtrace.num_records),
        )
        state, score, backpointer = map(torch.from_numpy, paths)
        previous, arc, block_begin, frame, *losing_arcs = map(torch.from_numpy, told)
        if lattice is not None:
            lattice.add_frames(torch.full_like(arc, stream), frame + num_before, losing_arcs)
        backtrace.add_blocks(previous, arc, block_begin.tolist())
        no_context = torch.zeros_like(backpointer)
        return ActiveTokens(torch.full_like(state, stream), state, no_context, score, no_context.double(), backpointer)
