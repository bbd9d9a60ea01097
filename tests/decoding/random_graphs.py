"""Small random graphs and frames for the tests of this folder."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from asr.decoding.settings import DecodingOptions
from asr.graph.decoding_graph import DecodingGraph
from asr.text.symbols import SPECIAL_WORDS, TokenTable, Vocabulary

UNPRUNED = DecodingOptions(
    search_beam=math.inf,
    context_beam=None,
    max_active_states=10**6,
    am_scale=0.7,
    graph_scale=1.3,
    lm_scale=0.6,
    word_insertion_penalty=-0.4,
)
"""Nothing is pruned but by the output beam, and no scale is one that a mistake could leave out."""


def random_graph(
    seed: int,
    num_states: int = 6,
    num_arcs: int = 24,
    num_tokens: int = 4,
    num_words: int = 5,
    max_words: int = 2,
    epsilons: bool = False,
    final_prob: float = 0.5,
) -> DecodingGraph:
    """Any states, arcs and words; arcs that read nothing lead to higher states only, so that none go round."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    src = torch.cat([torch.arange(num_states), integers(0, num_states, num_arcs - num_states)]).sort().values
    dst = integers(0, num_states, num_arcs)
    token = integers(0, num_tokens, num_arcs)
    if epsilons:
        reads_nothing = (torch.rand(num_arcs, generator=generator) < 0.3) & (dst > src)
        token[reads_nothing] = -1
    words_on_arc = integers(0, max_words + 1, num_arcs) * integers(0, 2, num_arcs)
    final_score = -torch.rand(num_states, generator=generator)
    final_score[torch.rand(num_states, generator=generator) > final_prob] = -torch.inf
    final_score[num_states - 1] = -0.5
    words = [f"w{i}" for i in range(num_words)]
    return DecodingGraph(
        arc_begin=torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(src, minlength=num_states).cumsum(0)]),
        dst_state=dst.int(),
        token_id=token.int(),
        score=-2 * torch.rand(num_arcs, generator=generator),
        word_begin=torch.cat([torch.zeros(1, dtype=torch.int64), words_on_arc.cumsum(0)]),
        word_id=(integers(0, num_words, int(words_on_arc.sum())) + len(SPECIAL_WORDS)).int(),
        final_score=final_score,
        tokens=TokenTable(["<blk>", *(f"t{i}" for i in range(1, num_tokens))]),
        vocabulary=Vocabulary(words),
        meta={},
    )


def random_log_prob(seed: int, num_utts: int, num_frames: int, num_tokens: int = 4, sharpness: float = 2.0) -> Tensor:
    """(N, T, C) log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(num_utts, num_frames, num_tokens, generator=generator)).log_softmax(2)


def sorted_by_score(graph: DecodingGraph) -> DecodingGraph:
    """The same graph with the arcs of each state sorted by score, the best first."""
    order = torch.from_numpy(np.lexsort((-graph.score.numpy(), graph.src_state().numpy())))
    counts = graph.word_begin.diff()[order]
    words = [graph.word_id[graph.word_begin[arc] : graph.word_begin[arc + 1]] for arc in order.tolist()]
    return replace(
        graph,
        dst_state=graph.dst_state[order],
        token_id=graph.token_id[order],
        score=graph.score[order],
        word_begin=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        word_id=torch.cat(words),
    )
