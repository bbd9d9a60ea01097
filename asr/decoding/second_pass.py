"""The second pass: rescores a first pass's lattices or n-best lists with another language model.

Its input and output are `DecodeResult`s, so later stages need not distinguish between passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from asr.decoding.interface import DecodeResult, DecodingOptions
from asr.decoding.lattice import join
from asr.decoding.nbest import n_best, rescore_n_best
from asr.decoding.rescoring import rescore_lattice
from asr.decoding.settings import LanguageModelOptions
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.combine import ADD, CombinedLM, Step, WordMapper
from asr.lm.interface import LanguageModel


class SecondPass:
    """Rescores the results of a decoder that keeps lattices.

    The result of an utterance without a lattice, of which no complete path survived, is not changed.

    Args:
        graph: the graph of the first pass.
        options: scales, and the beams of lattice rescoring.
        models: kind and weight of the second pass.
        keeps_lattice: whether the results' lattices are needed afterwards.
        device: the device of the language models, on which lattices are searched.
    """

    def __init__(
        self,
        graph: DecodingGraph,
        options: DecodingOptions,
        models: LanguageModelOptions,
        keeps_lattice: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self._graph = graph.to("cpu")
        self._mapper = WordMapper(graph.vocabulary)
        self._options = options
        self._models = models
        self._keeps_lattice = keeps_lattice
        self._device = device

    def rescored(
        self, results: Sequence[DecodeResult], first: LanguageModel | None, second: LanguageModel | None
    ) -> list[DecodeResult]:
        """Rescores results.

        Args:
            results: the results of the first pass.
            first: the first pass's language model; None if it used only the graph's own.
            second: the second pass's language model; None for the graph's own, whose scores are 0 here.

        Returns:
            The results with their new best hypotheses.
        """
        second = None if second is None else self._mapper.mapped(second)
        if self._models.second_pass == "nbest":
            return self._over_lists(results, second)
        first = None if first is None else self._mapper.mapped(first)
        return self._over_lattices(results, self._mixed(first, second))

    def _over_lists(self, results: Sequence[DecodeResult], second: LanguageModel | None) -> list[DecodeResult]:
        lists = [
            ()
            if result.lattice is None
            else n_best(
                *(result.lattice, self._graph, self._options, self._models.second_pass_sentences),
                result.original_frame,
            )
            for result in results
        ]
        rescored = rescore_n_best(lists, second, self._options, self._models.second_pass_weight)
        return [
            replace(result, hypotheses=hypotheses) if hypotheses else result
            for result, hypotheses in zip(results, rescored, strict=True)
        ]

    def _over_lattices(self, results: Sequence[DecodeResult], lm: LanguageModel | None) -> list[DecodeResult]:
        done = list(results)
        known = [(position, one.lattice) for position, one in enumerate(results) if one.lattice is not None]
        if not known or lm is None:
            return done
        joint = join([lattice for _, lattice in known]).to(self._device)
        paths = rescore_lattice(joint, self._options, lm, self._keeps_lattice)
        for (position, _), path in zip(known, paths, strict=True):
            if path is not None:
                hypothesis = path.hypothesis(self._graph, self._options, results[position].original_frame)
                done[position] = replace(results[position], hypotheses=(hypothesis,), lattice=path.lattice)
        return done

    def _mixed(self, first: LanguageModel | None, second: LanguageModel | None) -> LanguageModel | None:
        weight = self._models.second_pass_weight
        if weight == 1.0 and second is not None:
            return second
        parts = [lm for lm in (first, second) if lm is not None]
        weights = [share for lm, share in ((first, 1.0 - weight), (second, weight)) if lm is not None]
        if not parts:
            return None
        step = Step(ADD, 0, len(parts) - 1, weights[0], weights[1] if len(parts) == 2 else 0.0)
        return CombinedLM(parts, [step])
