"""A lattice prepared for the search, so that rescoring a lattice and searching a graph are the same code.

Shapes: S lattice states, A lattice arcs.
"""

from __future__ import annotations

import torch

from asr.decoding.interface import DecodingOptions
from asr.decoding.lattice import Lattice, best_to_end
from asr.decoding.search_graph import ArcSet, ArcWords


class LatticeGraph:
    """All scores are on the arcs; the log-probabilities that the search reads are zeros.

    Scores are pushed: a partial path's score is that of its best completion by the lattice's own scores. So a beam
    prunes only by what the language model adds. Totals of paths are the same but for `start_score`.

    Args:
        lattice: one or several utterances.
        options: scales and penalty.
        keep_lm_scores: whether language model scores in the lattice count.
    """

    is_pushed = True

    def __init__(self, lattice: Lattice, options: DecodingOptions, keep_lm_scores: bool = False) -> None:
        arc_total, final_total = lattice.arc_total(options), lattice.final_total(options)
        if not keep_lm_scores:
            arc_total = arc_total - options.lm_scale * lattice.lm_score.double()
            final_total = final_total - options.lm_scale * lattice.final_lm_score.double()
        ahead = best_to_end(lattice, arc_total, final_total)
        # -inf minus -inf would be NaN: a state that leads nowhere is left as it is.
        known = torch.where(ahead > -torch.inf, ahead, torch.zeros_like(ahead))
        pushed = arc_total + ahead[lattice.dst_state] - known[lattice.src_state()]
        self.num_states = lattice.num_states
        self.emitting = ArcSet(
            lattice.arc_begin,
            lattice.dst_state,
            torch.zeros_like(lattice.token_id),
            pushed.float(),
            None,
            ArcWords(lattice.word_begin, lattice.word_id),
        )
        self.epsilon: ArcSet | None = None
        self.final_graph_score = lattice.final_graph_score
        self.final_score = (final_total - known).float()
        self.start_score = ahead[lattice.start_state]
