"""Remembers, during a search of whole utterances, all arcs that may belong to the lattice.

Shapes: N utterances, K tokens, S lattice states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asr.decoding.lattice.build import LatticeParts
from asr.decoding.search.tokens import Tokens


class LatticeRecords:
    """A lattice state is a back-pointer record; all utterances begin together, so the n-th call is frame n.

    Args:
        num_utts: N.
        beam: an arc that loses more than this against the best into the same state cannot be in the lattice.
    """

    def __init__(self, num_utts: int, beam: float) -> None:
        self._num_utts = num_utts
        self._beam = beam
        self._arcs: list[tuple[Tensor, ...]] = []
        self._states: list[Tensor] = []

    def add(
        self, tokens: Tokens, graph_arc: Tensor, lm_score: Tensor, winner: Tensor, kept: Tensor, record: Tensor
    ) -> None:
        """Takes one frame.

        Args:
            tokens: before recombination, each with its previous record.
            graph_arc: (K,) the arc that each took.
            lm_score: (K,) what the language model gave to the arc's words.
            winner: (K,) the token that each lost to, itself where it won.
            kept: (K',) winners that survived.
            record: (K',) their records.
        """
        record_of = torch.full_like(winner, -1)
        record_of[kept] = record
        dst_record = record_of[winner]
        stays = (dst_record >= 0) & (tokens.score >= tokens.score[winner] - self._beam)
        arc = stays.nonzero().squeeze(1)
        previous = tokens.record[arc]
        # State numbers: the starts first, then the records.
        src_state = torch.where(previous < 0, tokens.stream[arc], previous + self._num_utts)
        self._arcs.append((src_state, dst_record[arc] + self._num_utts, graph_arc[arc], lm_score[arc]))
        self._states.append(tokens.stream[kept])

    def collected(self, final: Tokens, final_graph_score: Tensor, final_lm_score: Tensor) -> LatticeParts:
        """Everything that was remembered.

        Args:
            final: tokens at which an utterance may end.
            final_graph_score, final_lm_score: (K,) of these tokens.
        """
        device = final.state.device
        starts = torch.arange(self._num_utts, device=device)
        num_states = torch.tensor([self._num_utts, *map(len, self._states)], device=device)
        utt_idx = torch.cat([starts, *self._states])
        state = torch.where(final.record < 0, final.stream, final.record + self._num_utts)
        no_end = torch.full((len(utt_idx),), -torch.inf, device=device)
        empty = starts[:0]
        src_state, dst_state, arc, lm_score = zip(*self._arcs or [(empty, empty, empty, empty.double())], strict=True)
        return LatticeParts(
            frame=torch.repeat_interleave(num_states),
            utt_idx=utt_idx,
            start_state=starts,
            src_state=torch.cat(src_state),
            dst_state=torch.cat(dst_state),
            arc=torch.cat(arc),
            lm_score=torch.cat(lm_score).float(),
            final_graph_score=no_end.index_copy(0, state, final_graph_score),
            final_lm_score=torch.zeros_like(no_end).index_copy(0, state, final_lm_score),
        )
