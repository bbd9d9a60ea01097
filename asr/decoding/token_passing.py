"""The token passing decoder for whole utterances.

The language model acts inside the search, where it decides what is pruned, or after it: the search by the graph's own
scores keeps a lattice, which the language model rescores frame by frame (`asr.decoding.rescoring`), either when it is
complete or while it grows (`asr.decoding.chunks`).

Shapes: N utterances, T frames, C tokens, L arcs of a path.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from asr.decoding.backend import SearchGraph
from asr.decoding.backtrace import Backtrace, Ending, best_arcs, endings_of, hypothesis_of_path
from asr.decoding.chunk_backend import ChunkBackend
from asr.decoding.chunks import ChunkedSearch
from asr.decoding.frame import TokenSearch
from asr.decoding.interface import DecodeResult, Hypothesis, LogProbCheck, skip_blanks, with_num_frames
from asr.decoding.lattice import Lattice, pruned_lattice
from asr.decoding.lattice_records import LatticeRecords, collects_on
from asr.decoding.rescoring import rescore_lattice
from asr.decoding.selection import BackendFactory, backend_name, select_backend
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.kernels.interrupts import interrupts_between_loops
from asr.kernels.memory import no_autograd, to_device
from asr.lm.combine import WordMapper, on_device, without_weight
from asr.lm.interface import LanguageModel, device_of

LM_FUSIONS = {
    "lattice": "the language model rescores the decoder's lattice",
    "chunks": "the language model prunes the lattice while it grows, and the search continues from what is left",
    "search": "the language model decides within the search what is pruned: slower",
}
"""Where the language model acts -> description."""


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search of whole utterances. Paths are converted to words only when results are requested.

    Args:
        graph: the graph that was searched, on the host.
        options: scales.
        endings: one for each utterance.
        backtrace: the backpointers of the search.
        num_frames: (N,) int64, number of decoded frames, on the host.
        original_frame: (N, T) int64 on the host, the original frame of each decoded one; None if no frames were
            skipped.
        lattice: all utterances in one lattice; None if not requested or if there are no utterances.
    """

    graph: DecodingGraph
    options: DecodingOptions
    endings: list[Ending]
    backtrace: Backtrace
    num_frames: Tensor
    original_frame: Tensor | None
    lattice: Lattice | None

    def results(self) -> list[DecodeResult]:
        """One result for each utterance; with its lattice, if lattices were kept and it reached a final state."""
        lattices = [None] * len(self.endings) if self.lattice is None else self.lattice.split()
        return [self.result(utt_idx, lattice) for utt_idx, lattice in enumerate(lattices)]

    def result(self, utt_idx: int, lattice: Lattice | None = None) -> DecodeResult:
        """The result of one utterance, with its lattice if that is given and a final state was reached."""
        ending, hypothesis = self.endings[utt_idx], None
        if ending.backpointer is not None:
            scores = (ending.total, ending.graph_score, ending.lm_score)
            arc, frame_of = self._arcs[utt_idx], self.frame_of(utt_idx)
            hypothesis = hypothesis_of_path(self.graph, self.options, arc, *scores, frame_of)
        return self.result_of(utt_idx, hypothesis, ending.reached_final, lattice if ending.reached_final else None)

    def result_of(
        self, utt_idx: int, hypothesis: Hypothesis | None, reached_final: bool, lattice: Lattice | None
    ) -> DecodeResult:
        """The result of an utterance, with this hypothesis or with None."""
        return DecodeResult(
            hypotheses=() if hypothesis is None else (hypothesis,),
            reached_final=reached_final,
            num_frames=int(self.num_frames[utt_idx]),
            lattice=lattice,
            original_frame=self.frame_of(utt_idx),
        )

    def frame_of(self, utt_idx: int) -> Tensor | None:
        """The original frame of each decoded one, (num_frames,) int64; None if no frames were skipped."""
        if self.original_frame is None:
            return None
        return self.original_frame[utt_idx, : int(self.num_frames[utt_idx])]

    @functools.cached_property
    def _arcs(self) -> list[Tensor]:
        """The arcs (L,) of each best path, on the host."""
        return best_arcs(self.endings, self.backtrace)


_MOST_IDLE = 64  # kinds of backends, of which some may belong to language models that are no longer used


class SearchedFrames(NamedTuple):
    """What is searched.

    Attributes:
        log_prob: (N, T, C) float32.
        num_frames: (N,) int64.
        original_frame: (N, T) int64 on the host, the original frame of each; None if no frames were skipped.
    """

    log_prob: Tensor
    num_frames: Tensor
    original_frame: Tensor | None


