"""Lattices: the alternatives that a search kept, with acoustic, graph and language model scores apart.

Here are the lattice itself, best scores to and from its states, pruning, its construction from the back-pointers and
losing arcs of a search, and the posterior probabilities of its arcs and words.

Shapes: N utterances, T frames, C tokens, S lattice states, A lattice arcs, W words, R back-pointers, L losing arcs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.decoding.backtrace import Backtrace, Ending
from asr.decoding.cpu.lattice import (
    LatticeBackpointers,
    LosingArcs,
    add_losses,
    build_pruned,
    kept_within,
    order_by_source,
    spread_backward,
    spread_forward,
    sum_over_paths,
)
from asr.decoding.interface import DecodingOptions, Hypothesis
from asr.decoding.tokens import ActiveTokens, Candidates, Survivors
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.hash_table import marked_positions
from asr.kernels.jit import jit


@dataclass(frozen=True, eq=False)
class Lattice:
    """An acyclic graph for each of N utterances; every arc reads one frame. Scores are natural logs, unscaled.

    States are sorted by frame, over all utterances together, arcs by the state they leave.

    Args:
        frame: (S,) int64, frames read before the state.
        utt_idx: (S,) int64, the utterance it belongs to.
        start_state: (N,) int64.
        arc_begin: (S + 1,) int64; arcs of state s are arc_begin[s] : arc_begin[s + 1].
        dst_state: (A,) int64.
        graph_arc: (A,) int64, the decoding graph's arc.
        token_id: (A,) int32, the acoustic token.
        am_score, graph_score, lm_score: (A,) float32; lm_score is 0 before rescoring.
        word_begin: (A + 1,) int64; words of arc a are word_id[word_begin[a] : word_begin[a + 1]].
        word_id: (W,) int64.
        final_graph_score: (S,) float32, -inf where a path may not end.
        final_lm_score: (S,) float32.
    """

    frame: Tensor
    utt_idx: Tensor
    start_state: Tensor
    arc_begin: Tensor
    dst_state: Tensor
    graph_arc: Tensor
    token_id: Tensor
    am_score: Tensor
    graph_score: Tensor
    lm_score: Tensor
    word_begin: Tensor
    word_id: Tensor
    final_graph_score: Tensor
    final_lm_score: Tensor

    @property
    def num_states(self) -> int:
        return len(self.frame)

    @property
    def num_arcs(self) -> int:
        return len(self.dst_state)

    @property
    def num_utts(self) -> int:
        return len(self.start_state)

    @property
    def num_frames(self) -> int:
        """Frames of the longest utterance."""
        return int(self.frame[-1]) if len(self.frame) else 0

    def frames_of_utts(self) -> Tensor:
        """Frames of each utterance, in the order of the start states, (N,) int64."""
        utt_idx = self.utt_idx[self.start_state]
        num_frames = torch.zeros(int(utt_idx.max()) + 1, dtype=torch.int64, device=utt_idx.device)
        return num_frames.scatter_reduce_(0, self.utt_idx, self.frame, "amax")[utt_idx]

    def src_state(self) -> Tensor:
        """The state that each arc leaves, (A,) int64."""
        return torch.repeat_interleave(self.arc_begin[1:] - self.arc_begin[:-1], output_size=self.num_arcs)

    def num_words(self) -> Tensor:
        """The number of words on each arc, (A,) int64."""
        return self.word_begin[1:] - self.word_begin[:-1]

    def arc_total(self, options: DecodingOptions) -> Tensor:
        """The scaled score of each arc, (A,) float64."""
        return (
            options.am_scale * self.am_score.double()
            + options.graph_scale * self.graph_score.double()
            + options.lm_scale * self.lm_score.double()
            + options.word_insertion_penalty * self.num_words().double()
        )

    def final_total(self, options: DecodingOptions) -> Tensor:
        """The scaled score of ending at each state, (S,) float64, -inf where a path may not end."""
        may_end = self.final_graph_score > -torch.inf
        score = options.graph_scale * self.final_graph_score.double() + options.lm_scale * self.final_lm_score.double()
        return torch.where(may_end, score, torch.full_like(score, -torch.inf))

    @functools.cached_property
    def arc_frame_begin(self) -> list[int]:
        """For each frame its first arc, then the number of arcs: T + 1 numbers."""
        frames = torch.arange(self.num_frames + 1, device=self.frame.device)
        return [int(begin) for begin in self.arc_begin[torch.searchsorted(self.frame, frames)].tolist()]

    def to(self, device: torch.device | str) -> Lattice:
        """The same lattice on another device, in one copy for each type of numbers."""
        if self.frame.device == torch.device(device):
            return self
        moved: dict[str, Tensor] = {}
        by_type: dict[torch.dtype, dict[str, Tensor]] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            by_type.setdefault(column.dtype, {})[field.name] = column
        for own in by_type.values():
            together = torch.cat(list(own.values())).to(device)
            moved.update(zip(own, together.split([len(column) for column in own.values()]), strict=True))
        return Lattice(**moved)

    def select(self, kept_state: Tensor, kept_arc: Tensor) -> Lattice:
        """Some states and arcs; start states must stay. kept_state (S,) bool, kept_arc (A,) bool."""
        state = kept_state.nonzero().squeeze(1)
        number = kept_state.cumsum(0) - 1
        src_state = self.src_state()
        kept_arc = kept_arc & kept_state[src_state] & kept_state[self.dst_state]
        arc = kept_arc.nonzero().squeeze(1)
        word_begin, position = take_ranges(self.word_begin, arc)
        num_arcs = torch.bincount(number[src_state[arc]], minlength=len(state))
        return Lattice(
            frame=self.frame[state],
            utt_idx=self.utt_idx[state],
            start_state=number[self.start_state],
            arc_begin=torch.cat([num_arcs.new_zeros(1), num_arcs.cumsum(0)]),
            dst_state=number[self.dst_state[arc]],
            graph_arc=self.graph_arc[arc],
            token_id=self.token_id[arc],
            am_score=self.am_score[arc],
            graph_score=self.graph_score[arc],
            lm_score=self.lm_score[arc],
            word_begin=word_begin,
            word_id=self.word_id[position],
            final_graph_score=self.final_graph_score[state],
            final_lm_score=self.final_lm_score[state],
        )

    def split(self) -> list[Lattice]:
        """One lattice an utterance, in the order of the start states."""
        arc_utt = self.utt_idx[self.src_state()]
        parts = []
        for position, utt_idx in enumerate(self.utt_idx[self.start_state].tolist()):
            one = replace(self, start_state=self.start_state[position : position + 1])
            part = one.select(self.utt_idx == utt_idx, arc_utt == utt_idx)
            parts.append(replace(part, utt_idx=torch.zeros_like(part.utt_idx)))
        return parts


def take_ranges(begin: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of a ragged array: begin (A + 1,), chosen (K,) -> its own begins (K + 1,) and positions (W',)."""
    first = begin.index_select(0, chosen)
    length = begin.index_select(0, chosen + 1) - first
    new_begin = torch.zeros(len(chosen) + 1, dtype=torch.int64, device=begin.device)
    new_begin[1:] = length.cumsum(0)
    row = torch.repeat_interleave(length)
    position = torch.arange(len(row), device=begin.device) - new_begin.index_select(0, row)
    return new_begin, position + first.index_select(0, row)


