"""What a search of whole utterances has found; paths are spelled where they are asked for.

Shapes: N utterances, T frames, L arcs of a path.


The first pass that needs nothing but torch: the language model sits inside the search.

Shapes: N utterances, T frames, C tokens.


A first pass without the language model, whose lattice is then rescored frame by frame: what k2's pass does, for any.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asr.decoding.backend import ChunkBackend
from asr.decoding.backtrace import Backtrace, Ending, best_arcs, endings_of
from asr.decoding.interface import DecodeResult, DecodingOptions, Hypothesis
from asr.decoding.lattice import Lattice, LatticeRecords, pruned_lattice
from asr.decoding.log_probs import check_log_prob, skip_blanks
from asr.decoding.rescoring import rescore_joint
from asr.decoding.search_graph import SearchGraph
from asr.decoding.selection import chosen_form
from asr.decoding.token_search import TokenSearch
from asr.decoding.word_map import WordMapper
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.interface import LanguageModel


@dataclass(frozen=True)
class FoundPaths:
    """The best path of each utterance, and the lattice of all.

    Args:
        graph: what was searched, on the host.
        options: scales.
        endings: of each utterance.
        backtrace: of the search.
        num_frames: (N,) int64 decoded frames, on the host.
        original_frame: (N, T) int64, where frames were left out what each decoded one was before; on the host.
        joint: the lattice of all utterances in one, where it is kept and there are any.
    """

    graph: DecodingGraph
    options: DecodingOptions
    endings: list[Ending]
    backtrace: Backtrace
    num_frames: Tensor
    original_frame: Tensor | None
    joint: Lattice | None

    def results(self) -> list[DecodeResult]:
        """One an utterance, without its part of the lattice."""
        return [self.result(utt_idx) for utt_idx in range(len(self.endings))]

    def result(self, utt_idx: int) -> DecodeResult:
        """That of one utterance, without its part of the lattice."""
        ending = self.endings[utt_idx]
        arc, frame_of = self._arcs[utt_idx], self.frame_of(utt_idx)
        return self.result_of(utt_idx, ending.hypothesis(self.graph, self.options, arc, frame_of), ending.reached_final)

    def result_of(
        self, utt_idx: int, hypothesis: Hypothesis | None, reached_final: bool, lattice: Lattice | None = None
    ) -> DecodeResult:
        """The result for an utterance with this hypothesis, or none."""
        return DecodeResult(
            hypotheses=() if hypothesis is None else (hypothesis,),
            reached_final=reached_final,
            num_frames=int(self.num_frames[utt_idx]),
            lattice=lattice,
            original_frame=self.frame_of(utt_idx),
        )

    def frame_of(self, utt_idx: int) -> Tensor | None:
        """Where frames were left out, what each decoded one of an utterance was before, (num_frames,) int64."""
        if self.original_frame is None:
            return None
        return self.original_frame[utt_idx, : int(self.num_frames[utt_idx])]

    @functools.cached_property
    def _arcs(self) -> list[Tensor]:
        """The best paths' arcs (L,), on the host."""
        return best_arcs(self.endings, self.backtrace)


