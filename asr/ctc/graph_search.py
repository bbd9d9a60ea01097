"""CTC decoding with a graph of words: turns frames into hypotheses with words, tokens and times."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from asr.ctc.frames import Frames
from asr.ctc.graphs import WordGraph
from asr.ctc.interface import CTCDecodingConfig, CTCHypothesis, CTCToken, CTCWord, no_hypothesis
from asr.ctc.language_models import LentModels
from asr.decoding.build import device_with_loops
from asr.decoding.interface import DecodeResult, Hypothesis
from asr.decoding.mbr import PathPosteriors
from asr.decoding.nbest import n_best
from asr.decoding.online import StreamingDecoder
from asr.decoding.token_passing import TokenPassingDecoder
from asr.decoding.words import WordAligner, with_posteriors
from asr.graph.decoding_graph import DecodingGraph
from asr.graph.topology import with_last_boundary
from asr.lm.interface import LanguageModel
from asr.text.ctc_tokens import PIECE_PREFIX, CTCTokens
from asr.text.lexicon import Lexicon
from asr.text.normalize import is_unspaced, only_case_of
from asr.text.symbols import UNK_ID

# Spelled words reach the same text on several paths; this many times as many paths are extracted for an n-best list.
_MORE_FOR_EQUAL_TEXTS = 2


class Converted(NamedTuple):
    """A path through the graph and the hypothesis that it was converted to.

    Attributes:
        runs: its runs of tokens, see `Hypothesis.phones`.
        word_ids: its words.
        spans: positions of the first token of each word, and after its last one; none if a `WordAligner` finds them.
        hypothesis: the hypothesis.
    """

    runs: tuple[tuple[int, int, int], ...]
    word_ids: tuple[int, ...]
    spans: Sequence[tuple[int, int]]
    hypothesis: CTCHypothesis


class GraphSearch:
    """Searches a graph of words.

    Args:
        word_graph: the graph, on the device of the search.
        tokens: the network's tokens.
        config: scales and beams.
        models: second language models, minus the graph's own.
        frame_shift: seconds from one frame to the next, or None.
        confidences: whether words get their posterior probabilities.
    """

    def __init__(
        self,
        word_graph: WordGraph,
        tokens: CTCTokens,
        config: CTCDecodingConfig,
        models: LentModels,
        frame_shift: float | None,
        confidences: bool,
    ) -> None:
        self.word_graph = word_graph
        self._tokens = tokens
        self._config = config
        self._options = config.options()
        self.models = models
        self._frame_shift = frame_shift
        self._confidences = confidences
        graph = word_graph.graph
        self.graph = graph
        self.boundary_id = tokens.boundary_id
        self._letter_case = only_case_of(" ".join(word_graph.lexicon.pronunciations)) if word_graph.spells else None
        self._aligner = None if _tells_words(tokens, word_graph.lexicon) else WordAligner(word_graph.lexicon, graph)
        # The other one is made when it is needed, if ever: each copies the graph's scores.
        self._decoders = {confidences: self._new_decoder(confidences)}

    def _new_decoder(self, keeps_lattice: bool) -> TokenPassingDecoder:
        fusion = self._config.lm_fusion
        return TokenPassingDecoder(
            self.graph, self._options, lm_fusion=fusion, keep_lattice=keeps_lattice, inputs="scores"
        )

    def decode(self, frames: Frames, nbest: int) -> list[list[CTCHypothesis]]:
        """The best hypotheses of each utterance, best first, with distinct texts."""
        log_prob, num_frames = with_last_boundary(frames.log_prob, frames.num_frames, self.boundary_id)
        keeps = nbest > 1 or self._confidences
        if keeps not in self._decoders:
            self._decoders[keeps] = self._new_decoder(keeps)
        with self.models.lent() as lm:
            results = self._decoders[keeps].decode(log_prob, num_frames, lm)
        return [
            self._hypotheses(result, nbest, int(num)) for result, num in zip(results, frames.num_frames, strict=True)
        ]

    def stream(self, lm: LanguageModel | None, commit_frames: int | None) -> StreamingDecoder:
        """A decoder of streams."""
        graph = self._graph_of_streams
        return StreamingDecoder(graph, self._options, lm, commit_frames=commit_frames, inputs="scores")

    @functools.cached_property
    def _graph_of_streams(self) -> DecodingGraph:
        return self.graph.to(device_with_loops(self.graph.device))

    def as_ctc_hypothesis(
        self, hypothesis: Hypothesis, num_frames: int, is_complete: bool, earlier: Converted | None = None
    ) -> Converted:
        """Converts a path through the graph; tokens from frame `num_frames` on, an added boundary, are dropped.

        Of an earlier path of the same stream, tokens and words that this one has in common with it are taken over.
        """
        earlier = earlier or Converted((), (), (), no_hypothesis())
        num_runs = len(hypothesis.phones)
        while num_runs and hypothesis.phones[num_runs - 1][1] >= num_frames:
            num_runs -= 1
        runs, symbols = hypothesis.phones[:num_runs], self._tokens.table.tokens
        same, num_words = _num_shared(runs, earlier.runs), 0
        new = (CTCToken(symbols[entry], first, min(end, num_frames)) for entry, first, end in runs[same:])
        tokens = (*earlier.hypothesis.tokens[:same], *new)
        spans: list[tuple[int, int]] = []
        if self._aligner is None:
            # The last word that begins among the shared tokens may have grown.
            num_words = max(0, bisect.bisect_left(earlier.spans, (same, 0)) - 1)
            num_words = min(num_words, _num_shared(hypothesis.word_ids, earlier.word_ids))
            begin = earlier.spans[num_words][0] if num_words else 0
            groups = self._tokens.group([entry for entry, _, _ in runs[begin:]])
            spans = [*earlier.spans[:num_words], *((begin + first, begin + end) for first, end in groups)]
        else:
            hypothesis = self._aligner.aligned(hypothesis)
        words = [*earlier.hypothesis.words[:num_words]]
        for position in range(num_words, len(hypothesis.words)):
            word_id, text = hypothesis.word_ids[position], hypothesis.words[position]
            start_frame, end_frame = hypothesis.start_frames[position], hypothesis.end_frames[position]
            if position < len(spans):
                begin, end = spans[position]
                start_frame, end_frame = tokens[begin].start_frame, tokens[end - 1].end_frame
            if word_id == UNK_ID:
                text = self._spelled([run[0] for run in runs if start_frame <= run[1] < end_frame]) or text
            confidence = hypothesis.confidences[position] if hypothesis.confidences else None
            is_spelled = word_id == UNK_ID and text not in self.word_graph.lexicon
            words.append(self._word(text, start_frame, min(end_frame, num_frames), confidence, is_spelled))
        found = CTCHypothesis(
            tuple(words),
            tokens,
            hypothesis.total,
            hypothesis.am_score,
            hypothesis.graph_score + hypothesis.lm_score,
            is_complete,
        )
        return Converted(runs, hypothesis.word_ids, spans, found)

    def _spelled(self, entries: list[int]) -> str:
        """The text of a word outside the list, from its tokens, in the letter case of the list."""
        if self.word_graph.letters is not None:
            return self.word_graph.letters.spell([self._tokens.table.tokens[entry] for entry in entries])
        text = self._tokens.text_of(*entries)
        return text if self._letter_case is None else self._letter_case(text)

    def _word(self, text: str, start_frame: int, end_frame: int, confidence: float | None, spelled: bool) -> CTCWord:
        shift = self._frame_shift
        start, end = (None, None) if shift is None else (start_frame * shift, end_frame * shift)
        return CTCWord(text, start_frame, end_frame, start, end, confidence, spelled)

    def _hypotheses(self, result: DecodeResult, nbest: int, num_frames: int) -> list[CTCHypothesis]:
        found = result.hypotheses
        lattice = result.lattice
        if lattice is not None:
            options, original = self._options, result.original_frame
            if nbest > 1:
                wanted = nbest if not self.word_graph.spells else _MORE_FOR_EQUAL_TEXTS * nbest
                found = n_best(lattice, self.graph, options, wanted, original)
            if self._confidences:
                # For posteriors, the acoustic model's log-probabilities are scaled by at most 1.
                scale = 1.0 / max(1.0, options.lm_scale)
                posteriors = PathPosteriors(lattice, options, original)
                found = tuple(with_posteriors(each, posteriors, scale) for each in found)
        distinct: dict[str, CTCHypothesis] = {}
        for each in found:
            hypothesis = self.as_ctc_hypothesis(each, num_frames, result.reached_final).hypothesis
            distinct.setdefault(hypothesis.text, hypothesis)
        return list(distinct.values())[:nbest] or [no_hypothesis()]


def _tells_words(tokens: CTCTokens, lexicon: Lexicon) -> bool:
    """Whether `CTCTokens.group` finds the words of a lexicon: each ends in the only boundary, or begins as a piece.

    A lone `▁` is no word for it. Characters of scripts without spaces may begin words and be within them.
    """
    symbols = tokens.table.tokens
    if tokens.boundary_id is not None:
        boundary = symbols[tokens.boundary_id]
        return all(way[-1] == boundary and way.count(boundary) == 1 for way in lexicon.each())
    if tokens.kind != "pieces":
        return False
    beginnings = {symbols[entry] for entry in range(1, len(symbols)) if tokens.begins_word(entry)}
    if any(is_unspaced(symbol[0]) for symbol in symbols if symbol not in beginnings):
        return False
    return all(
        way[0] in beginnings and beginnings.isdisjoint(way[1:]) and way != (PIECE_PREFIX,) for way in lexicon.each()
    )


def _num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items at the beginning are the same objects in both, as those of a stream's settled path are."""
    differs = map(operator.is_not, one, other)
    return next(itertools.compress(itertools.count(), differs), min(len(one), len(other)))