def join(lattices: list[Lattice]) -> Lattice:
    """Several lattices as one, utterances numbered on."""
    if len(lattices) == 1:
        return lattices[0]
    num_states = [lattice.num_states for lattice in lattices]
    state_offset = [sum(num_states[:i]) for i in range(len(lattices))]
    utt_offset = [sum(lattice.num_utts for lattice in lattices[:i]) for i in range(len(lattices))]
    frame = torch.cat([lattice.frame for lattice in lattices])
    order = torch.sort(frame, stable=True).indices
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=order.device)

    def shifted(parts: list[Tensor], offsets: list[int]) -> Tensor:
        return torch.cat([part + offset for part, offset in zip(parts, offsets, strict=True)])

    src_state = number[
        torch.cat([part.src_state() + offset for part, offset in zip(lattices, state_offset, strict=True)])
    ]
    arc = torch.sort(src_state, stable=True).indices
    num_arcs = torch.bincount(src_state, minlength=len(order))
    length = torch.cat([lattice.num_words() for lattice in lattices])
    word_begin, position = take_ranges(torch.cat([length.new_zeros(1), length.cumsum(0)]), arc)

    def joined(name: str, chosen: Tensor) -> Tensor:
        return torch.cat([getattr(lattice, name) for lattice in lattices])[chosen]

    return Lattice(
        frame=frame[order],
        utt_idx=shifted([lattice.utt_idx for lattice in lattices], utt_offset)[order],
        start_state=number[shifted([lattice.start_state for lattice in lattices], state_offset)],
        arc_begin=torch.cat([num_arcs.new_zeros(1), num_arcs.cumsum(0)]),
        dst_state=number[shifted([lattice.dst_state for lattice in lattices], state_offset)][arc],
        graph_arc=joined("graph_arc", arc),
        token_id=joined("token_id", arc),
        am_score=joined("am_score", arc),
        graph_score=joined("graph_score", arc),
        lm_score=joined("lm_score", arc),
        word_begin=word_begin,
        word_id=joined("word_id", position),
        final_graph_score=joined("final_graph_score", order),
        final_lm_score=joined("final_lm_score", order),
    )


