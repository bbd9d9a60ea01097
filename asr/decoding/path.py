"""From the arcs of one path to the hypothesis that users read."""

from __future__ import annotations

import torch
from torch import Tensor

from asr.decoding.first_pass import Hypothesis
from asr.decoding.options import DecodingOptions
from asr.graph.artefact import DecodingGraph


def hypothesis_of_path(
    graph: DecodingGraph,
    options: DecodingOptions,
    arc: Tensor,
    total: float,
    final_score: float,
    lm_score: float,
    frame_of: Tensor | None = None,
) -> Hypothesis:
    """Spells a path through the graph.

    Args:
        graph: the graph.
        options: the scales that `total` was made with.
        arc: (L,) int64 graph arcs.
        total: the path's scaled score.
        final_score: graph score of ending there, 0 for an unfinished path.
        lm_score: the language model's share, unscaled.
        frame_of: (T,) original frame of each decoded one, where frames were skipped.
    """
    reads = graph.token_id.index_select(0, arc) >= 0
    graph_score = float(graph.score.index_select(0, arc).sum(dtype=torch.float64)) + final_score
    num_words = graph.word_begin.index_select(0, arc + 1) - graph.word_begin.index_select(0, arc)
    owner = torch.repeat_interleave(num_words)
    ahead = num_words.cumsum(0) - num_words
    position = graph.word_begin.index_select(0, arc.index_select(0, owner)) - ahead.index_select(0, owner)
    word_ids = graph.word_id.index_select(0, position + torch.arange(len(owner), device=arc.device)).tolist()
    start_frames, end_frames = _word_frames(graph.token_id.index_select(0, arc), reads, owner, frame_of)
    rest = options.graph_scale * graph_score + options.lm_scale * lm_score
    am_score = (total - rest - options.word_insertion_penalty * len(word_ids)) / options.am_scale
    return Hypothesis(
        word_ids=tuple(word_ids),
        words=tuple(graph.vocabulary.words[word_id] for word_id in word_ids),
        am_score=am_score,
        graph_score=graph_score,
        lm_score=lm_score,
        total=total,
        start_frames=start_frames,
        end_frames=end_frames,
    )


def _word_frames(
    token_id: Tensor, reads: Tensor, owner: Tensor, frame_of: Tensor | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A word begins where the graph writes it and ends after the last non-blank frame before the next one."""
    frame = (reads.cumsum(0) - reads.to(torch.int64)).tolist()
    original = frame_of.tolist() if frame_of is not None else None
    token = token_id.tolist()
    arcs = owner.tolist()
    start_frames, end_frames = [], []
    for word_position, arc_position in enumerate(arcs):
        bound = arcs[word_position + 1] if word_position + 1 < len(arcs) else len(token)
        last = next((i for i in range(bound - 1, arc_position, -1) if token[i] > 0), arc_position)
        start, end = frame[arc_position], frame[last]
        if original is not None and original:
            start, end = original[min(start, len(original) - 1)], original[min(end, len(original) - 1)]
        start_frames.append(start)
        end_frames.append(end + 1)
    return tuple(start_frames), tuple(end_frames)
