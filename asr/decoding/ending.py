"""How a stream of the token search ends.

Shapes: K partial paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asr.decoding.first_pass import Hypothesis
from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.path import hypothesis_of_path
from asr.decoding.search.search_graph import Searchable
from asr.decoding.search.tokens import Tokens
from asr.graph.artefact import DecodingGraph
from asr.lm.contract import LanguageModel


@dataclass(frozen=True)
class Ending:
    """The best path of a stream, and all at which it may end.

    Args:
        record: back-pointer of the best path, or None where nothing is alive; -1 is the path without arcs.
        total: its scaled score.
        graph_score: graph score of ending there, 0 for an unfinished path.
        lm_score: the language model's share, unscaled.
        reached_final: whether the path is complete.
        final: partial paths at which the stream may end.
        final_graph_score, final_lm_score: (K,) their final scores.
        final_total: (K,) the scaled scores of the complete paths, `total` among them, relative to `offset`.
    """

    record: int | None
    total: float
    graph_score: float
    lm_score: float
    reached_final: bool
    final: Tokens
    final_graph_score: Tensor
    final_lm_score: Tensor
    final_total: Tensor

    def hypothesis(
        self, graph: DecodingGraph, options: DecodingOptions, arc: Tensor, frame_of: Tensor | None
    ) -> Hypothesis | None:
        """The best path, of these arcs (L,), spelled, or None where nothing is alive."""
        if self.record is None:
            return None
        return hypothesis_of_path(graph, options, arc, self.total, self.graph_score, self.lm_score, frame_of)


def ending_of(
    graph: Searchable,
    options: DecodingOptions,
    lm: LanguageModel | None,
    tokens: Tokens,
    offset: float,
    unfinished: bool = False,
) -> Ending:
    """Ends a stream here: the best complete path, or the best unfinished one where none is complete.

    Args:
        graph: what was searched.
        options: scales.
        lm: asked for the end of the sentence, or None.
        tokens: what is alive in the stream.
        offset: to be added to the tokens' relative scores.
        unfinished: take the best unfinished path in any case: the stream goes on.
    """
    final, graph_score = _final(graph, tokens)
    lm_score = torch.zeros_like(graph_score)
    if lm is not None and len(final) and not unfinished:
        lm_score = lm.final(final.context_idx)
    return _ending(graph, options, tokens, offset, final, graph_score, lm_score, unfinished)


def endings_of(
    graph: Searchable, options: DecodingOptions, lm: LanguageModel | None, alive: Sequence[tuple[Tokens, float]]
) -> list[Ending]:
    """Ends several streams, the language model asked once for all of them; tokens and offset of each stream."""
    finals = [_final(graph, tokens) for tokens, _ in alive]
    lm_scores = [torch.zeros_like(graph_score) for _, graph_score in finals]
    if lm is not None and any(map(len, lm_scores)):
        context_idx = torch.cat([final.context_idx for final, _ in finals])
        lm_scores = list(lm.final(context_idx).split([len(final) for final, _ in finals]))
    return [
        _ending(graph, options, tokens, offset, final, graph_score, lm_score, False)
        for (tokens, offset), (final, graph_score), lm_score in zip(alive, finals, lm_scores, strict=True)
    ]


def best_arcs(endings: Sequence[Ending], backtrace: Backtrace) -> list[Tensor]:
    """The arcs (L,) of each stream's best path, on the host; none where nothing is alive."""
    record = [-1 if ending.record is None else ending.record for ending in endings]
    device = backtrace.records()[0].device
    return backtrace.paths(torch.tensor(record, dtype=torch.int64, device=device))


def _final(graph: Searchable, tokens: Tokens) -> tuple[Tokens, Tensor]:
    """The partial paths at which a stream may end, and the graph's score of that."""
    final = tokens.select((graph.final_graph_score.index_select(0, tokens.state) > -torch.inf).nonzero().squeeze(1))
    return final, graph.final_graph_score.index_select(0, final.state)


def _ending(
    graph: Searchable,
    options: DecodingOptions,
    tokens: Tokens,
    offset: float,
    final: Tokens,
    graph_score: Tensor,
    lm_score: Tensor,
    unfinished: bool,
) -> Ending:
    total = final.score + graph.final_score.index_select(0, final.state) + options.lm_scale * lm_score
    ends = (final, graph_score, lm_score, total)
    if not len(tokens):
        return Ending(None, -torch.inf, 0.0, 0.0, False, *ends)
    if len(final) and not unfinished:
        best = int(total.argmax())
        best_total, own_lm_score = offset + float(total[best]), float(final.lm_score[best]) + float(lm_score[best])
        return Ending(int(final.record[best]), best_total, float(graph_score[best]), own_lm_score, True, *ends)
    best = int(tokens.score.argmax())
    best_total, own_lm_score = offset + float(tokens.score[best]), float(tokens.lm_score[best])
    return Ending(int(tokens.record[best]), best_total, 0.0, own_lm_score, False, *ends)