def best_from_start(lattice: Lattice, arc_total: Tensor) -> Tensor:
    """The best score of any way from the start to each state, (S,) float64; arc_total (A,) float64."""
    score = torch.full((lattice.num_states,), -torch.inf, dtype=torch.float64, device=arc_total.device)
    score[lattice.start_state] = 0.0
    if (loop := _loop_for(spread_forward, score)) is not None:
        loop(*_arrays(lattice, arc_total, score))
        return score
    src_state = lattice.src_state()
    begin = lattice.arc_frame_begin
    for first, last in itertools.pairwise(begin):
        extended = score.index_select(0, src_state[first:last]) + arc_total[first:last]
        score.scatter_reduce_(0, lattice.dst_state[first:last], extended, "amax", include_self=True)
    return score


def best_to_end(lattice: Lattice, arc_total: Tensor, final_total: Tensor) -> Tensor:
    """The best score of any way from each state to an end, (S,) float64; arc_total (A,), final_total (S,) float64."""
    score = final_total.clone()
    if (loop := _loop_for(spread_backward, score)) is not None:
        loop(*_arrays(lattice, arc_total, score))
        return score
    src_state = lattice.src_state()
    begin = lattice.arc_frame_begin
    for first, last in reversed(list(itertools.pairwise(begin))):
        extended = score.index_select(0, lattice.dst_state[first:last]) + arc_total[first:last]
        score.scatter_reduce_(0, src_state[first:last], extended, "amax", include_self=True)
    return score


def _loop_for(function: Callable[..., None], score: Tensor) -> Callable[..., None] | None:
    """The compiled loop, if numba is installed and the lattice on a CPU; it gives the same scores."""
    return jit(function) if score.device.type == "cpu" else None


def _arrays(lattice: Lattice, arc_total: Tensor, score: Tensor) -> list[NDArray[Any]]:
    return [part.numpy() for part in (lattice.arc_begin, lattice.dst_state, arc_total, score)]


def prune(lattice: Lattice, options: DecodingOptions, beam: float) -> Lattice:
    """Drops arcs whose best path is more than `beam` worse than the utterance's best, and states without arcs."""
    arc_total = lattice.arc_total(options)
    forward = best_from_start(lattice, arc_total)
    backward = best_to_end(lattice, arc_total, lattice.final_total(options))
    limit = backward[lattice.start_state] - beam
    # Rounding must not cost the best path its arcs.
    limit = limit - 1e-6 * limit.abs().clamp(min=1.0)
    through = forward + backward
    kept_state = (through >= limit[lattice.utt_idx]) & (through > -torch.inf)
    kept_state[lattice.start_state] = True
    src_state = lattice.src_state()
    arc_through = forward[src_state] + arc_total + backward[lattice.dst_state]
    kept_arc = (arc_through >= limit[lattice.utt_idx[src_state]]) & (arc_through > -torch.inf)
    return lattice.select(kept_state, kept_arc)


