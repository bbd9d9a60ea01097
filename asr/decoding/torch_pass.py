"""The first pass that needs nothing but torch: the language model sits inside the search.

Shapes: N utterances, T frames, C tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asr.decoding.ending import endings_of
from asr.decoding.first_pass import DecodeResult
from asr.decoding.found_paths import FoundPaths
from asr.decoding.frame_scores import check_log_prob, skip_blanks
from asr.decoding.lattice.build import pruned_lattice
from asr.decoding.lattice.lattice import Lattice
from asr.decoding.lattice.records import LatticeRecords
from asr.decoding.options import DecodingOptions
from asr.decoding.search.backtrace import Backtrace
from asr.decoding.search.frame_form import chosen_form
from asr.decoding.search.reading import ChunkReader
from asr.decoding.search.search_graph import SearchGraph
from asr.decoding.search.token_search import TokenSearch
from asr.decoding.word_map import WordMapper
from asr.errors import AsrError
from asr.graph.artefact import DecodingGraph
from asr.lm.contract import LanguageModel


class TorchFirstPass:
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
        self._idle_readers: list[ChunkReader] = []
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
        reader = self._idle_readers.pop() if may_read and self._idle_readers else None
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
