"""Lattices: the paths that a search kept, with separate acoustic, graph and language model scores.

Contains the lattice itself, forward and backward scores of its states, pruning, and the scores and words of a lattice
that a search has found (`asr.decoding.lattice_records`).

Shapes: N utterances, T frames, C tokens, S lattice states, A lattice arcs, W words, L arcs of a path.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor

from asr import old_paths
from asr.decoding.cpu.lattice import build_pruned, order_by_source, spread_backward, spread_forward
from asr.decoding.settings import DecodingOptions
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.jit import gpu_module, jit
from asr.kernels.memory import moved_together
from asr.text.symbols import EOS_ID

# The columns of states and arcs that do not count states, arcs or utterances.
_OF_STATES = ("frame", "final_graph_score", "final_lm_score")
_OF_ARCS = ("graph_arc", "token_id", "am_score", "graph_score", "lm_score")


@dataclass(frozen=True, eq=False)
class Lattice:
    """An acyclic graph for each of N utterances; every arc reads one frame. Scores are natural logs, unscaled.

    The states of all utterances together are sorted by frame, and arcs by source state.

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

    def __repr__(self) -> str:
        return f"Lattice(utterances={len(self.start_state)}, states={self.num_states}, arcs={self.num_arcs})"

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
        """The same lattice on another device, in one copy."""
        if self.frame.device == torch.device(device):
            return self
        columns = [getattr(self, field.name) for field in fields(self)]
        return Lattice(*moved_together(columns, torch.device(device)))

    def select(self, kept_state: Tensor, kept_arc: Tensor) -> Lattice:
        """The sublattice of the given states (S,) bool and arcs (A,) bool; start states must be kept."""
        number, src_state = kept_state.cumsum(0) - 1, self.src_state()
        arc = (kept_arc & kept_state[src_state] & kept_state[self.dst_state]).nonzero().squeeze(1)
        return self._take(kept_state.nonzero().squeeze(1), arc, number, number[src_state[arc]])

    def _take(self, state: Tensor, arc: Tensor, number: Tensor, src_state: Tensor) -> Lattice:
        """Some states and arcs, in this order; number (S,) has their new numbers, src_state the new sources of arcs."""
        word_begin, position = take_ranges(self.word_begin, arc)
        return Lattice(
            **{name: getattr(self, name)[state] for name in ("utt_idx", *_OF_STATES)},
            **{name: getattr(self, name)[arc] for name in _OF_ARCS},
            start_state=number[self.start_state],
            arc_begin=_begins(torch.bincount(src_state, minlength=len(state))),
            dst_state=number[self.dst_state[arc]],
            word_begin=word_begin,
            word_id=self.word_id[position],
        )

    def without_sentence_ends(self, options: DecodingOptions) -> Lattice:
        """The same paths with the same totals, without the words `</s>`; the acoustic score takes their penalty."""
        is_word = self.word_id != EOS_ID
        if bool(is_word.all()):
            return self
        num_words = self.num_words()
        num_ends = torch.bincount(torch.repeat_interleave(num_words)[~is_word], minlength=self.num_arcs)
        penalty = num_ends * (options.word_insertion_penalty / options.am_scale)
        return replace(
            self,
            am_score=self.am_score + penalty.to(self.am_score.dtype),
            word_begin=_begins(num_words - num_ends),
            word_id=self.word_id[is_word],
        )

    def sentence_ends(self, graph: DecodingGraph) -> Tensor:
        """The arcs (A,) bool that end a sentence in the graph that was searched, but do not have the word `</s>`."""
        word_begin, position = take_ranges(graph.word_begin, self.graph_arc)
        arc = torch.repeat_interleave(word_begin[1:] - word_begin[:-1])
        ends = torch.zeros(self.num_arcs, dtype=torch.bool, device=arc.device)
        ends[arc[graph.word_id[position] == EOS_ID]] = True
        return ends & (self.num_words() == 0)

    def with_sentence_ends(self, graph: DecodingGraph) -> Lattice:
        """The lattice with the words `</s>` that `without_sentence_ends` took away, but with the same scores.

        Args:
            graph: the graph that was searched.
        """
        ends = self.sentence_ends(graph)
        if not bool(ends.any()):
            return self
        word_begin = _begins(self.num_words() + ends.long())
        word_id = torch.full((int(word_begin[-1]),), EOS_ID, dtype=self.word_id.dtype, device=ends.device)
        word_id[torch.repeat_interleave(~ends, word_begin[1:] - word_begin[:-1])] = self.word_id
        return replace(self, word_begin=word_begin, word_id=word_id)

    def between(self, first: int, last: int) -> Lattice:
        """The lattice of one utterance from one frame, which becomes frame 0, to another; each of them has one state.

        Paths may end in the last one, with a score of 0; if that is the end of the utterance, as before.
        """
        is_end = last == self.num_frames
        if first == 0 and is_end:
            return self
        is_inside = (self.frame >= first) & (self.frame <= last)
        part = self.select(is_inside, torch.ones_like(self.dst_state, dtype=torch.bool))
        is_cut = (part.frame == last) & (not is_end)
        return replace(
            part,
            frame=part.frame - first,
            start_state=torch.zeros_like(self.start_state),
            final_graph_score=part.final_graph_score.masked_fill(is_cut, 0.0),
            final_lm_score=part.final_lm_score.masked_fill(is_cut, 0.0),
        )

    def split(self) -> list[Lattice]:
        """One lattice per utterance on the host, in the order of the start states, in one copy from a GPU."""
        num_utts, utt_idx = self.num_utts, self.utt_idx
        if not num_utts:
            return []
        # States of utterances without a start state come last, and are left out.
        row_of = torch.full((int(utt_idx.max()) + 1,), num_utts, dtype=torch.int64, device=utt_idx.device)
        row_of[utt_idx[self.start_state]] = torch.arange(num_utts, device=utt_idx.device)
        row = row_of[utt_idx]
        state, state_begin = stable_order(row, num_utts + 1)
        number = torch.empty_like(state)
        number[state] = torch.arange(len(state), device=state.device)
        number -= state_begin[row]
        # An utterance's arcs stay in the order of their sources.
        arc, first_arc = stable_order(row[self.src_state()], num_utts + 1)
        num_arcs = (self.arc_begin[1:] - self.arc_begin[:-1])[state]
        word_begin, position = take_ranges(self.word_begin, arc)
        of_states = [getattr(self, name)[state] for name in _OF_STATES]
        of_arcs = [number[self.dst_state[arc]], *(getattr(self, name)[arc] for name in _OF_ARCS)]
        others = [number[self.start_state], _begins(num_arcs), word_begin, self.word_id[position]]
        bounds = [part[: num_utts + 1] for part in (state_begin, first_arc, word_begin[first_arc])]
        moved = iter(moved_together([*of_states, *of_arcs, *others, *bounds], torch.device("cpu")))
        of_states, of_arcs, others, bounds = (
            list(itertools.islice(moved, len(part))) for part in (of_states, of_arcs, others, bounds)
        )
        start_state, arc_begin, word_begin, word_id = others
        parts = []
        for utt, (begin, end) in enumerate(itertools.pairwise(zip(*(part.tolist() for part in bounds), strict=True))):
            states, arcs, words = map(slice, begin, end)
            # Copies, because a view would keep the memory of all utterances.
            own_states = {name: part[states].clone() for name, part in zip(_OF_STATES, of_states, strict=True)}
            own_arcs = {name: part[arcs].clone() for name, part in zip(("dst_state", *_OF_ARCS), of_arcs, strict=True)}
            parts.append(
                Lattice(
                    **own_states,
                    **own_arcs,
                    utt_idx=torch.zeros_like(own_states["frame"]),
                    start_state=start_state[utt : utt + 1].clone(),
                    arc_begin=arc_begin[states.start : states.stop + 1] - arcs.start,
                    word_begin=word_begin[arcs.start : arcs.stop + 1] - words.start,
                    word_id=word_id[words].clone(),
                )
            )
        return parts


