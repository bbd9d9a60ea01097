"""Rescoring: a language model applied to what a search has found.

`rescore_lattice` applies it frame by frame to a lattice, as a search without acoustic scores. A lattice state stands
for all word histories that lead to it. Rescoring splits it by history: a token is a (lattice state, context index), and
the words of a frame are scored in one call for all utterances. Without pruning, the result is exactly that of scoring
every path of the lattice separately.

`second_pass` applies another language model to the results of a decoder, over their lattices or n-best lists.

Shapes: N utterances, L arcs of a path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asr.decoding.backend import ArcSet, ArcWords
from asr.decoding.backtrace import Backtrace, best_arcs, endings_of, hypothesis_of_path
from asr.decoding.frame import TokenSearch
from asr.decoding.interface import DecodeResult, Hypothesis
from asr.decoding.lattice import Lattice, best_to_end, join, lattice_from_lattice, prune
from asr.decoding.lattice_records import LatticeRecords, collects_on
from asr.decoding.nbest import n_best, rescore_n_best
from asr.decoding.selection import BackendFactory, select_backend
from asr.decoding.settings import DecodingOptions, LanguageModelOptions
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.combine import ADD, CombinedLM, SentencesLM, Step, mapped_to, without_weight
from asr.lm.interface import LanguageModel, device_of


class LatticeGraph:
    """A lattice in the form of a search graph, so that rescoring and searching share their code.

    All scores are on the arcs, and the search reads log-probabilities of 0. Scores are pushed: a partial path has the
    score of its best completion by the lattice's own scores, so the beam prunes only by what the language model adds.
    A path's total is lower than in the lattice by `start_score`, and excludes the lattice's language model scores.

    Args:
        lattice: one or several utterances.
        options: scales and penalty.
    """

    is_pushed = True

    def __init__(self, lattice: Lattice, options: DecodingOptions) -> None:
        # Not subtracted from the totals: of an end that the earlier model ruled out, both would be -inf.
        no_lm = torch.zeros_like(lattice.lm_score), torch.zeros_like(lattice.final_lm_score)
        lattice = replace(lattice, lm_score=no_lm[0], final_lm_score=no_lm[1])
        arc_total, final_total = lattice.arc_total(options), lattice.final_total(options)
        ahead = best_to_end(lattice, arc_total, final_total)
        # -inf minus -inf would be NaN, so states from which no end is reachable are not pushed.
        known = torch.where(ahead > -torch.inf, ahead, torch.zeros_like(ahead))
        pushed = arc_total + ahead[lattice.dst_state] - known[lattice.src_state()]
        self.num_states = lattice.num_states
        self.emitting = ArcSet(
            lattice.arc_begin,
            lattice.dst_state.int(),
            torch.zeros_like(lattice.token_id, dtype=torch.int32),
            pushed.float(),
            None,
            ArcWords(lattice.word_begin, lattice.word_id),
        )
        self.epsilon: ArcSet | None = None
        self.final_graph_score = lattice.final_graph_score
        self.final_score = (final_total - known).float()
        self.start_score = ahead[lattice.start_state]


@dataclass(frozen=True, eq=False)
class LatticePath:
    """The best path of an utterance's lattice.

    Args:
        graph_arc: (L,) int64, its arcs in the decoding graph, on any device.
        total: its scaled score.
        final_graph_score: the graph's final score, unscaled.
        lm_score: the language model score, including `final`, unscaled.
        lattice: the rescored lattice on the host, with states split by history; None if not requested.
    """

    graph_arc: Tensor
    total: float
    final_graph_score: float
    lm_score: float
    lattice: Lattice | None

    def hypothesis(self, graph: DecodingGraph, options: DecodingOptions, frame_of: Tensor | None) -> Hypothesis:
        """The path as a hypothesis; arguments as for `hypothesis_of_path`."""
        scores = (self.total, self.final_graph_score, self.lm_score)
        return hypothesis_of_path(graph, options, self.graph_arc, *scores, frame_of)


def rescore_lattice(
    lattice: Lattice,
    options: DecodingOptions,
    lm: LanguageModel,
    keep_lattice: bool = False,
    *,
    lm_state: Tensor | None = None,
    held: Tensor | None = None,
    make_backend: BackendFactory = select_backend,
) -> list[LatticePath | None]:
    """Finds the best path of each utterance, with the scores of `lm` in place of the lattice's language model scores.

    Args:
        lattice: of any number of utterances, on any device; it is rescored where the language model answers.
        options: scales; the search is pruned by `context_beam`, `skip_beam`, `max_contexts_per_state` and
            `max_active_states`.
        lm: the language model, with the word ids of the lattice.
        keep_lattice: whether to return lattices too, pruned by `output_beam`.
        lm_state: (N, D), what `lm` carries over from earlier sentences, or None.
        held: (H,) int64, see `TokenSearch`.
        make_backend: makes the backend of the search.

    Returns:
        One path for each start state; None if no complete path survived.
    """
    num_utts = lattice.num_utts
    if not num_utts:
        return []
    lm = without_weight(lm, options.lm_scale)
    device = device_of(lm)
    lattice = lattice.to(device)
    graph = LatticeGraph(lattice, options)
    bounds = rescoring_options(options)
    backtrace = Backtrace(device, collects=collects_on(device, keep_lattice))
    records = LatticeRecords(num_utts, bounds) if keep_lattice else None
    backend = make_backend(graph, bounds, lm, keep_lattice)
    search = TokenSearch(graph, bounds, lm, backend, backtrace, records, held=held)
    stream = search.start(lattice.start_state, lm_state)
    # The acoustic scores are on the arcs of the lattice.
    search.advance(
        stream,
        torch.zeros(num_utts, lattice.num_frames, 1, dtype=torch.float32, device=device),
        lattice.frames_of_utts(),
    )
    endings = endings_of(graph, bounds, lm, *search.all_active())
    rescored: list[Lattice | None] = [None] * num_utts
    if records is not None:
        parts = records.collected(backtrace, endings)
        pruned = prune(lattice_from_lattice(parts, lattice), options, options.output_beam)
        rescored = list(pruned.split())
    graph_arc, start_score = lattice.graph_arc.cpu(), graph.start_score.tolist()
    return [
        LatticePath(graph_arc[arc], before + ending.total, ending.graph_score, ending.lm_score, own)
        if ending.reached_final
        else None
        for ending, arc, before, own in zip(endings, best_arcs(endings, backtrace), start_score, rescored, strict=True)
    ]


@functools.lru_cache(maxsize=32)  # options are checked when they are made, which takes time
def rescoring_options(options: DecodingOptions) -> DecodingOptions:
    """The options of a search over a lattice: `context_beam` takes the place of the search beam."""
    return replace(
        options,
        search_beam=math.inf if options.context_beam is None else options.context_beam,
        min_active_states=0,
    )


def second_pass(
    results: Sequence[DecodeResult],
    first: LanguageModel | None,
    second: LanguageModel | None,
    graph: DecodingGraph,
    options: DecodingOptions,
    models: LanguageModelOptions,
    keeps_lattice: bool,
) -> list[DecodeResult]:
    """Rescores the results of a decoder that keeps lattices.

    The result of an utterance without a lattice, of which no complete path survived, is not changed.

    Args:
        results: the results of the first pass.
        first: the first pass's language model; None if it used only the graph's own.
        second: the second pass's language model; None for the graph's own, whose scores are 0 here.
        graph: the graph of the first pass.
        options: scales, and the beams of lattice rescoring.
        models: kind and weight of the second pass.
        keeps_lattice: whether the results' lattices are needed afterwards.

    Returns:
        The results with their new best hypotheses.
    """
    graph = graph.to("cpu")
    first, second = (None if lm is None else mapped_to(lm, graph.vocabulary) for lm in (first, second))
    lattices = [result.lattice for result in results]
    if models.second_pass == "nbest":
        num = models.second_pass_sentences
        lists = [
            () if lattice is None else n_best(lattice, graph, options, num, result.original_frame)
            for result, lattice in zip(results, lattices, strict=True)
        ]
        rescored = rescore_n_best(lists, second, options, models.second_pass_weight)
        return [
            replace(result, hypotheses=hypotheses) if hypotheses else result
            for result, hypotheses in zip(results, rescored, strict=True)
        ]
    done, lm = list(results), _mixed(first, second, models.second_pass_weight)
    known = [position for position, lattice in enumerate(lattices) if lattice is not None]
    if not known or lm is None:
        return done
    joint = join([lattice for lattice in lattices if lattice is not None])
    for position, path in zip(known, rescore_lattice(joint, options, lm, keeps_lattice), strict=True):
        if path is not None:
            hypothesis = path.hypothesis(graph, options, results[position].original_frame)
            done[position] = replace(results[position], hypotheses=(hypothesis,), lattice=path.lattice)
    return done


def _mixed(first: LanguageModel | None, second: LanguageModel | None, weight: float) -> LanguageModel | None:
    """The weighted sum of both models' scores; None if it is 0."""
    if weight == 1.0 and second is not None:
        return second
    parts = [lm for lm in (first, second) if lm is not None]
    weights = [share for lm, share in ((first, 1.0 - weight), (second, weight)) if lm is not None]
    if not parts:
        return None
    step = Step(ADD, 0, len(parts) - 1, weights[0], weights[1] if len(parts) == 2 else 0.0)
    own = [lm.inner if isinstance(lm, SentencesLM) else lm for lm in parts]
    mixed = CombinedLM(own, [step])
    return mixed if own == parts else SentencesLM(mixed)  # outside, where compiled loops look it up
