"""Streaming decoding: streams open, receive chunks of any size, and end, each at its own time.

Shapes: N streams of a call, T frames of a chunk, C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from asr.decoding.backend import SearchGraph
from asr.decoding.backtrace import Backtrace, Ending, SpelledPath, endings_of
from asr.decoding.frame import TokenSearch
from asr.decoding.interface import DecodeResult, Hypothesis, LogProbCheck, check_chunks, skip_blanks
from asr.decoding.selection import select_backend
from asr.decoding.settings import DecodingOptions
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.lm.combine import mapped_to, on_device, without_weight
from asr.lm.interface import LanguageModel

SHORTEST_COMMIT_SECONDS = 0.2
"""The youngest age at which users may make words final: sooner, the word that follows has not been heard."""


@dataclass(frozen=True)
class EndpointRules:
    """Rules for the end of an utterance, in frames of the acoustic model. An utterance ends when one of them holds.

    After half of `longest`, ever shorter pauses suffice, so that long speech is rarely cut within a word.

    Args:
        silence_before_words: trailing blank frames that end an utterance without words.
        silence_after_words: trailing blank frames that end an utterance with words.
        longest: frames after which an utterance ends in any case.
        longest_token: what the last token lasts beyond this many frames counts as blank, since a network that finds no
            silence in the noise of a pause stays in one token.

    Raises:
        AsrError: `longest` is below 1.
    """

    silence_before_words: int = 125
    silence_after_words: int = 25
    longest: int = 750
    longest_token: int = 12

    def __post_init__(self) -> None:
        if not self.longest >= 1:
            raise AsrError(f"endpoint rules: longest is {self.longest}; give 1 frame or more.")

    def ends(self, path: SpelledPath, num_frames: int) -> bool:
        """Whether the utterance ends here, after `num_frames` frames with this best path."""
        spoken_end = path.spoken_end
        if path.phones:
            spoken_end = min(spoken_end, path.phones[-1][1] + self.longest_token)
        return self.apply(len(path.word_ids) > 0, num_frames - spoken_end, num_frames)

    def apply(self, has_words: bool, num_trailing_blanks: int, num_frames: int) -> bool:
        """Whether the utterance ends here.

        Args:
            has_words: whether the best path has words.
            num_trailing_blanks: frames since the best path last read a token other than blank.
            num_frames: frames read.
        """
        silence = self.silence_after_words if has_words else self.silence_before_words
        too_long = 2.0 * num_frames / self.longest - 1.0 if self.is_long(num_frames) else 0.0
        return num_trailing_blanks >= silence * (1.0 - too_long)

    def is_long(self, num_frames: int) -> bool:
        """Whether an utterance of this length ends in shorter pauses than the usual ones."""
        return 2 * num_frames > self.longest


_FRAMES_BETWEEN_SETTLINGS = 8


class _Traced(NamedTuple):
    """A path from the stream's start; None if no token is active."""

    ending: Ending
    path: SpelledPath | None


@dataclass
class _Progress:
    """The progress of a stream.

    Args:
        num_frames: frames read.
        after_blank: whether the last frame's blank probability exceeds `blank_skip_threshold`.
        settled: the prefix that all partial paths share.
        unsettled_frames: original numbers of the decoded frames after that prefix; None if no frames are skipped.
        num_unsettled: frames read since the last attempt to extend `settled`.
        best: the best path so far, complete or not; None if it has not been traced since the last chunk.
    """

    num_frames: int = 0
    after_blank: bool = False
    settled: SpelledPath = field(default_factory=SpelledPath)
    unsettled_frames: Tensor | None = None
    num_unsettled: int = 0
    best: _Traced | None = None