def best_path(lattice: Lattice, options: DecodingOptions) -> tuple[Tensor, int] | None:
    """The arcs (L,) of the best path of a lattice of one utterance and its last state; None where none ends."""
    arc_total = lattice.arc_total(options)
    backward = best_to_end(lattice, arc_total, lattice.final_total(options)).cpu()
    state = int(lattice.start_state[0])
    if float(backward[state]) == -torch.inf:
        return None
    follow = (arc_total.cpu() + backward[lattice.dst_state.cpu()]).numpy()
    final_total = lattice.final_total(options).cpu().numpy()
    arc_begin, dst_state = lattice.arc_begin.cpu().numpy(), lattice.dst_state.cpu().numpy()
    path: list[int] = []
    while True:
        first, last = int(arc_begin[state]), int(arc_begin[state + 1])
        if first == last or final_total[state] >= follow[first:last].max():
            return torch.tensor(path, dtype=torch.int64, device=arc_total.device), state
        path.append(first + int(follow[first:last].argmax()))
        state = int(dst_state[path[-1]])


@dataclass(frozen=True, eq=False)
class LatticeParts:
    """A lattice before the scores and words of its arcs are looked up in the graph that was searched.

    Args:
        frame: (S,) int64, ascending.
        utt_idx: (S,) int64.
        start_state: (N,) int64.
        src_state, dst_state: (A,) int64, in any order.
        arc: (A,) int64, the arc of what was searched.
        lm_score: (A,) float32.
        final_graph_score: (S,) float32, -inf where a path may not end.
        final_lm_score: (S,) float32.
    """

    frame: Tensor
    utt_idx: Tensor
    start_state: Tensor
    src_state: Tensor
    dst_state: Tensor
    arc: Tensor
    lm_score: Tensor
    final_graph_score: Tensor
    final_lm_score: Tensor


def pruned_lattice(parts: LatticeParts, graph: DecodingGraph, log_prob: Tensor, options: DecodingOptions) -> Lattice:
    """`lattice_from_graph`, pruned by the output beam."""
    loop = jit(build_pruned) if log_prob.device.type == "cpu" else None
    if loop is None or not log_prob.numel():
        return prune(lattice_from_graph(parts, graph, log_prob), options, options.output_beam)
    found = loop(
        tuple(getattr(parts, field.name).numpy() for field in fields(parts)),
        tuple(part.numpy() for part in (graph.token_id, graph.score, graph.word_begin, graph.word_id)),
        log_prob.numpy(),
        (options.am_scale, options.graph_scale, options.lm_scale, options.word_insertion_penalty),
        options.output_beam,
    )
    return Lattice(*map(torch.from_numpy, found))


def lattice_from_graph(parts: LatticeParts, graph: DecodingGraph, log_prob: Tensor) -> Lattice:
    """The lattice of a search through `graph`; log_prob (N, T, C) as the search read them, unscaled."""
    order, arc_begin = _by_source(parts)
    src_state, graph_arc = parts.src_state[order], parts.arc[order]
    token_id = graph.token_id[graph_arc]
    am_score = log_prob[parts.utt_idx[src_state], parts.frame[src_state], token_id.long()]
    word_begin, position = take_ranges(graph.word_begin, graph_arc)
    return Lattice(
        **_states_of(parts),
        arc_begin=arc_begin,
        dst_state=parts.dst_state[order],
        graph_arc=graph_arc,
        token_id=token_id,
        am_score=am_score,
        graph_score=graph.score[graph_arc],
        lm_score=parts.lm_score[order],
        word_begin=word_begin,
        word_id=graph.word_id[position].to(torch.int64),
    )


def lattice_from_lattice(parts: LatticeParts, source: Lattice) -> Lattice:
    """The lattice of a search through another one, some of whose arcs it has several times."""
    order, arc_begin = _by_source(parts)
    arc = parts.arc[order]
    word_begin, position = take_ranges(source.word_begin, arc)
    return Lattice(
        **_states_of(parts),
        arc_begin=arc_begin,
        dst_state=parts.dst_state[order],
        graph_arc=source.graph_arc[arc],
        token_id=source.token_id[arc],
        am_score=source.am_score[arc],
        graph_score=source.graph_score[arc],
        lm_score=parts.lm_score[order],
        word_begin=word_begin,
        word_id=source.word_id[position].to(torch.int64),
    )


