"""The losing arcs of a search, from which its lattice is built.

Shapes: N utterances, A candidates of a frame, K active tokens, R backpointers, L losing arcs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from asr.decoding.backend import ActiveTokens, Candidates, Survivors
from asr.decoding.backtrace import Backtrace, Ending
from asr.decoding.cpu.lattice import LatticeBackpointers, LosingArcs, add_losses, kept_within
from asr.decoding.lattice import LatticeParts
from asr.decoding.settings import DecodingOptions
from asr.kernels.hash_table import marked_positions
from asr.kernels.jit import gpu_module, jit
from asr.kernels.memory import to_device

# Exceeds the rounding errors of all scores of an utterance.
_SLACK = 0.1


def lattice_margin(options: DecodingOptions) -> float:
    """The score gap beyond which a losing arc cannot be on a path within the output beam."""
    return options.output_beam + _SLACK


def collects_on(device: torch.device, keep_lattice: bool) -> bool:
    """Whether backpointers are garbage-collected; not with a lattice on a CPU, where loops prune each chunk."""
    return not keep_lattice or device.type != "cpu"


class LatticeRecords:
    """The losing arcs of a search. A lattice state is a backpointer, or the start of an utterance.

    A backpointer has the best arc into a state. The losing arcs are the other arcs into it within the search beam; one
    that loses by more than `margin` cannot be in the lattice. All utterances must begin at the same time.

    Args:
        num_utts: N.
        options: the beams of the search.
    """

    def __init__(self, num_utts: int, options: DecodingOptions) -> None:
        self._num_utts = num_utts
        self._search_beam = options.search_beam
        self.margin = lattice_margin(options)
        self._first_frame = 0
        self._num_frames = 0
        # (utt_idx, frame) of the backpointers; (src, dst, arc, score_gap) of the losing arcs.
        self._backpointers: list[tuple[Tensor, ...]] = []
        self._losing_arcs: list[tuple[Tensor, ...]] = []
        # (lm_score of the backpointers' arcs, lm_score of the losing arcs), with a language model only.
        self._lm_scores: list[tuple[Tensor, ...]] = []

    def begin_chunk(self, first_frame: int) -> None:
        """Counts frames from `first_frame` on, for searches that span several calls."""
        self._first_frame, self._num_frames = first_frame, 0

    def arrays(self) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """All records: (utt_idx, frame) of the backpointers, (src, dst, arc, score_gap) of the losing arcs."""
        of_backpointers, of_losing = self._taken(torch.empty(0, dtype=torch.int64))
        return [part.numpy() for part in of_backpointers], [part.numpy() for part in of_losing]

    def _taken(self, none: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(utt_idx, frame) of all backpointers, (src, dst, arc, score_gap) of losing arcs; `none` is (0,) int64."""
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
        """Records one frame.

        Args:
            tokens: the tokens before the frame.
            candidates: their extensions over arcs.
            graph_arc: (A,) the graph arcs of the candidates.
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
        """Which candidates of a frame lost but belong to the lattice, (A,) bool; does not wait for a GPU.

        Args:
            candidates: all of them.
            winner: (A,) the position of the candidate that each lost to.
            survives: (A,) bool, which winners survive.
        """
        score, stream = candidates.score, candidates.stream
        # Losing arcs outside the search beam are dropped, except those above a survivor that min_active_states kept.
        lowest = torch.full((self._num_utts,), -self._search_beam, dtype=torch.float32, device=score.device)
        of_survivors = torch.where(survives, score, torch.full_like(score, torch.inf))
        lowest.scatter_reduce_(0, stream, of_survivors, "amin")
        stays = survives[winner] & (score[winner] - score <= self.margin) & (score >= lowest[stream])
        return stays & (winner != torch.arange(len(winner), device=winner.device))

    def add_frame(
        self, utt_idx: Tensor, losing_arcs: Sequence[Tensor], lm_scores: Sequence[Tensor] | None = None
    ) -> None:
        """Records the next frame.

        Args:
            utt_idx: (K',) the utterance of each new backpointer, in order.
            losing_arcs, lm_scores: as for `add_frames`.
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
        """Records several frames.

        Args:
            utt_idx, frame: (R,) the utterance of each new backpointer, in order, and the number of frames read by then.
            losing_arcs: (L,) each, grouped by frame: the previous backpointer, the backpointer that won, the graph arc,
                and the score gap.
            lm_scores: (R,) and (L,) float64, language model scores of the words on each arc; None without a language
                model.
        """
        self._backpointers.append((utt_idx, frame + self._first_frame))
        self._losing_arcs.append(tuple(losing_arcs))
        if lm_scores is not None:
            self._lm_scores.append(tuple(lm_scores))

    def collect(self, backtrace: Backtrace, living: Tensor) -> Tensor:
        """Removes records that lose by more than `margin` on all paths to active tokens; waits for a GPU once.

        However the search continues, a path through such a record loses at least as much against the best path to the
        same token, so the lattice within the output beam does not change.

        Args:
            backtrace: the backpointers of the search, whose blocks are its frames; they are renumbered.
            living: (K,) the backpointers of all active tokens.

        Returns:
            The new numbers of `living`, (K,).
        """
        previous, arc = backtrace.records()
        if not len(arc):
            return living
        none, blocks = arc[:0], backtrace.block_begin
        (utt_idx, frame), (src, dst, losing_arc, score_gap) = self._taken(none)
        begin = to_device(torch.tensor(blocks), arc.device)
        loss = torch.full((len(arc) + 1,), torch.inf, dtype=torch.float32, device=arc.device)
        loss.index_fill_(0, living, 0.0)  # -1 marks the spare last entry
        kernels = gpu_module("asr.decoding.gpu.traceback", arc.device)
        if kernels is not None:
            block = torch.searchsorted(begin, torch.arange(len(arc), device=arc.device), right=True) - 1
            size = (self._num_utts, len(blocks))
            kernels.losses(loss[:-1], block, utt_idx, previous, (src, dst, score_gap), size)
        else:
            self._lower_losses(loss, blocks, (previous, frame, begin), (src, dst, score_gap))
        keeps, keeps_losing = loss[:-1] <= self.margin, loss.index_select(0, dst) + score_gap <= self.margin
        number = torch.cat([keeps.cumsum(0) - keeps.long(), none.new_zeros(1)])
        num_kept, num_losing, *block_begin = torch.cat(
            [keeps.sum(0, keepdim=True), keeps_losing.sum(0, keepdim=True), number.index_select(0, begin)]
        ).tolist()
        number[-1:] = -1
        kept, kept_losing = marked_positions(keeps, num_kept), marked_positions(keeps_losing, num_losing)
        backtrace.replace(number[previous[kept]], arc[kept], block_begin)
        self._backpointers = [(utt_idx[kept], frame[kept])]
        dst = number[dst[kept_losing]]
        self._losing_arcs = [(number[src[kept_losing]], dst, losing_arc[kept_losing], score_gap[kept_losing])]
        if self._lm_scores:
            of_backpointers, of_losing = _joined(self._lm_scores, (none.double(), none.double()))
            self._lm_scores = [(of_backpointers[kept], of_losing[kept_losing])]
        return number[living]

    @staticmethod
    def _lower_losses(
        loss: Tensor, blocks: list[int], backpointers: Sequence[Tensor], losing: Sequence[Tensor]
    ) -> None:
        """As `asr.decoding.gpu.traceback.losses`, block by block; loss (R + 1,) has a spare last entry."""
        previous, frame, begin = backpointers
        src, dst, score_gap = losing
        num_records = len(previous)
        # Losing arcs are in the order of the blocks that they lead to.
        losing_begin = torch.searchsorted(frame.index_select(0, dst), frame.index_select(0, begin)).tolist()
        before_losing, before = (torch.where(one < 0, num_records, one) for one in (src, previous))
        ends = zip(blocks, [*blocks[1:], num_records], strict=True)
        losing_ends = zip(losing_begin, [*losing_begin[1:], len(dst)], strict=True)
        for (first, end), (first_losing, end_losing) in reversed(list(zip(ends, losing_ends, strict=True))):
            own = slice(first_losing, end_losing)
            lost = loss.index_select(0, dst[own]) + score_gap[own]
            loss.scatter_reduce_(0, before_losing[own], lost, "amin")
            loss.scatter_reduce_(0, before[first:end], loss[first:end].clone(), "amin")

    def collected(self, backtrace: Backtrace, endings: Sequence[Ending]) -> LatticeParts:
        """Builds the lattice; it contains at least all arcs within the output beam.

        Args:
            backtrace: the backpointers of the search.
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
        no_end = torch.full((num_utts + len(state),), -torch.inf, dtype=torch.float32, device=arc.device)
        ends = (final_state >= 0).nonzero().squeeze(1)
        final_graph_score = torch.cat([ending.final_graph_score for ending in endings])[ends]
        final_lm_score = torch.cat([ending.final_lm_score for ending in endings])[ends]
        lm_score = torch.zeros(len(src_state), dtype=torch.float32, device=arc.device)
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
    """The loss of ending at each backpointer against the utterance's best path, (R,) float32; inf if not final."""
    loss = torch.full((num_records,), torch.inf, dtype=torch.float32)
    lost = [ending.final_total.max() - ending.final_total for ending in endings if len(ending.final)]
    if lost:
        has_arcs = backpointer >= 0
        loss[backpointer[has_arcs]] = torch.cat(lost)[has_arcs].float()
    return loss