class StreamingDecoder:
    """Token passing in chunks. Unless `commit_frames` is set, results do not depend on how frames are chunked.

    The prefix that all partial paths of a stream share is final, and is stored as words. So a stream may last for ever:
    its memory is that of its words and of the paths after the shared prefix.

    Args:
        graph: decoding graph.
        options: beams and scales.
        lm: language model inside the search, or None.
        endpoint_rules: rules for the end of an utterance.
        commit_frames: the best path becomes final up to this many frames ago, and paths that differ there are dropped;
            None makes final only what all paths share. A recurrent language model never merges histories, so without
            this limit nothing in a long stream may ever become final. With it, results may depend on the chunks.
        inputs: the kind of `advance`'s input, a key of `asr.decoding.interface.INPUTS`.
        search_graph: as for `asr.decoding.token_passing.TokenPassingDecoder`.

    Raises:
        AsrError: `inputs` is not a key of `INPUTS`, or a cycle of the graph's input epsilons gains score.
    """

    def __init__(
        self,
        graph: DecodingGraph,
        options: DecodingOptions | None = None,
        lm: LanguageModel | None = None,
        endpoint_rules: EndpointRules | None = None,
        commit_frames: int | None = None,
        *,
        inputs: str = "log_probs",
        search_graph: SearchGraph | None = None,
    ) -> None:
        self.graph = graph
        self.options = options if options is not None else DecodingOptions()
        self._rules = endpoint_rules if endpoint_rules is not None else EndpointRules()
        self._commit_frames = commit_frames
        self._check = LogProbCheck(len(graph.tokens), inputs)
        self._search_graph = search_graph or SearchGraph(graph, self.options)
        self._lm: LanguageModel | None = None
        if lm is not None:
            mapped = on_device(mapped_to(lm, graph.vocabulary), graph.device)
            self._lm = without_weight(mapped, self.options.lm_scale)
        self._backtrace = Backtrace(graph.device)
        backend = select_backend(self._search_graph, self.options, self._lm)
        self._search = TokenSearch(self._search_graph, self.options, self._lm, backend, self._backtrace)
        self._progress: dict[int, _Progress] = {}

    def start(self, num_streams: int = 1, lm_state: Tensor | None = None) -> list[int]:
        """Opens streams and returns their numbers.

        Args:
            num_streams: N, how many.
            lm_state: (N, D), what the language model carries over from earlier utterances, or None.
        """
        state = torch.zeros(num_streams, dtype=torch.int64, device=self.graph.device)
        streams = [int(stream) for stream in self._search.start(state, lm_state)]
        self._progress.update({stream: _Progress() for stream in streams})
        return streams

    def advance(self, streams: Sequence[int], log_prob: Tensor, num_frames: Tensor) -> None:
        """Searches one chunk each of some open streams.

        Args:
            streams: N distinct stream numbers.
            log_prob: (N, T, C) natural logs.
            num_frames: (N,) int64, number of valid frames of each stream.

        Raises:
            AsrError: a stream is not open or occurs twice, or the log-probabilities are invalid.
        """
        check_chunks(streams, num_frames)
        progress = [self._open(stream) for stream in streams]
        self._check(log_prob, num_frames)
        log_prob = log_prob.detach().to(self.graph.device, torch.float32)
        num_frames = num_frames.to(self.graph.device, torch.int64)
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
            if frame is not None:
                kept = frame[row, : int(kept_frames[row])] + one.num_frames
                one.unsettled_frames = kept if one.unsettled_frames is None else torch.cat([one.unsettled_frames, kept])
            one.num_frames += num
            one.best = None
            one.num_unsettled += num
            if one.num_unsettled >= _FRAMES_BETWEEN_SETTLINGS:
                self._settle(streams[row], one)

    def partial(self, stream: int) -> Hypothesis | None:
        """The best path so far, complete or not; None if no token is active."""
        return self._result(self._open(stream), self._best(stream)).best

    def num_settled_words(self, stream: int) -> int:
        """The number of leading words of `partial` that can no longer change."""
        # The end time of the last of them may still change.
        return len(self._open(stream).settled.word_ids)

    def is_endpoint(self, stream: int) -> bool:
        """Whether the utterance has ended by the endpoint rules."""
        return self._rules.ends(self._best(stream).path or SpelledPath(), self._open(stream).num_frames)

    def finalize(self, stream: int) -> DecodeResult:
        """Ends a stream and returns its best complete path, or the best unfinished one if none is complete."""
        result = self._result(self._open(stream), self._traced(stream, unfinished=False))
        self._search.drop(stream)
        del self._progress[stream]
        return result

    def _open(self, stream: int) -> _Progress:
        if stream not in self._progress:
            raise AsrError(f"stream {stream} is not open; `start` opens streams and `finalize` closes them.")
        return self._progress[stream]

    def _settle(self, stream: int, progress: _Progress) -> None:
        """Moves the prefix that all partial paths share from the backpointers to the final words."""
        progress.num_unsettled = 0
        tokens, _ = self._search.active(stream)
        if not len(tokens):
            return
        if self._commit_frames is not None:
            best = int(tokens.backpointer[tokens.score.argmax()])
            self._search.keep(stream, self._backtrace.descends(tokens.backpointer, best, self._commit_frames))
            tokens, _ = self._search.active(stream)
        before = progress.settled.num_frames
        arc = self._backtrace.cut_shared_prefix(tokens.backpointer)
        progress.settled = progress.settled.followed_by(self.graph, arc, progress.unsettled_frames)
        if progress.unsettled_frames is not None:
            progress.unsettled_frames = progress.unsettled_frames[progress.settled.num_frames - before :]

    def _best(self, stream: int) -> _Traced:
        """The best path so far, which partial results and endpoints share."""
        progress = self._open(stream)
        if progress.best is None:
            progress.best = self._traced(stream, unfinished=True)
        return progress.best

    def _traced(self, stream: int, unfinished: bool) -> _Traced:
        """The best path; only a complete one, if there is any, unless `unfinished`."""
        progress = self._open(stream)
        tokens, score_offset = self._search.active(stream)
        tokens.stream = torch.zeros_like(tokens.stream)
        (ending,) = endings_of(self._search_graph, self.options, self._lm, tokens, score_offset, unfinished)
        if ending.backpointer is None:
            return _Traced(ending, None)
        arc = self._backtrace.path(ending.backpointer)
        return _Traced(ending, progress.settled.followed_by(self.graph, arc, progress.unsettled_frames))

    def _result(self, progress: _Progress, traced: _Traced) -> DecodeResult:
        ending, path = traced
        hypotheses: tuple[Hypothesis, ...] = ()
        if path is not None:
            scores = (ending.total, ending.graph_score, ending.lm_score)
            hypotheses = (path.hypothesis(self.graph, self.options, *scores),)
        return DecodeResult(hypotheses, ending.reached_final, progress.num_frames)
