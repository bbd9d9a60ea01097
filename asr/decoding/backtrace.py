"""From backpointers to hypotheses: the table that a search fills, where streams end, and the words along a path.

Backpointers that no active token can be traced back to are garbage-collected, so that memory does not grow with the
length of a stream.

Shapes: K tokens, N streams, R backpointers, L arcs of a path, T frames.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr.decoding.backend import ActiveTokens, Searchable, best_score, expand
from asr.decoding.interface import Hypothesis
from asr.decoding.settings import DecodingOptions
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import gpu_module
from asr.kernels.memory import to_device
from asr.lm.interface import LanguageModel

_Runs = tuple[tuple[int, int, int], ...]

_FIRST_COLLECTION = 1 << 20


class Backtrace:
    """A table of backpointers, each with its predecessor and the arc in between; -1 is the start of a stream.

    Backpointers are appended frame by frame, so each predecessor has a lower number. When their number has doubled,
    those that no active token can be traced back to are removed, and the others renumbered.

    Args:
        device: device of the table.
        collects: whether to collect garbage; False keeps all backpointers and their numbers.
        first_collection: number of backpointers below which no garbage is collected.
    """

    def __init__(
        self, device: torch.device, collects: bool = True, *, first_collection: int = _FIRST_COLLECTION
    ) -> None:
        self._previous = torch.empty(0, dtype=torch.int64, device=device)
        self._arc = torch.empty(0, dtype=torch.int64, device=device)
        self._block_begin: list[int] = []
        self._collects = collects
        self._collect_at = self._first_collection = first_collection
        self.num_records = 0

    def add(self, previous: Tensor, arc: Tensor) -> Tensor:
        """Appends the backpointers of a frame, previous (K,), arc (K,) -> their numbers (K,)."""
        begin = self.num_records
        self.add_blocks(previous, arc, [begin])
        return torch.arange(begin, self.num_records, device=arc.device)

    def add_blocks(self, previous: Tensor, arc: Tensor, block_begin: list[int]) -> None:
        """Appends the backpointers of several frames, previous (K,), arc (K,); block_begin has each frame's first."""
        begin, end = self.num_records, self.num_records + len(arc)
        if end > len(self._arc):
            room = torch.empty(max(end, 2 * len(self._arc)) - self.num_records, dtype=torch.int64, device=arc.device)
            self._previous = torch.cat([self._previous[:begin], room])
            self._arc = torch.cat([self._arc[:begin], room])
        self._previous[begin:end] = previous
        self._arc[begin:end] = arc
        self._block_begin += block_begin
        self.num_records = end

    def records(self) -> tuple[Tensor, Tensor]:
        """All backpointers: their predecessors and arcs, (R,) each."""
        return self._previous[: self.num_records], self._arc[: self.num_records]

    @property
    def is_due(self) -> bool:
        """Whether enough backpointers were added since the last collection for another to pay off."""
        return self._collects and self.num_records >= self._collect_at

    def collect(self, living: Tensor) -> Tensor:
        """Removes all backpointers except the ancestors of `living` (K,) and these themselves -> new numbers (K,)."""
        kept = torch.zeros(self.num_records + 1, dtype=torch.bool, device=living.device)
        traceback = gpu_module("asr.decoding.gpu.traceback", living.device)
        if traceback is not None:
            kept[:-1] = traceback.ancestors(living, self._previous[: self.num_records])
        else:
            kept[living] = True  # -1 marks the spare last entry
            block_end = self.num_records
            for block_begin in reversed(self._block_begin):
                backpointer = kept[block_begin:block_end].nonzero().squeeze(1) + block_begin
                kept[self._previous.index_select(0, backpointer)] = True
                block_end = block_begin
            kept[-1] = False
        number = kept.cumsum(0) - kept.to(torch.int64)
        number[-1:] = -1
        self._block_begin = sorted(set(number[self._block_begin].tolist()))
        backpointer = kept.nonzero().squeeze(1)
        self._previous = number[self._previous.index_select(0, backpointer)]
        self._arc = self._arc.index_select(0, backpointer)
        self.num_records = len(backpointer)
        self._collect_at = max(self._first_collection, 2 * self.num_records)
        return number[living]

    @property
    def block_begin(self) -> list[int]:
        """The first backpointer of each non-empty frame, ascending."""
        return sorted({begin for begin in self._block_begin if begin < self.num_records})

    def replace(self, previous: Tensor, arc: Tensor, block_begin: list[int]) -> None:
        """Replaces all backpointers, by previous (R,) and arc (R,), with the begins of their blocks."""
        self._previous, self._arc = previous, arc
        self.num_records, self._block_begin = len(arc), block_begin
        self._collect_at = max(self._first_collection, 2 * self.num_records)

    def path(self, backpointer: int) -> Tensor:
        """The arcs from the stream's start to a backpointer, (L,) int64."""
        records = []
        previous = self._previous[: self.num_records].cpu().numpy()
        while backpointer >= 0:
            records.append(backpointer)
            backpointer = int(previous[backpointer])
        return self._arc[torch.tensor(records[::-1], dtype=torch.int64, device=self._arc.device)]

    def paths(self, backpointer: Tensor) -> list[Tensor]:
        """The arcs that lead to each backpointer (N,), (L,) int64 each, on the host."""
        if backpointer.device.type == "cpu":
            return [self.path(int(one)) for one in backpointer]
        return self.paths_together(backpointer)

    def paths_together(self, backpointer: Tensor) -> list[Tensor]:
        """Like `paths`, but traces all paths at once, so that a GPU copies one table to the host."""
        traceback = gpu_module("asr.decoding.gpu.traceback", backpointer.device)
        if traceback is not None:
            num_blocks = len(self._block_begin) if self.num_records else 0
            table = traceback.arcs_of_paths(backpointer, self._previous, self._arc, num_blocks).cpu()
            return [column[column >= 0] for column in table.unbind(1)]
        arcs = [torch.full_like(backpointer, -1)]
        # No block contains both a backpointer and its predecessor, so no path has more arcs than there are blocks.
        for _ in self._block_begin if self.num_records else ():
            known = backpointer.clamp(min=0)
            arcs.append(torch.where(backpointer < 0, backpointer, self._arc[known]))
            backpointer = torch.where(backpointer < 0, backpointer, self._previous[known])
        table = torch.stack(arcs[::-1]).cpu()
        return [column[column >= 0] for column in table.unbind(1)]

    def cut_shared_prefix(self, living: Tensor) -> Tensor:
        """Cuts off the prefix that all active paths of a stream share; it is final.

        Later paths start after it, so that a stream without an end holds only what may still change.

        Args:
            living: (K,) the backpointers of all active tokens of the stream.

        Returns:
            (L,) int64, the arcs of the prefix; empty if the paths share none.
        """
        previous = self._previous[: self.num_records].cpu().numpy()
        front = np.unique(living.cpu().numpy())
        while len(front) > 1 and front[0] >= 0:
            # All backpointers of the newest block go one step back; no block also contains a predecessor of one.
            begin = self._block_begin[bisect_right(self._block_begin, int(front[-1])) - 1]
            first = int(np.searchsorted(front, begin))
            front = np.unique(np.concatenate([front[:first], previous[front[first:]]]))
        if len(front) != 1 or front[0] < 0:
            return self._arc[:0].clone()
        shared = int(front[0])
        arc = self.path(int(previous[shared]))
        self._previous[shared] = -1
        return arc

    def descends(self, living: Tensor, backpointer: int, num_steps: int) -> Tensor:
        """Which paths (K,) contain the ancestor `num_steps` before `backpointer`; all if there is no such ancestor."""
        previous = self._previous[: self.num_records].cpu().numpy()
        for _ in range(num_steps):
            backpointer = int(previous[backpointer]) if backpointer >= 0 else backpointer
        current = living.cpu().numpy().copy()
        while backpointer >= 0:
            later = current > backpointer
            if not later.any():
                break
            current[later] = previous[current[later]]
        return torch.from_numpy((current == backpointer) | (backpointer < 0)).to(living.device)


