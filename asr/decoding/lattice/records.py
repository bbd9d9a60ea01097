"""Remembers, during a search of whole utterances, all arcs that may belong to the lattice.

Shapes: N utterances, K partial paths, A candidates, R records, L losers, S lattice states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr.decoding.ending import Ending
from asr.decoding.lattice.build import LatticeParts
from asr.decoding.lattice.kernel import add_losses, kept_within
from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.tokens import Candidates, Tokens
from asr.lm.compiled_loop import compiled_loop

# More than the rounding of all the scores of an utterance can be.
_SLACK = 0.1


class LatticeRecords:
    """A lattice state is a back-pointer record or the start of an utterance; all utterances begin together.

    The back-pointers say by which arc a state was reached best. Here are the losers: arcs that led there, too, inside
    the search beam. One that loses by more than `reach` cannot be in the lattice.

    Args:
        num_utts: N.
        options: the beams that are searched with.
        compiled: whether numba's loops, where it is installed and on a CPU, drop what the output beam is going to drop.
    """

    def __init__(self, num_utts: int, options: DecodingOptions, compiled: bool = True) -> None:
        self._num_utts = num_utts
        self._search_beam = options.search_beam
        self.reach = options.output_beam + _SLACK
        self._add_losses = compiled_loop(add_losses, reorders_sums=False) if compiled else None
        self._kept_within = compiled_loop(kept_within, reorders_sums=False) if compiled else None
        self._num_frames = 0
        self._records: list[tuple[Tensor, ...]] = []
        self._losers: list[tuple[Tensor, ...]] = []
        # Of the records and of the losers, where a language model takes part.
        self._lm_scores: list[tuple[Tensor, ...]] = []

    def add(
        self, tokens: Tokens, candidates: Candidates, graph_arc: Tensor, winner: Tensor, kept: Tensor, record: Tensor
    ) -> None:
        """Takes one frame.

        Args:
            tokens: before the frame.
            candidates: what they became over arcs.
            graph_arc: (A,) these arcs in the graph.
            winner: (A,) the candidate that each lost to, itself where it won.
            kept: (K,) winners that survived.
            record: (K,) their records.
        """
        score, stream = candidates.score, candidates.stream
        record_of = torch.full_like(winner, -1)
        record_of[kept] = record
        lost_by = score[winner] - score
        # As everywhere in the search, what falls behind its beam is gone, unless so few survive that worse ones do.
        lowest = torch.full((self._num_utts,), -self._search_beam, device=score.device)
        lowest.scatter_reduce_(0, stream[kept], score[kept], "amin", include_self=True)
        stays = (record_of[winner] >= 0) & (lost_by <= self.reach) & (score >= lowest[stream])
        stays &= winner != torch.arange(len(winner), device=winner.device)
        loser = stays.nonzero().squeeze(1)
        source = candidates.source
        if candidates.lm_score is not None:
            lm_score = candidates.lm_score - tokens.lm_score[source]
            self._lm_scores.append((lm_score[kept], lm_score[loser]))
        self._num_frames += 1
        self._records.append((stream[kept], torch.full_like(record, self._num_frames)))
        self._losers.append((tokens.record[source[loser]], record_of[winner[loser]], graph_arc[loser], lost_by[loser]))

    def add_frames(self, utt_idx: Tensor, frame: Tensor, losers: Sequence[Tensor]) -> None:
        """Takes several frames that were read without a language model.

        Args:
            utt_idx, frame: (R,) of each new record, in order, its utterance and the frames read before it.
            losers: (L,) each, those of a frame side by side: the record that each comes from, the one that it lost,
                its arc in the graph, and by how much it lost.
        """
        self._records.append((utt_idx, frame))
        self._losers.append(tuple(losers))

    def collected(self, backtrace: Backtrace, endings: Sequence[Ending]) -> LatticeParts:
        """Everything that was remembered, or at least what lies within the output beam.

        Args:
            backtrace: of the search.
            endings: of all utterances.
        """
        num_utts = self._num_utts
        final = Tokens.join([ending.final for ending in endings])
        previous, arc = backtrace.records()
        none = arc[:0]
        utt_idx, frame = _joined(self._records, (none, none))
        src, dst, lost_arc, lost_by = _joined(self._losers, (none, none, none, none.float()))
        if self._add_losses is not None and self._kept_within is not None and arc.device.type == "cpu":
            arrays = [part.numpy() for part in (previous, utt_idx, frame, src, dst, lost_by)]
            loss = _final_losses(final.record, endings, len(arc)).numpy()
            self._add_losses(arrays[0], *arrays[2:], loss)
            kept = self._kept_within(self.reach, *arrays, loss, num_utts)
            record, loser, state, number, src_state, dst_state = map(torch.from_numpy, kept)
        else:
            record, loser = (torch.arange(len(part), device=part.device) for part in (arc, dst))
            state = torch.sort(frame, stable=True).indices
            number = torch.full((len(arc) + 1,), -1, device=arc.device)
            number[state] = num_utts + record
            src, dst = torch.cat([previous, src]), torch.cat([record, dst])
            src_state = torch.where(src < 0, utt_idx[dst], number[src])
            dst_state = number[dst]
        starts = torch.arange(num_utts, device=arc.device)
        final_state = torch.where(final.record < 0, final.stream, number[final.record])
        no_end = torch.full((num_utts + len(state),), -torch.inf, device=arc.device)
        ends = (final_state >= 0).nonzero().squeeze(1)
        final_graph_score = torch.cat([ending.final_graph_score for ending in endings])[ends]
        final_lm_score = torch.cat([ending.final_lm_score for ending in endings])[ends]
        lm_score = torch.zeros(len(src_state), device=arc.device)
        if self._lm_scores:
            of_records, of_losers = _joined(self._lm_scores, (none.double(), none.double()))
            lm_score = torch.cat([of_records[record], of_losers[loser]]).float()
        return LatticeParts(
            frame=torch.cat([torch.zeros_like(starts), frame[state]]),
            utt_idx=torch.cat([starts, utt_idx[state]]),
            start_state=starts,
            src_state=src_state,
            dst_state=dst_state,
            arc=torch.cat([arc[record], lost_arc[loser]]),
            lm_score=lm_score,
            final_graph_score=no_end.index_copy(0, final_state[ends], final_graph_score),
            final_lm_score=torch.zeros_like(no_end).index_copy(0, final_state[ends], final_lm_score),
        )


def _joined(parts: list[tuple[Tensor, ...]], none: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(torch.cat, zip(none, *parts, strict=True)))


def _final_losses(record: Tensor, endings: Sequence[Ending], num_records: int) -> Tensor:
    """How much each path at which an utterance may end is worse than its best, (R,) float32; infinite for others."""
    loss = torch.full((num_records,), torch.inf)
    lost = [ending.final_total.max() - ending.final_total for ending in endings if len(ending.final)]
    if lost:
        has_arcs = record >= 0
        loss[record[has_arcs]] = torch.cat(lost)[has_arcs].float()
    return loss