def _states_of(parts: LatticeParts) -> dict[str, Tensor]:
    names = ("frame", "utt_idx", "start_state", "final_graph_score", "final_lm_score")
    return {name: getattr(parts, name) for name in names}


def _by_source(parts: LatticeParts) -> tuple[Tensor, Tensor]:
    """The arcs (A,) in the order of the states that they leave, and arc_begin (S + 1,)."""
    src_state, num_states = parts.src_state, len(parts.frame)
    loop = jit(order_by_source) if src_state.device.type == "cpu" else None
    if loop is not None:
        order, arc_begin = loop(src_state.numpy(), num_states)
        return torch.from_numpy(order), torch.from_numpy(arc_begin)
    num_arcs = torch.bincount(src_state, minlength=num_states)
    return torch.sort(src_state, stable=True).indices, torch.cat([num_arcs.new_zeros(1), num_arcs.cumsum(0)])


# More than the rounding of all the scores of an utterance can be.
_SLACK = 0.1


def lattice_margin(options: DecodingOptions) -> float:
    """An arc that loses by more cannot be on a path within the output beam."""
    return options.output_beam + _SLACK


def collects_on(device: torch.device, keep_lattice: bool) -> bool:
    """Whether back-pointers are collected: not for a lattice on a CPU, whose loops prune each chunk themselves."""
    return not keep_lattice or device.type != "cpu"