def _begins(length: Tensor) -> Tensor:
    """Where rows of these lengths (K,) begin, and the end, (K + 1,) int64."""
    return torch.cat([length.new_zeros(1), length.cumsum(0)])


def stable_order(row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Sorts items stably by row (K,) int64 -> their order (K,), and where each row begins, (num_rows + 1,)."""
    loop = jit(order_by_source) if row.device.type == "cpu" else None
    if loop is not None:
        order, begin = loop(row.numpy(), num_rows)
        return torch.from_numpy(order), torch.from_numpy(begin)
    ordered, order = torch.sort(row, stable=True)
    return order, torch.searchsorted(ordered, torch.arange(num_rows + 1, device=row.device))


def take_ranges(begin: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Selects rows of a ragged array: begin (A + 1,), chosen (K,) -> new begins (K + 1,) and old positions (W',)."""
    first = begin.index_select(0, chosen)
    length = begin.index_select(0, chosen + 1) - first
    new_begin = torch.zeros(len(chosen) + 1, dtype=torch.int64, device=begin.device)
    new_begin[1:] = length.cumsum(0)
    row = torch.repeat_interleave(length)
    position = torch.arange(len(row), device=begin.device) - new_begin.index_select(0, row)
    return new_begin, position + first.index_select(0, row)


def join(lattices: list[Lattice]) -> Lattice:
    """Joins several lattices into one, with utterances numbered consecutively."""
    if len(lattices) == 1:
        return lattices[0]

    def shifted(name: str, sizes: list[int]) -> Tensor:
        """A column of all lattices that counts states or utterances, of which each lattice has so many."""
        offsets = itertools.accumulate(sizes[:-1], initial=0)
        return torch.cat([getattr(part, name) + offset for part, offset in zip(lattices, offsets, strict=True)])

    num_states = [lattice.num_states for lattice in lattices]
    one_by_one = Lattice(
        **{name: torch.cat([getattr(part, name) for part in lattices]) for name in (*_OF_STATES, *_OF_ARCS, "word_id")},
        utt_idx=shifted("utt_idx", [lattice.num_utts for lattice in lattices]),
        start_state=shifted("start_state", num_states),
        arc_begin=_begins(torch.cat([lattice.arc_begin[1:] - lattice.arc_begin[:-1] for lattice in lattices])),
        dst_state=shifted("dst_state", num_states),
        word_begin=_begins(torch.cat([lattice.num_words() for lattice in lattices])),
    )
    state = torch.sort(one_by_one.frame, stable=True).indices
    number = torch.empty_like(state)
    number[state] = torch.arange(len(state), device=state.device)
    src_state, arc = torch.sort(number[one_by_one.src_state()], stable=True)
    return one_by_one._take(state, arc, number, src_state)


def best_from_start(lattice: Lattice, arc_total: Tensor) -> Tensor:
    """The score of the best path from the start to each state, (S,) float64; arc_total (A,) float64."""
    score = torch.full((lattice.num_states,), -torch.inf, dtype=torch.float64, device=arc_total.device)
    score.index_fill_(0, lattice.start_state, 0.0)
    return _raised(score, lattice, arc_total, is_backward=False)


def best_to_end(lattice: Lattice, arc_total: Tensor, final_total: Tensor) -> Tensor:
    """The score of the best path from each state to an end, (S,) float64; arc_total (A,), final_total (S,) float64."""
    return _raised(final_total.clone(), lattice, arc_total, is_backward=True)


def _raised(score: Tensor, lattice: Lattice, arc_total: Tensor, is_backward: bool) -> Tensor:
    """Raises score (S,) in place to the best over the arcs that lead to each state or, backward, that leave it."""
    loop = jit(spread_backward if is_backward else spread_forward) if score.device.type == "cpu" else None
    if loop is not None:
        loop(*(part.numpy() for part in (lattice.arc_begin, lattice.dst_state, arc_total, score)))
        return score
    own, other = lattice.dst_state, lattice.src_state()
    if is_backward:
        own, other = other, own
    if (spread := gpu_module("asr.decoding.gpu.spread", score.device)) is not None and lattice.num_arcs:
        num_utts, num_frames = torch.stack([lattice.utt_idx.amax(), lattice.frame.amax()]).tolist()
        states = (lattice.utt_idx, lattice.frame, num_utts + 1, num_frames + 1)
        return cast(Tensor, spread.raised(score, states, (own, other, arc_total), is_backward))
    frames = list(itertools.pairwise(lattice.arc_frame_begin))
    for first, last in reversed(frames) if is_backward else frames:
        extended = score.index_select(0, other[first:last]) + arc_total[first:last]
        score.scatter_reduce_(0, own[first:last], extended, "amax")
    return score


def prune(lattice: Lattice, options: DecodingOptions, beam: float) -> Lattice:
    """Removes arcs and states whose best path is more than `beam` below the utterance's best path."""
    arc_total = lattice.arc_total(options)
    forward = best_from_start(lattice, arc_total)
    backward = best_to_end(lattice, arc_total, lattice.final_total(options))
    limit = backward[lattice.start_state] - beam
    # Some slack, so that rounding cannot prune the best path itself.
    limit = limit - 1e-6 * limit.abs().clamp(min=1.0)
    through = forward + backward
    kept_state = (through >= limit[lattice.utt_idx]) & (through > -torch.inf)
    kept_state.index_fill_(0, lattice.start_state, True)
    src_state = lattice.src_state()
    arc_through = forward[src_state] + arc_total + backward[lattice.dst_state]
    kept_arc = (arc_through >= limit[lattice.utt_idx[src_state]]) & (arc_through > -torch.inf)
    return lattice.select(kept_state, kept_arc)


def best_path(lattice: Lattice, options: DecodingOptions) -> tuple[Tensor, int] | None:
    """The arcs (L,) and the last state of the best path of one utterance's lattice; None if no path is complete."""
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
    """A lattice whose arcs do not yet have the scores and words of the graph that was searched.

    Args:
        frame: (S,) int64, ascending.
        utt_idx: (S,) int64.
        start_state: (N,) int64.
        src_state, dst_state: (A,) int64, in any order.
        arc: (A,) int64, the arc of the graph or lattice that was searched.
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
    order, arc_begin = stable_order(parts.src_state, len(parts.frame))
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
    """The lattice of a search through another lattice, whose arcs may occur several times, with different histories."""
    order, arc_begin = stable_order(parts.src_state, len(parts.frame))
    arc = parts.arc[order]
    word_begin, position = take_ranges(source.word_begin, arc)
    return Lattice(
        **_states_of(parts),
        **{name: getattr(source, name)[arc] for name in ("graph_arc", "token_id", "am_score", "graph_score")},
        arc_begin=arc_begin,
        dst_state=parts.dst_state[order],
        lm_score=parts.lm_score[order],
        word_begin=word_begin,
        word_id=source.word_id[position].to(torch.int64),
    )


def _states_of(parts: LatticeParts) -> dict[str, Tensor]:
    return {name: getattr(parts, name) for name in ("utt_idx", "start_state", *_OF_STATES)}


old_paths.offer(__name__)
