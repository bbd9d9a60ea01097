"""Decoding while the audio still comes: streams join, are fed chunks of any size, and end, each at its own time.

Shapes: N streams of a call, T frames of a chunk, C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asr.decoding.backtrace import Backtrace
from asr.decoding.ending import ending_of
from asr.decoding.endpoint import EndpointRules
from asr.decoding.first_pass import DecodeResult, Hypothesis
from asr.decoding.frame_scores import check_log_prob, skip_blanks
from asr.decoding.options import DecodingOptions
from asr.decoding.search_graph import SearchGraph
from asr.decoding.token_search import TokenSearch
from asr.decoding.word_map import WordMapper
from asr.errors import AsrError
from asr.graph.artefact import DecodingGraph
from asr.lm.contract import LanguageModel


@dataclass
class _Progress:
    """What a stream has read: frames in all, the trailing blank ones, and where kept frames were before skipping."""

    num_frames: int = 0
    num_trailing_blanks: int = 0
    after_blank: bool = False
    original_frames: list[Tensor] = field(default_factory=list)


class StreamingDecoder:
    """The torch pass fed in chunks; what it finds does not depend on how the frames are cut into chunks.

    Args:
        graph: decoding graph.
        options: beams and scales.
        lm: language model inside the search, or None.
        endpoint_rules: when a speaker has finished.
    """

    def __init__(
        self,
        graph: DecodingGraph,
        options: DecodingOptions | None = None,
        lm: LanguageModel | None = None,
        endpoint_rules: EndpointRules | None = None,
    ) -> None:
        self.graph = graph
        self.options = options if options is not None else DecodingOptions()
        self._rules = endpoint_rules if endpoint_rules is not None else EndpointRules()
        self._search_graph = SearchGraph(graph, self.options)
        self._lm = WordMapper(graph.vocabulary).mapped(lm)
        self._backtrace = Backtrace(graph.device)
        self._search = TokenSearch(self._search_graph, self.options, self._lm, self._backtrace)
        self._progress: dict[int, _Progress] = {}

    def start(self, num_streams: int = 1) -> list[int]:
        """Opens streams and gives their numbers."""
        state = torch.zeros(num_streams, dtype=torch.int64, device=self.graph.device)
        streams = [int(stream) for stream in self._search.start(state)]
        self._progress.update({stream: _Progress() for stream in streams})
        return streams

    def advance(self, streams: Sequence[int], log_prob: Tensor, num_frames: Tensor) -> None:
        """Reads a chunk of each of some open streams.

        Args:
            streams: N different stream numbers.
            log_prob: (N, T, C) natural log.
            num_frames: (N,) int64, how many of the T frames are the stream's.

        Raises:
            AsrError: a stream is not open or stands twice, or the log-probabilities are bad.
        """
        if len(set(streams)) != len(streams) or len(streams) != len(num_frames):
            raise AsrError(f"streams {list(streams)} with {len(num_frames)} chunks: give each stream one chunk.")
        progress = [self._open(stream) for stream in streams]
        check_log_prob(log_prob, num_frames, len(self.graph.tokens))
        log_prob = log_prob.to(self.graph.device, torch.float32)
        num_frames = num_frames.to(self.graph.device, torch.int64)
        is_blank = log_prob.argmax(2) == 0 if log_prob.shape[1] else torch.zeros(log_prob.shape[:2], dtype=torch.bool)
        kept_log_prob, kept_frames, frame = log_prob, num_frames, None
        if self.options.blank_skip_threshold is not None:
            after_blank = torch.tensor([one.after_blank for one in progress], dtype=torch.bool, device=log_prob.device)
            kept_log_prob, kept_frames, frame, ends_blank = skip_blanks(
                log_prob, num_frames, self.options.blank_skip_threshold, after_blank
            )
            for one, ends in zip(progress, ends_blank.tolist(), strict=True):
                one.after_blank = ends
        stream = torch.tensor(list(streams), dtype=torch.int64, device=self.graph.device)
        self._search.advance(stream, kept_log_prob, kept_frames)
        for row, one in enumerate(progress):
            num = int(num_frames[row])
            speech = (~is_blank[row, :num]).nonzero().squeeze(1)
            trailing = num - 1 - int(speech[-1]) if len(speech) else num + one.num_trailing_blanks
            if frame is not None:
                one.original_frames.append(frame[row, : int(kept_frames[row])] + one.num_frames)
            one.num_trailing_blanks = trailing
            one.num_frames += num

    def partial(self, stream: int) -> Hypothesis | None:
        """The best path so far, finished or not; None where nothing is alive."""
        return self._result(stream, unfinished=True).best

    def is_endpoint(self, stream: int) -> bool:
        """Whether the speaker seems to have finished."""
        progress = self._open(stream)
        best = self.partial(stream)
        has_words = best is not None and len(best.words) > 0
        return self._rules.apply(has_words, progress.num_trailing_blanks, progress.num_frames)

    def finalize(self, stream: int) -> DecodeResult:
        """Ends a stream: its best complete path, or the best unfinished one where none is complete."""
        result = self._result(stream, unfinished=False)
        self._search.drop(stream)
        del self._progress[stream]
        return result

    def _open(self, stream: int) -> _Progress:
        if stream not in self._progress:
            raise AsrError(f"stream {stream} is not open; `start` opens streams and `finalize` closes them.")
        return self._progress[stream]

    def _result(self, stream: int, unfinished: bool) -> DecodeResult:
        progress = self._open(stream)
        tokens, offset = self._search.alive(stream)
        ending = ending_of(self._search_graph, self.options, self._lm, tokens, offset, unfinished)
        frame_of = torch.cat(progress.original_frames) if progress.original_frames else None
        hypothesis = ending.hypothesis(self.graph, self.options, self._backtrace, frame_of)
        hypotheses = () if hypothesis is None else (hypothesis,)
        return DecodeResult(hypotheses, ending.reached_final, progress.num_frames)