class LatticeRecords:
    """The losing arcs of a search. A lattice state is a back-pointer, or the start of an utterance.

    The back-pointers say by which arc a state was reached best. Kept here are the losing arcs, which led there, too,
    inside the search beam. One that loses by more than `margin` cannot be in the lattice. Utterances begin together.

    Args:
        num_utts: N.
        options: the beams that are searched with.
        compiled: whether numba's loops, where it is installed and on a CPU, drop what the output beam is going to drop.
    """

    def __init__(self, num_utts: int, options: DecodingOptions) -> None:
        self._num_utts = num_utts
        self._search_beam = options.search_beam
        self.margin = lattice_margin(options)
        self._first_frame = 0
        self._num_frames = 0
        # (utt_idx, frame) of the back-pointers; (src, dst, arc, score_gap) of the losing arcs.
        self._backpointers: list[tuple[Tensor, ...]] = []
        self._losing_arcs: list[tuple[Tensor, ...]] = []
        # Of both, where a language model takes part.
        self._lm_scores: list[tuple[Tensor, ...]] = []

    def begin_chunk(self, first_frame: int) -> None:
        """Frames are counted from this one on; for searches that go on in several calls."""
        self._first_frame, self._num_frames = first_frame, 0

    def arrays(self) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """What has been taken: (utt_idx, frame) of all back-pointers, (src, dst, arc, score_gap) of all losing arcs."""
        of_backpointers, of_losing = self._taken(torch.empty(0, dtype=torch.int64))
        return [part.numpy() for part in of_backpointers], [part.numpy() for part in of_losing]

    def _taken(self, none: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(utt_idx, frame) of all back-pointers, (src, dst, arc, score_gap) of losing arcs; `none` is (0,) int64."""
        of_backpointers = _joined(self._backpointers, (none, none))
        return of_backpointers, _joined(self._losing_arcs, (none, none, none, none.float()))

    def add(
        self,
        tokens: ActiveTokens,
        candidates: Candidates,
        graph_arc: Tensor,
        survivors: Survivors,
        backpointer: Tensor,
    ) -> None:
        """Takes one frame.

        Args:
            tokens: before the frame.
            candidates: what they became over arcs.
            graph_arc: (A,) these arcs in the graph.
            survivors: the outcome of recombination and pruning.
            backpointer: (K',) of the survivors.
        """
        winner, kept, _ = survivors
        backpointer_of = torch.full_like(winner, -1)
        backpointer_of[kept] = backpointer
        losing = self.losing(candidates, winner, backpointer_of >= 0).nonzero().squeeze(1)
        source, won = candidates.source[losing], winner[losing]
        before, score_gap = tokens.backpointer[source], candidates.score[won] - candidates.score[losing]
        lm_scores = None
        if candidates.lm_score is not None:
            lm_score = candidates.lm_score - tokens.lm_score[candidates.source]
            lm_scores = lm_score[kept], lm_score[losing]
        losing_arcs = before, backpointer_of[won], graph_arc[losing], score_gap
        self.add_frame(candidates.stream[kept], losing_arcs, lm_scores)

    def losing(self, candidates: Candidates, winner: Tensor, survives: Tensor) -> Tensor:
        """Which candidates of a frame belong to the lattice though they lost, (A,) bool; a GPU is not waited for.

        Args:
            candidates: all of them.
            winner: (A,) the position of the candidate that each lost to.
            survives: (A,) bool, which winners survive.
        """
        score, stream = candidates.score, candidates.stream
        # What falls behind the search beam is dropped here as everywhere, unless min_active_states kept worse ones.
        lowest = torch.full((self._num_utts,), -self._search_beam, device=score.device)
        of_survivors = torch.where(survives, score, torch.full_like(score, torch.inf))
        lowest.scatter_reduce_(0, stream, of_survivors, "amin", include_self=True)
        stays = survives[winner] & (score[winner] - score <= self.margin) & (score >= lowest[stream])
        return stays & (winner != torch.arange(len(winner), device=winner.device))

    def add_frame(
        self, utt_idx: Tensor, losing_arcs: Sequence[Tensor], lm_scores: Sequence[Tensor] | None = None
    ) -> None:
        """Takes the next frame.

        Args:
            utt_idx: (K',) of each new back-pointer, in order, its utterance.
            losing_arcs, lm_scores: as of `add_frames`.
        """
        self._num_frames += 1
        self.add_frames(utt_idx, torch.full_like(utt_idx, self._num_frames), losing_arcs, lm_scores)

    def add_frames(
        self,
        utt_idx: Tensor,
        frame: Tensor,
        losing_arcs: Sequence[Tensor],
        lm_scores: Sequence[Tensor] | None = None,
    ) -> None:
        """Takes several frames.

        Args:
            utt_idx, frame: (R,) of each new backpointer, in order, its utterance and the frames read, its own included.
            losing_arcs: (L,) each, those of a frame side by side: the back-pointer before, the back-pointer to which it
                lost, its arc in the graph, and its score gap.
            lm_scores: (R,) and (L,) float64, what the language model gave the words of each arc; None without one.
        """
        self._backpointers.append((utt_idx, frame + self._first_frame))
        self._losing_arcs.append(tuple(losing_arcs))
        if lm_scores is not None:
            self._lm_scores.append(tuple(lm_scores))

    def collect(self, backtrace: Backtrace, living: Tensor) -> Tensor:
        """Drops what loses by more than `margin` on all ways to living back-pointers; a GPU is waited for twice.

        However the search goes on, a path that goes through such a back-pointer or losing arc loses at least as much
        against the best path to where it then is: the lattice within the output beam remains the same.

        Args:
            backtrace: of the search, whose blocks are its frames; it is renumbered.
            living: (K,) the back-pointers of all tokens.

        Returns:
            Their new numbers (K,).
        """
        previous, arc = backtrace.records()
        if not len(arc):
            return living
        none, blocks = arc[:0], backtrace.block_begin
        (utt_idx, frame), (src, dst, losing_arc, score_gap) = self._taken(none)
        begin = torch.tensor(blocks, device=arc.device)
        # Losing arcs stand in the order of the blocks that they lead to.
        losing_begin = torch.searchsorted(frame.index_select(0, dst), frame.index_select(0, begin)).tolist()
        loss = torch.full((len(arc) + 1,), torch.inf, device=arc.device)
        loss[living] = 0.0  # -1 marks the spare last entry
        before_losing, before = (torch.where(one < 0, len(arc), one) for one in (src, previous))
        ends = zip(blocks, [*blocks[1:], len(arc)], strict=True)
        losing_ends = zip(losing_begin, [*losing_begin[1:], len(dst)], strict=True)
        for (first, end), (first_losing, end_losing) in reversed(list(zip(ends, losing_ends, strict=True))):
            own = slice(first_losing, end_losing)
            lost = loss.index_select(0, dst[own]) + score_gap[own]
            loss.scatter_reduce_(0, before_losing[own], lost, "amin", include_self=True)
            loss.scatter_reduce_(0, before[first:end], loss[first:end].clone(), "amin", include_self=True)
        keeps, keeps_losing = loss[:-1] <= self.margin, loss.index_select(0, dst) + score_gap <= self.margin
        number = torch.cat([keeps.cumsum(0) - keeps.long(), none.new_zeros(1)])
        num_kept, num_losing, *block_begin = torch.cat(
            [keeps.sum(0, keepdim=True), keeps_losing.sum(0, keepdim=True), number.index_select(0, begin)]
        ).tolist()
        number[-1] = -1
        kept, kept_losing = marked_positions(keeps, num_kept), marked_positions(keeps_losing, num_losing)
        backtrace.replace(number[previous[kept]], arc[kept], block_begin)
        self._backpointers = [(utt_idx[kept], frame[kept])]
        dst = number[dst[kept_losing]]
        self._losing_arcs = [(number[src[kept_losing]], dst, losing_arc[kept_losing], score_gap[kept_losing])]
        if self._lm_scores:
            of_backpointers, of_losing = _joined(self._lm_scores, (none.double(), none.double()))
            self._lm_scores = [(of_backpointers[kept], of_losing[kept_losing])]
        return number[living]

    def collected(self, backtrace: Backtrace, endings: Sequence[Ending]) -> LatticeParts:
        """The lattice, or at least what lies within the output beam.

        Args:
            backtrace: of the search.
            endings: of all utterances.
        """
        num_utts = self._num_utts
        final = ActiveTokens.join([ending.final for ending in endings])
        previous, arc = backtrace.records()
        none = arc[:0]
        (utt_idx, frame), (src, dst, losing_arc, score_gap) = self._taken(none)
        loops = (jit(add_losses), jit(kept_within)) if arc.device.type == "cpu" else (None, None)
        if loops[0] is not None and loops[1] is not None:
            backpointers = LatticeBackpointers(previous.numpy(), utt_idx.numpy(), frame.numpy())
            losing = LosingArcs(src.numpy(), dst.numpy(), score_gap.numpy())
            loss = _final_losses(final.backpointer, endings, len(arc)).numpy()
            loops[0](backpointers, losing, loss)
            found = loops[1](self.margin, backpointers, losing, loss, num_utts)
            kept, kept_losing, state, number, src_state, dst_state = map(torch.from_numpy, found)
        else:
            kept, kept_losing = (torch.arange(len(part), device=part.device) for part in (arc, dst))
            state = torch.sort(frame, stable=True).indices
            number = torch.full((len(arc) + 1,), -1, device=arc.device)
            number[state] = num_utts + kept
            src, dst = torch.cat([previous, src]), torch.cat([kept, dst])
            src_state = torch.where(src < 0, utt_idx[dst], number[src])
            dst_state = number[dst]
        starts = torch.arange(num_utts, device=arc.device)
        final_state = torch.where(final.backpointer < 0, final.stream, number[final.backpointer])
        no_end = torch.full((num_utts + len(state),), -torch.inf, device=arc.device)
        ends = (final_state >= 0).nonzero().squeeze(1)
        final_graph_score = torch.cat([ending.final_graph_score for ending in endings])[ends]
        final_lm_score = torch.cat([ending.final_lm_score for ending in endings])[ends]
        lm_score = torch.zeros(len(src_state), device=arc.device)
        if self._lm_scores:
            of_backpointers, of_losing = _joined(self._lm_scores, (none.double(), none.double()))
            lm_score = torch.cat([of_backpointers[kept], of_losing[kept_losing]]).float()
        return LatticeParts(
            frame=torch.cat([torch.zeros_like(starts), frame[state]]),
            utt_idx=torch.cat([starts, utt_idx[state]]),
            start_state=starts,
            src_state=src_state,
            dst_state=dst_state,
            arc=torch.cat([arc[kept], losing_arc[kept_losing]]),
            lm_score=lm_score,
            final_graph_score=no_end.index_copy(0, final_state[ends], final_graph_score),
            final_lm_score=torch.zeros_like(no_end).index_copy(0, final_state[ends], final_lm_score),
        )


def _joined(parts: list[tuple[Tensor, ...]], none: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(torch.cat, zip(none, *parts, strict=True)))


def _final_losses(backpointer: Tensor, endings: Sequence[Ending], num_records: int) -> Tensor:
    """How much worse than the best an utterance is that ends at a back-pointer, (R,) float32, inf if it may not."""
    loss = torch.full((num_records,), torch.inf)
    lost = [ending.final_total.max() - ending.final_total for ending in endings if len(ending.final)]
    if lost:
        has_arcs = backpointer >= 0
        loss[backpointer[has_arcs]] = torch.cat(lost)[has_arcs].float()
    return loss


def arc_posteriors(lattice: Lattice, options: DecodingOptions, scale: float = 1.0) -> Tensor:
    """The posterior probability of each arc, (A,) float64: the share of the paths through it in those of its utterance.

    Args:
        lattice: one or several utterances.
        options: scales of the parts of a score.
        scale: of the whole score; below 1 it tempers the overconfidence of frame-wise scores.
    """
    arc_total, ahead = scale * lattice.arc_total(options), scale * lattice.final_total(options)
    posterior = torch.zeros_like(arc_total)
    loop = jit(sum_over_paths) if arc_total.device.type == "cpu" else None
    if loop is not None:
        parts = (lattice.arc_begin, lattice.dst_state, arc_total, lattice.start_state, ahead, posterior)
        loop(*(part.numpy() for part in parts))
        return posterior
    src_state = lattice.src_state()
    frames = [(first, last) for first, last in itertools.pairwise(lattice.arc_frame_begin) if first < last]
    for first, last in reversed(frames):
        # The states of a frame are side by side.
        low, high = int(src_state[first]), int(src_state[last - 1]) + 1
        position, added = src_state[first:last] - low, arc_total[first:last] + ahead[lattice.dst_state[first:last]]
        best = ahead[low:high].scatter_reduce(0, position, added, "amax", include_self=True)
        shift = torch.where(best > -torch.inf, best, torch.zeros_like(best))
        total = (ahead[low:high] - shift).exp().scatter_add(0, position, (added - shift[position]).exp())
        ahead[low:high] = total.log() + shift
    through = torch.zeros_like(ahead)
    through[lattice.start_state] = 1.0
    share = (arc_total + ahead[lattice.dst_state] - ahead[src_state]).exp()
    share = torch.where(ahead[src_state] > -torch.inf, share, torch.zeros_like(share))
    for first, last in frames:
        posterior[first:last] = through[src_state[first:last]] * share[first:last]
        through.index_add_(0, lattice.dst_state[first:last], posterior[first:last])
    return posterior


def with_confidences(
    hypothesis: Hypothesis,
    lattice: Lattice,
    options: DecodingOptions,
    scale: float = 1.0,
    num_frames_apart: int = 5,
    original_frame: Tensor | None = None,
) -> Hypothesis:
    """The hypothesis with word confidences: the posterior probability of each word at about its time.

    Args:
        hypothesis: one of the lattice's.
        lattice: of one utterance.
        options, scale: as of `arc_posteriors`.
        num_frames_apart: a word that begins up to this many frames earlier or later is the same.
        original_frame: (T,) int64, the original frame of each of the lattice's, where frames were skipped.
    """
    posterior = arc_posteriors(lattice, options, scale)
    owner = torch.repeat_interleave(lattice.num_words())
    word_posterior = posterior[owner]
    frame = lattice.frame[lattice.src_state()[owner]]
    if original_frame is not None:
        frame = original_frame.to(frame.device)[frame]
    confidences = []
    for word_id, start_frame in zip(hypothesis.word_ids, hypothesis.start_frames, strict=True):
        agrees = (lattice.word_id == word_id) & ((frame - start_frame).abs() <= num_frames_apart)
        confidences.append(min(1.0, float(word_posterior[agrees].sum())))
    return replace(hypothesis, confidences=tuple(confidences))