class TokenPassingDecoder:
    """Token passing over whole utterances; implements `Decoder`. Several threads may decode with one instance.

    Args:
        graph: decoding graph on the device of the search. With input epsilons, neither lattices nor
            `lm_fusion="lattice"` or `"chunks"` are possible.
        options: beams and scales; with `lm_fusion="lattice"` or `"chunks"`, `output_beam` limits what is rescored.
        lm_fusion: a key of `LM_FUSIONS`. `lattice` queries fewer words and is faster, but cannot recover what the
            graph's own scores have pruned. `chunks` needs a CPU.
        keep_lattice: whether results include a lattice.
        backend: a name in `asr.decoding.selection.BACKENDS`, or a function that makes the backend of each search. All
            backends give the same results.
        inputs: the kind of `decode`'s input, a key of `asr.decoding.interface.INPUTS`.
        search_graph: the graph with the scales of these options, to be shared by several decoders; None to make it.

    Raises:
        AsrError: the graph has input epsilons and a lattice is needed, or a cycle of them gains score; there is no such
            fusion or kind of input; or the backend or the fusion does not run here.
    """

    def __init__(
        self,
        graph: DecodingGraph,
        options: DecodingOptions | None = None,
        *,
        lm_fusion: str = "search",
        keep_lattice: bool = False,
        backend: str | BackendFactory = "auto",
        inputs: str = "log_probs",
        search_graph: SearchGraph | None = None,
    ) -> None:
        if lm_fusion not in LM_FUSIONS:
            raise AsrError(f"There is no LM fusion {lm_fusion!r}; choose one of {', '.join(LM_FUSIONS)}.")
        self.graph = graph
        self._device = graph.device
        self.options = options if options is not None else DecodingOptions()
        self._check = LogProbCheck(len(graph.tokens), inputs)
        self._search_graph = search_graph or SearchGraph(graph, self.options)
        # Paths are converted to words on the host.
        self.host_graph = graph.to(torch.device("cpu"))
        self._mapper = WordMapper(graph.vocabulary)
        self._lm_fusion = lm_fusion
        if lm_fusion == "chunks" and graph.device.type != "cpu":
            raise AsrError(f"lm_fusion 'chunks' needs a CPU, but the graph is on {graph.device}; choose lattice.")
        self._keep_lattice = keep_lattice
        if isinstance(backend, str):
            backend = functools.partial(select_backend, name=backend_name(backend, graph.device))
        self._make_backend = backend
        # Backends of searches that have ended, see `_idle_of`.
        self._idle_backends: defaultdict[tuple[bool, int, int], deque[ChunkBackend]] = defaultdict(deque)
        if (keep_lattice or lm_fusion != "search") and graph.has_epsilons:
            raise AsrError(
                "The graph has arcs that read no frame, so no lattice can be made. Build the graph without input "
                "epsilons, or use lm_fusion='search' without lattices."
            )

    @interrupts_between_loops()
    @no_autograd()  # backends keep their buffers between searches
    def decode(
        self,
        log_prob: Tensor,
        num_frames: Tensor | None = None,
        lm: LanguageModel | None = None,
        lm_state: Tensor | None = None,
    ) -> list[DecodeResult]:
        """Like `Decoder.decode`.

        With `lm_fusion="lattice"` or `"chunks"`, an utterance of which no complete path survived is searched again with
        the language model inside the search, which finds a complete path or the best unfinished one.

        Raises:
            AsrError: the log-probabilities contain NaN or +inf, or their width is not the graph's number of tokens.
        """
        log_prob, num_frames = with_num_frames(log_prob, num_frames)
        lm = self._mapper.mapped(lm)
        if lm is None or self._lm_fusion == "search":
            return self.search(log_prob, num_frames, lm, lm_state=lm_state, keep_lattice=self._keep_lattice).results()
        if self._lm_fusion == "lattice":
            results = self._decode_by_rescoring(log_prob, num_frames, lm, lm_state)
        else:
            results = self._search_in_chunks(log_prob, num_frames, lm, lm_state).results()
        unfinished = [utt_idx for utt_idx, result in enumerate(results) if not result.reached_final]
        if unfinished:
            rest = torch.tensor(unfinished)
            rest_state = None if lm_state is None else lm_state[rest]
            instead = self.search(log_prob[rest], num_frames[rest], lm, lm_state=rest_state)
            for utt_idx, result in zip(unfinished, instead.results(), strict=True):
                results[utt_idx] = result
        return results

    def _decode_by_rescoring(
        self, log_prob: Tensor, num_frames: Tensor, lm: LanguageModel, lm_state: Tensor | None
    ) -> list[DecodeResult]:
        outcome = self.search(log_prob, num_frames, keep_lattice=True)
        if outcome.lattice is None:
            return []
        is_here = device_of(lm) == self._device
        paths = rescore_lattice(
            outcome.lattice,
            self.options,
            lm,
            self._keep_lattice,
            lm_state=lm_state,
            make_backend=self._make_backend if is_here else select_backend,
        )
        results = []
        for utt_idx, path in enumerate(paths):
            if path is None:  # also if the language model rules out all that is complete
                results.append(replace(outcome.result(utt_idx), reached_final=False))
                continue
            hypothesis = path.hypothesis(outcome.graph, self.options, outcome.frame_of(utt_idx))
            results.append(outcome.result_of(utt_idx, hypothesis, True, path.lattice))
        return results

    def search(
        self,
        log_prob: Tensor,
        num_frames: Tensor,
        lm: LanguageModel | None = None,
        *,
        lm_state: Tensor | None = None,
        keep_lattice: bool = False,
        held: Tensor | None = None,
    ) -> SearchOutcome:
        """Runs one search, with the language model inside it if there is one.

        Args:
            log_prob, num_frames, lm_state: as for `decode`.
            lm: the language model, with the graph's word ids.
            keep_lattice: whether to keep the lattice.
            held: (H,) int64, see `TokenSearch`.
        """
        self._check(log_prob, num_frames)
        frames = self.frames(log_prob, num_frames)
        num_utts = len(frames.num_frames)
        keep_lattice = keep_lattice and num_utts > 0
        given, lm = lm, None if lm is None else self._placed(lm)
        backend = self._take_backend(lm, keep_lattice)
        backtrace = Backtrace(self._device, collects=collects_on(self._device, keep_lattice))
        records = LatticeRecords(num_utts, self.options) if keep_lattice else None
        search = TokenSearch(self._search_graph, self.options, lm, backend, backtrace, records, held=held)
        stream = search.start(torch.zeros_like(frames.num_frames), lm_state)
        search.advance(stream, frames.log_prob, frames.num_frames)
        endings = endings_of(self._search_graph, self.options, lm, *search.all_active())
        if lm is given:  # no other search sees the object that `_placed` has made
            self._give_back(backend, lm, keep_lattice)
        return self._outcome(frames, endings, backtrace, records)

    def _search_in_chunks(
        self, log_prob: Tensor, num_frames: Tensor, lm: LanguageModel, lm_state: Tensor | None
    ) -> SearchOutcome:
        """The search of `asr.decoding.chunks`; arguments as for `search`."""
        self._check(log_prob, num_frames)
        frames = self.frames(log_prob, num_frames)
        lm = self._placed(lm)
        backend = self._take_backend(None, keep_lattice=True)
        search = ChunkedSearch(self._search_graph, self.options, lm, backend, self._make_backend, self._keep_lattice)
        last = search.search(frames.log_prob, frames.num_frames, lm_state)
        endings = endings_of(self._search_graph, self.options, lm, *last)
        self._give_back(backend, None, keep_lattice=True)
        return self._outcome(frames, endings, search.backtrace, search.records)

    def _placed(self, lm: LanguageModel) -> LanguageModel:
        """The language model as a search queries it: on the search's device, and ruling out nothing without weight."""
        return on_device(without_weight(lm, self.options.lm_scale), self._device)

    def frames(self, log_prob: Tensor, num_frames: Tensor) -> SearchedFrames:
        """A batch on the device of the search, without the frames that `blank_skip_threshold` skips."""
        log_prob = log_prob.to(self._device, torch.float32)
        num_frames = to_device(num_frames.to(torch.int64), self._device)
        if self.options.blank_skip_threshold is None:
            return SearchedFrames(log_prob, num_frames, None)
        kept, num_kept, original_frame, _ = skip_blanks(log_prob, num_frames, self.options.blank_skip_threshold)
        return SearchedFrames(kept, num_kept, original_frame.cpu())

    def _outcome(
        self, frames: SearchedFrames, endings: list[Ending], backtrace: Backtrace, records: LatticeRecords | None
    ) -> SearchOutcome:
        lattice: Lattice | None = None
        if records is not None:
            parts = records.collected(backtrace, endings)
            lattice = pruned_lattice(parts, self.graph, frames.log_prob, self.options)
        num_frames, original_frame = frames.num_frames.cpu(), frames.original_frame
        return SearchOutcome(self.host_graph, self.options, endings, backtrace, num_frames, original_frame, lattice)

    def _take_backend(self, lm: LanguageModel | None, keep_lattice: bool) -> ChunkBackend:
        """Takes an idle backend or makes one; on a GPU, its buffers belong to the current stream."""
        try:
            return self._idle_of(lm, keep_lattice).pop()
        except IndexError:  # all are in use
            return self._make_backend(self._search_graph, self.options, lm, keep_lattice)

    def _give_back(self, backend: ChunkBackend, lm: LanguageModel | None, keep_lattice: bool) -> None:
        """Lets later searches take a backend, after its buffers have been read.

        On a CPU, those with a language model are not kept, because nothing is saved.
        """
        if lm is None or self._device.type == "cuda":
            self._idle_of(lm, keep_lattice).append(backend)

    def _idle_of(self, lm: LanguageModel | None, keep_lattice: bool) -> deque[ChunkBackend]:
        """Idle backends with or without a lattice, of the current CUDA stream, to which their buffers belong, and of
        this language model, which they hold, so that no other has its id."""
        if len(self._idle_backends) > _MOST_IDLE:
            self._idle_backends.clear()
        return self._idle_backends[keep_lattice, _stream_number(self._device), 0 if lm is None else id(lm)]


def _stream_number(device: torch.device) -> int:
    """A number that identifies the current CUDA stream; 0 on a CPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