@dataclass(frozen=True)
class Ending:
    """The best path of a stream, and all tokens at which it may end.

    Args:
        backpointer: of the best path, or None if no token is active; -1 is the path without arcs.
        total: its scaled score.
        graph_score: the graph's final score, unscaled; 0 for an unfinished path.
        lm_score: the language model score, unscaled.
        reached_final: whether the path is complete.
        final: tokens at which the stream may end.
        final_graph_score, final_lm_score: (K,) their final scores.
        final_total: (K,) the scaled scores of the complete paths, `total` among them, relative to `score_offset`.
    """

    backpointer: int | None
    total: float
    graph_score: float
    lm_score: float
    reached_final: bool
    final: ActiveTokens
    final_graph_score: Tensor
    final_lm_score: Tensor
    final_total: Tensor


def endings_of(
    graph: Searchable,
    options: DecodingOptions,
    lm: LanguageModel | None,
    tokens: ActiveTokens,
    score_offset: Tensor,
    unfinished: bool = False,
) -> list[Ending]:
    """Ends each stream here with its best complete path, or with the best unfinished one if none is complete.

    The language model is called once, and the host waits for a GPU only twice.

    Args:
        graph: the graph that was searched.
        options: scales.
        lm: scores the end of the sentence, or None.
        tokens: the active tokens of all streams.
        score_offset: (N,) float64, makes the tokens' relative scores absolute.
        unfinished: whether the streams continue, so that the best path need not be complete.
    """
    num_streams = len(score_offset)
    if not num_streams:
        return []
    tokens = tokens.select(torch.sort(tokens.stream, stable=True).indices)
    # The tokens at which a stream may end.
    final = tokens.select((graph.final_graph_score.index_select(0, tokens.state) > -torch.inf).nonzero().squeeze(1))
    graph_score = graph.final_graph_score.index_select(0, final.state)
    lm_score = torch.zeros_like(graph_score)
    if lm is not None and len(final) and not unfinished:
        lm_score = lm.final(final.context_idx).to(graph_score.dtype)
    total = final.score + graph.final_score.index_select(0, final.state) + options.lm_scale * lm_score
    best = _first_best(total, final.stream, num_streams)
    best_token = _first_best(tokens.score, tokens.stream, num_streams)
    num_final = torch.zeros_like(best).scatter_add_(0, final.stream, torch.ones_like(final.stream))
    # One table of all values for the host, so that a GPU copies once.
    columns = [num_final, best_token < len(tokens)]
    columns += [_at(part, best) for part in (total, final.backpointer, graph_score, final.lm_score + lm_score)]
    columns += [_at(part, best_token) for part in (tokens.score, tokens.backpointer, tokens.lm_score)]
    rows = torch.stack([column.double() for column in (*columns, score_offset)], 1).tolist()
    sizes = [int(row[0]) for row in rows]
    parts = zip(final.split(sizes), *(part.split(sizes) for part in (graph_score, lm_score, total)), strict=True)
    endings = []
    for row, ends in zip(rows, parts, strict=True):
        num, is_alive, own_total, backpointer, own_graph_score, own_lm_score, *partial, offset = row
        if num and own_total > -torch.inf and not unfinished:  # the language model may rule out every sentence
            one = Ending(int(backpointer), offset + own_total, own_graph_score, own_lm_score, True, *ends)
        elif is_alive:
            one = Ending(int(partial[1]), offset + partial[0], 0.0, partial[2], False, *ends)
        else:
            one = Ending(None, -torch.inf, 0.0, 0.0, False, *ends)
        endings.append(one)
    return endings


