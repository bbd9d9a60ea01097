"""A lattice made ready for the token search, so that rescoring it and searching a graph are one piece of code.

Shapes: S lattice states, A lattice arcs.
"""

from __future__ import annotations

import torch

from asr.decoding.interface import DecodingOptions
from asr.decoding.lattice import Lattice, best_to_end
from asr.decoding.search_graph import ArcSet, ArcWords


class LatticeGraph:
    """Every score stands on the arcs; the search reads frames of zeros.

    Scores are pushed: to an arc is added what the best way to the end gains or loses by it. So a partial path's score
    is that of its best completion by the lattice's own scores, and a beam prunes by nothing but the language model's
    doing. Paths' totals are the same but for `start_score`.

    Args:
        lattice: one or several utterances.
        options: scales and penalty.
        keep_lm_scores: whether language model scores that the lattice has count.
    """

    is_pushed = True

    def __init__(self, lattice: Lattice, options: DecodingOptions, keep_lm_scores: bool = False) -> None:
        arc_total, final_total = lattice.arc_total(options), lattice.final_total(options)
        if not keep_lm_scores:
            arc_total = arc_total - options.lm_scale * lattice.lm_score.double()
            final_total = final_total - options.lm_scale * lattice.final_lm_score.double()
        ahead = best_to_end(lattice, arc_total, final_total)
        # A state that leads nowhere is left as it is; minus infinity must not meet itself.
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