class TokenPassingDecoder:
    """Token passing over whole utterances.

    Args:
        graph: decoding graph, on the device where the search shall run; arcs that read nothing are followed.
        options: beams and scales.
        keep_lattice: whether results carry a lattice; needs a graph without arcs that read nothing.
        form: how frames are computed, with the same results. `tensor`: torch operations, on any device, the oracle of
            the others; `loops`: numba's, on a CPU; `kernels`: Triton's, on a GPU; `steps`: where neither a language
            model nor a lattice nor arcs that read nothing take part, many frames of these for one look of the host, and
            `kernels` elsewhere; `graphs`: each such frame captured as a CUDA graph; `auto`: the fastest that runs on
            the device.

    Raises:
        AsrError: a lattice of a graph with arcs that read nothing is asked for, or a form that does not run here.
    """

    def __init__(
        self,
        graph: DecodingGraph,
        options: DecodingOptions | None = None,
        keep_lattice: bool = False,
        form: str = "auto",
    ) -> None:
        self.graph = graph
        self.options = options if options is not None else DecodingOptions()
        self._search_graph = SearchGraph(graph, self.options)
        # Paths are spelled on the host.
        self.host_graph = graph.to(torch.device("cpu"))
        self._mapper = WordMapper(graph.vocabulary)
        self._keep_lattice = keep_lattice
        self._form = chosen_form(form, graph.device)
        # Several threads may decode at a time, each with one of its own.
        self._idle_readers: list[ChunkBackend] = []
        if keep_lattice and self._search_graph.epsilon is not None:
            raise AsrError(
                "the graph has arcs that read no frame, from which the torch pass makes no lattice; "
                "build the graph without input epsilons or ask for the best path only."
            )

    def decode(self, log_prob: Tensor, num_frames: Tensor, lm: LanguageModel | None = None) -> list[DecodeResult]:
        """log_prob (N, T, C) natural log, num_frames (N,) int64 -> one result an utterance, in order.

        Raises:
            AsrError: the log-probabilities have NaN in them or another width than the graph's tokens.
        """
        found = self.search(log_prob, num_frames, lm, self._keep_lattice)
        results = found.results()
        if found.joint is None:
            return results
        pairs = zip(results, found.joint.split(), strict=True)
        return [replace(result, lattice=lattice) if result.reached_final else result for result, lattice in pairs]

    def search(
        self,
        log_prob: Tensor,
        num_frames: Tensor,
        lm: LanguageModel | None = None,
        keep_lattice: bool = True,
        held: Tensor | None = None,
    ) -> FoundPaths:
        """The same, before paths are spelled, with the lattice of all utterances, if any, where it is kept.

        held: as of `TokenSearch`.
        """
        check_log_prob(log_prob, num_frames, len(self.graph.tokens))
        num_utts = len(num_frames)
        log_prob = log_prob.to(self.graph.device, torch.float32)
        num_frames = num_frames.to(self.graph.device, torch.int64)
        original_frame = None
        if self.options.blank_skip_threshold is not None:
            log_prob, num_frames, original_frame, _ = skip_blanks(
                log_prob, num_frames, self.options.blank_skip_threshold
            )
        backtrace = Backtrace(self.graph.device, collects=not keep_lattice)
        records: LatticeRecords | None = None
        if keep_lattice and num_utts:
            records = LatticeRecords(num_utts, self.options, self._form != "tensor")
        lm = self._mapper.mapped(lm)
        # Of the chunk readers only loops keep lattices.
        may_read = lm is None and (self._form == "loops" or not keep_lattice)
        reader = None
        if may_read:
            with suppress(IndexError):  # a look before would be a race: another thread may take the last one
                reader = self._idle_readers.pop()
        search = TokenSearch(self._search_graph, self.options, lm, backtrace, records, self._form, reader, held)
        stream = search.start(torch.zeros_like(num_frames))
        search.advance(stream, log_prob, num_frames)
        endings = endings_of(self._search_graph, self.options, lm, search.alive_in_all())
        # By now a GPU has done what it was told: another thread's stream may write where this one's has read.
        if lm is None and search.reader is not None:
            self._idle_readers.append(search.reader)
        joint: Lattice | None = None
        if records is not None:
            parts = records.collected(backtrace, endings)
            joint = pruned_lattice(parts, self.graph, log_prob, self.options, self._form != "tensor")
        original_frame = None if original_frame is None else original_frame.cpu()
        return FoundPaths(self.host_graph, self.options, endings, backtrace, num_frames.cpu(), original_frame, joint)


class RescoringPass:
    """The torch pass by the graph's scores, its lattice rescored on the fly.

    Against the language model inside the search, it is asked about fewer words and slows nothing else down, but cannot
    save what the graph's own model has pruned.

    Args:
        graph: decoding graph without arcs that read nothing.
        options: beams and scales; `output_beam` decides what is rescored.
        keep_lattice: whether results carry a lattice.
    """

    def __init__(
        self, graph: DecodingGraph, options: DecodingOptions | None = None, keep_lattice: bool = False
    ) -> None:
        self.options = options if options is not None else DecodingOptions()
        self._keep_lattice = keep_lattice
        self._mapper = WordMapper(graph.vocabulary)
        self._search = TokenPassingDecoder(graph, self.options, keep_lattice=True)

    def decode(self, log_prob: Tensor, num_frames: Tensor, lm: LanguageModel | None = None) -> list[DecodeResult]:
        """log_prob (N, T, C) natural log, num_frames (N,) int64 -> one result an utterance, in order.

        An utterance that has no lattice, since no complete path survived, is decoded by the torch pass with the
        language model inside, which tells the best unfinished path or finds a complete one.

        Raises:
            AsrError: the log-probabilities have NaN in them or another width than the graph's tokens.
        """
        lm = self._mapper.mapped(lm)
        if lm is None and not self._keep_lattice:
            return self._search.search(log_prob, num_frames, keep_lattice=False).results()
        if lm is None:
            return self._search.decode(log_prob, num_frames)
        found = self._search.search(log_prob, num_frames)
        if found.joint is None:
            return []
        results = []
        for utt_idx, path in enumerate(rescore_joint(found.joint, self.options, lm, self._keep_lattice)):
            if path is None:
                results.append(found.result(utt_idx))
                continue
            hypothesis = path.hypothesis(found.graph, self.options, found.frame_of(utt_idx))
            results.append(found.result_of(utt_idx, hypothesis, True, path.lattice))
        unfinished = [utt_idx for utt_idx, result in enumerate(results) if not result.reached_final]
        if unfinished:
            rest = torch.tensor(unfinished)
            instead = self._search.search(log_prob[rest], num_frames[rest], lm, keep_lattice=False)
            for utt_idx, result in zip(unfinished, instead.results(), strict=True):
                results[utt_idx] = result
        return results