def _first_best(score: Tensor, stream: Tensor, num_streams: int) -> Tensor:
    """The first position of each stream's best score, (N,) int64; K for a stream without scores; score (K,)."""
    best = best_score(score, stream, num_streams)
    position = torch.arange(len(score), device=score.device)
    position = torch.where(score == best.index_select(0, stream), position, len(score))
    first = torch.full((num_streams,), len(score), dtype=torch.int64, device=score.device)
    return first.scatter_reduce_(0, stream, position, "amin")


def _at(values: Tensor, position: Tensor) -> Tensor:
    """Values (K,) at positions (N,), 0 at position K."""
    return torch.cat([values, values.new_zeros(1)]).index_select(0, position)


def best_arcs(endings: Sequence[Ending], backtrace: Backtrace) -> list[Tensor]:
    """The arcs (L,) of each stream's best path, on the host; empty if no token is active."""
    backpointer = [-1 if ending.backpointer is None else ending.backpointer for ending in endings]
    previous, _ = backtrace.records()
    return backtrace.paths(to_device(torch.tensor(backpointer, dtype=torch.int64), previous.device))


@dataclass(frozen=True)
class SpelledPath:
    """The words, phones and times of a path from the start, complete or not; more arcs can be appended.

    A word begins where the graph outputs it and ends after the last non-blank frame before the next word.

    Args:
        word_ids: in order.
        start_frames: the original frame at which each word begins.
        end_frames: the frame after the last one so far of each word.
        phones: runs of equal tokens without blanks, each as (token, first frame, frame after the last).
        last_token: the last token read, blank or not; -1 before the first frame.
        last_frame: the original frame that was read last, if frames were skipped.
        spoken_end: the frame after the last non-blank one.
        num_frames: frames read.
        graph_score: sum of the arcs' graph scores.
    """

    word_ids: tuple[int, ...] = ()
    start_frames: tuple[int, ...] = ()
    end_frames: tuple[int, ...] = ()
    phones: _Runs = ()
    last_token: int = -1
    last_frame: int = 0
    spoken_end: int = 0
    num_frames: int = 0
    graph_score: float = 0.0

    def followed_by(self, graph: DecodingGraph, arc: Tensor, frame_of: Tensor | None = None) -> SpelledPath:
        """The path extended by more arcs.

        Args:
            graph: the graph of the arcs.
            arc: (L,) int64.
            frame_of: original numbers of the frames that these arcs read; None if no frames were skipped.
        """
        arc = arc.to(graph.token_id.device)
        token_id = graph.token_id.index_select(0, arc)
        reads = (token_id >= 0).to(torch.int64)
        owner, word = expand(graph.word_begin, arc)
        word_ids = graph.word_id.index_select(0, word).tolist()
        frame = reads.cumsum(0) - reads
        read = token_id[token_id >= 0]
        first_frame = self.num_frames
        if frame_of is None:
            frame += self.num_frames
        elif len(frame_of):
            frame = frame_of.index_select(0, frame.clamp(max=len(frame_of) - 1))
        else:
            frame += self.last_frame
        position = torch.arange(len(token_id), device=token_id.device)
        # For each arc, the last arc up to it that reads a token other than blank; -1 if there is none.
        spoken = torch.where(token_id > 0, position, torch.full_like(position, -1))
        spoken = spoken.cummax(0).values if len(spoken) else spoken
        start_frames, end_frames, spoken_end = self._frames(frame.tolist(), spoken.tolist(), owner.tolist())
        return SpelledPath(
            word_ids=(*self.word_ids, *word_ids),
            start_frames=start_frames,
            end_frames=end_frames,
            phones=self._with_runs(_runs(read, first_frame, frame_of), int(read[0]) if len(read) else -1),
            last_token=int(read[-1]) if len(read) else self.last_token,
            last_frame=int(frame_of[len(read) - 1]) if frame_of is not None and len(read) else self.last_frame,
            spoken_end=spoken_end,
            num_frames=self.num_frames + len(read),
            graph_score=self.graph_score + float(graph.score.index_select(0, arc).sum(dtype=torch.float64)),
        )

    def _with_runs(self, runs: _Runs, first_token: int) -> _Runs:
        """Appends runs; the first one may continue the last run of this path."""
        if self.phones and first_token == self.last_token > 0:
            (_, begin, _), (token, _, end) = self.phones[-1], runs[0]
            return (*self.phones[:-1], (token, begin, end), *runs[1:])
        return self.phones + runs

    def _frames(
        self, frame: list[int], spoken: list[int], arcs: list[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Start and end frames of all words, and the end of speech; the last known word may become longer.

        Args:
            frame: the frame at which each arc begins.
            spoken: for each arc, the last arc up to it with a token other than blank, or -1.
            arcs: the arc of each new word.
        """
        start_frames, end_frames = list(self.start_frames), list(self.end_frames)
        bounds = [*arcs, len(frame)]
        if end_frames and bounds[0] > 0 and spoken[bounds[0] - 1] >= 0:
            end_frames[-1] = frame[spoken[bounds[0] - 1]] + 1
        for begin, bound in zip(arcs, bounds[1:], strict=True):
            last = max(begin, spoken[bound - 1]) if bound > 0 else begin
            start_frames.append(frame[begin])
            end_frames.append(frame[last] + 1)
        spoken_end = frame[spoken[-1]] + 1 if spoken and spoken[-1] >= 0 else self.spoken_end
        return tuple(start_frames), tuple(end_frames), spoken_end

    def hypothesis(
        self, graph: DecodingGraph, options: DecodingOptions, total: float, final_score: float, lm_score: float
    ) -> Hypothesis:
        """The hypothesis of the path with these scores; arguments as for `hypothesis_of_path`."""
        graph_score = self.graph_score + final_score
        rest = options.graph_scale * graph_score + options.lm_scale * lm_score
        am_score = (total - rest - options.word_insertion_penalty * len(self.word_ids)) / options.am_scale
        return Hypothesis(
            word_ids=self.word_ids,
            words=tuple(map(graph.vocabulary.words.__getitem__, self.word_ids)),
            am_score=am_score,
            graph_score=graph_score,
            lm_score=lm_score,
            total=total,
            start_frames=self.start_frames,
            end_frames=self.end_frames,
            phones=self.phones,
        )


def hypothesis_of_path(
    graph: DecodingGraph,
    options: DecodingOptions,
    arc: Tensor,
    total: float,
    final_score: float,
    lm_score: float,
    frame_of: Tensor | None = None,
) -> Hypothesis:
    """Converts a path through the graph to a hypothesis.

    Args:
        graph: the graph.
        options: the scales of `total`.
        arc: (L,) int64, graph arcs.
        total: the path's scaled score.
        final_score: the graph's final score, unscaled; 0 for an unfinished path.
        lm_score: the language model score, unscaled.
        frame_of: (T,) the original frame of each decoded one; None if no frames were skipped.
    """
    return SpelledPath().followed_by(graph, arc, frame_of).hypothesis(graph, options, total, final_score, lm_score)


def _runs(token_id: Tensor, first_frame: int, frame_of: Tensor | None) -> _Runs:
    """Runs of equal tokens of frames (T,), without blanks, each as (token, first frame, frame after the last)."""
    token, length = torch.unique_consecutive(token_id, return_counts=True)
    end = length.cumsum(0)
    spoken = token > 0
    token, begin, last = token[spoken], (end - length)[spoken], (end - 1)[spoken]
    if frame_of is None:
        begin, last = begin + first_frame, last + first_frame
    else:
        begin, last = frame_of[begin], frame_of[last]
    return tuple(zip(token.tolist(), begin.tolist(), (last + 1).tolist(), strict=True))
