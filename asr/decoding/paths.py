"""Converts the arcs of a path to a hypothesis, and finds word times by the lexicon.

Determinization moves a word's label after the phones that it shares with other words, so the graph outputs words some
phones late. The lexicon tells which phones belong to which word, because the path's phones are the concatenated
pronunciations of its words. Times remain inexact within phones: CTC spikes lie inside a phone, not at its edges.

Shapes: L arcs of a path, P phones, W words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.decoding.backend import expand
from asr.decoding.interface import DecodingOptions, Hypothesis
from asr.errors import AsrError
from asr.graph.context import BIPHONE_TOPOLOGY, TIED_STATES, TiedStates
from asr.graph.decoding_graph import DecodingGraph
from asr.text.lexicon import Lexicon, word_ends
from asr.text.symbols import UNK_ID

_Runs = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class SpelledPath:
    """The words, phones and times of a path from the start, complete or not; more arcs can be appended.

    A word begins where the graph outputs it and ends after the last non-blank frame before the next word.

    Args:
        word_ids: in order.
        start_frames: the original frame at which each word begins.
        end_frames: the frame after the last one so far of each word.
        phones: runs of equal tokens without blanks, each as (token, first frame, frame after the last).
        last_token: the last token read, blank or not; -1 before the first frame.
        last_frame: the original frame that was read last, if frames were skipped.
        spoken_end: the frame after the last non-blank one.
        num_frames: frames read.
        graph_score: sum of the arcs' graph scores.
    """

    word_ids: tuple[int, ...] = ()
    start_frames: tuple[int, ...] = ()
    end_frames: tuple[int, ...] = ()
    phones: _Runs = ()
    last_token: int = -1
    last_frame: int = 0
    spoken_end: int = 0
    num_frames: int = 0
    graph_score: float = 0.0

    def followed_by(self, graph: DecodingGraph, arc: Tensor, frame_of: Tensor | None = None) -> SpelledPath:
        """The path extended by more arcs.

        Args:
            graph: the graph of the arcs.
            arc: (L,) int64.
            frame_of: original numbers of the frames that these arcs read; None if no frames were skipped.
        """
        arc = arc.to(graph.device)
        token_id = graph.token_id.index_select(0, arc)
        reads = (token_id >= 0).to(torch.int64)
        owner, word = expand(graph.word_begin, arc)
        word_ids = graph.word_id.index_select(0, word).tolist()
        frame = reads.cumsum(0) - reads
        read = token_id[token_id >= 0]
        first_frame = self.num_frames
        if frame_of is None:
            frame += self.num_frames
        elif len(frame_of):
            frame = frame_of.index_select(0, frame.clamp(max=len(frame_of) - 1))
        else:
            frame += self.last_frame
        position = torch.arange(len(token_id), device=token_id.device)
        # For each arc, the last arc up to it that reads a token other than blank; -1 if there is none.
        spoken = torch.where(token_id > 0, position, torch.full_like(position, -1))
        spoken = spoken.cummax(0).values if len(spoken) else spoken
        start_frames, end_frames, spoken_end = self._frames(frame.tolist(), spoken.tolist(), owner.tolist())
        return SpelledPath(
            word_ids=(*self.word_ids, *word_ids),
            start_frames=start_frames,
            end_frames=end_frames,
            phones=self._with_runs(_runs(read, first_frame, frame_of), int(read[0]) if len(read) else -1),
            last_token=int(read[-1]) if len(read) else self.last_token,
            last_frame=int(frame_of[len(read) - 1]) if frame_of is not None and len(read) else self.last_frame,
            spoken_end=spoken_end,
            num_frames=self.num_frames + len(read),
            graph_score=self.graph_score + float(graph.score.index_select(0, arc).sum(dtype=torch.float64)),
        )

    def _with_runs(self, runs: _Runs, first_token: int) -> _Runs:
        """Appends runs; the first one may continue the last run of this path."""
        if self.phones and first_token == self.last_token > 0:
            (_, begin, _), (token, _, end) = self.phones[-1], runs[0]
            return (*self.phones[:-1], (token, begin, end), *runs[1:])
        return self.phones + runs

    def _frames(
        self, frame: list[int], spoken: list[int], arcs: list[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Start and end frames of all words, and the end of speech; the last known word may become longer.

        Args:
            frame: the frame at which each arc begins.
            spoken: for each arc, the last arc up to it with a token other than blank, or -1.
            arcs: the arc of each new word.
        """
        start_frames, end_frames = list(self.start_frames), list(self.end_frames)
        bounds = [*arcs, len(frame)]
        if end_frames and bounds[0] > 0 and spoken[bounds[0] - 1] >= 0:
            end_frames[-1] = frame[spoken[bounds[0] - 1]] + 1
        for begin, bound in zip(arcs, bounds[1:], strict=True):
            last = max(begin, spoken[bound - 1]) if bound > 0 else begin
            start_frames.append(frame[begin])
            end_frames.append(frame[last] + 1)
        spoken_end = frame[spoken[-1]] + 1 if spoken and spoken[-1] >= 0 else self.spoken_end
        return tuple(start_frames), tuple(end_frames), spoken_end

    def hypothesis(
        self, graph: DecodingGraph, options: DecodingOptions, total: float, final_score: float, lm_score: float
    ) -> Hypothesis:
        """The hypothesis of the path with these scores; arguments as for `hypothesis_of_path`."""
        graph_score = self.graph_score + final_score
        rest = options.graph_scale * graph_score + options.lm_scale * lm_score
        am_score = (total - rest - options.word_insertion_penalty * len(self.word_ids)) / options.am_scale
        return Hypothesis(
            word_ids=self.word_ids,
            words=tuple(graph.vocabulary.words[word_id] for word_id in self.word_ids),
            am_score=am_score,
            graph_score=graph_score,
            lm_score=lm_score,
            total=total,
            start_frames=self.start_frames,
            end_frames=self.end_frames,
            phones=self.phones,
        )


def hypothesis_of_path(
    graph: DecodingGraph,
    options: DecodingOptions,
    arc: Tensor,
    total: float,
    final_score: float,
    lm_score: float,
    frame_of: Tensor | None = None,
) -> Hypothesis:
    """Converts a path through the graph to a hypothesis.

    Args:
        graph: the graph.
        options: the scales of `total`.
        arc: (L,) int64, graph arcs.
        total: the path's scaled score.
        final_score: the graph's final score, unscaled; 0 for an unfinished path.
        lm_score: the language model score, unscaled.
        frame_of: (T,) the original frame of each decoded one; None if no frames were skipped.
    """
    return SpelledPath().followed_by(graph, arc, frame_of).hypothesis(graph, options, total, final_score, lm_score)


class PathScores(NamedTuple):
    """Scores of K paths, float64.

    Attributes:
        total: (K,) scaled.
        final_score: (K,) the graph's final score, unscaled.
        lm_score: (K,) the language model score, unscaled.
    """

    total: Tensor
    final_score: Tensor
    lm_score: Tensor


def hypotheses_of_paths(
    graph: DecodingGraph,
    options: DecodingOptions,
    arc: Tensor,
    num_arcs: Tensor,
    scores: PathScores,
    frame_of: Tensor | None = None,
) -> tuple[Hypothesis, ...]:
    """Like `hypothesis_of_path` for many paths at once; each arc must read one frame.

    Args:
        graph: the graph, on the CPU like all arguments.
        options: the scales of the totals.
        arc: (L,) int64, the concatenated graph arcs of all paths.
        num_arcs: (K,) int64, the number of arcs of each path.
        scores: scores of the paths.
        frame_of: (T,) the original frame of each decoded one; None if no frames were skipped.
    """
    begin = num_arcs.cumsum(0) - num_arcs
    path = torch.repeat_interleave(num_arcs)
    position = torch.arange(len(arc))

    def frame(place: Tensor) -> Tensor:
        own = place - begin.index_select(0, path.index_select(0, place))
        if frame_of is None or not len(frame_of):
            return own
        return frame_of.index_select(0, own.clamp(max=len(frame_of) - 1))

    token_id = graph.token_id.index_select(0, arc).to(torch.int64)
    owner, word = expand(graph.word_begin, arc)
    # A word ends with the last token that is not blank before the next word or the end of the path.
    next_owner = torch.cat([owner[1:], owner.new_full((1,), len(arc))])[: len(owner)]
    next_owner = torch.minimum(next_owner, (begin + num_arcs)[path[owner]])
    last_spoken = torch.where(token_id > 0, position, torch.full_like(position, -1))
    last_spoken = last_spoken.cummax(0).values if len(arc) else last_spoken
    end = torch.where(next_owner > owner, last_spoken[next_owner - 1], owner)
    start_frames, end_frames = frame(owner).tolist(), (frame(torch.maximum(owner, end)) + 1).tolist()
    num_words = torch.bincount(path[owner], minlength=len(num_arcs)).tolist()
    # The path is part of the key, so that no run extends over two paths.
    _, run_length = torch.unique_consecutive(path * (len(graph.tokens) + 1) + token_id, return_counts=True)
    run_last = run_length.cumsum(0) - 1
    spoken = (token_id.index_select(0, run_last) > 0).nonzero().squeeze(1)
    run_last, run_length = run_last.index_select(0, spoken), run_length.index_select(0, spoken)
    runs = _shared_runs(token_id.index_select(0, run_last), frame(run_last - run_length + 1), frame(run_last) + 1)
    num_runs = torch.bincount(path.index_select(0, run_last), minlength=len(num_arcs)).tolist()
    graph_score = scores.final_score.index_add(0, path, graph.score.index_select(0, arc).double())
    rest = options.graph_scale * graph_score + options.lm_scale * scores.lm_score
    rest = rest + options.word_insertion_penalty * torch.tensor(num_words, dtype=torch.float64)
    am_score = (scores.total - rest) / options.am_scale
    word_ids = graph.word_id[word].tolist()
    words = [graph.vocabulary.words[word_id] for word_id in word_ids]
    columns = (am_score, graph_score, scores.lm_score, scores.total)
    hypotheses: list[Hypothesis] = []
    first, first_run = 0, 0
    for am, of_graph, lm, total, own_words, own_runs in zip(
        *(column.tolist() for column in columns), num_words, num_runs, strict=True
    ):
        own = slice(first, first + own_words)
        hypotheses.append(
            Hypothesis(
                word_ids=tuple(word_ids[own]),
                words=tuple(words[own]),
                am_score=am,
                graph_score=of_graph,
                lm_score=lm,
                total=total,
                start_frames=tuple(start_frames[own]),
                end_frames=tuple(end_frames[own]),
                phones=tuple(runs[first_run : first_run + own_runs]),
            )
        )
        first, first_run = first + own_words, first_run + own_runs
    return tuple(hypotheses)


def _shared_runs(token: Tensor, begin: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    """Runs (R,) as tuples. Equal runs are one object, as few differ, and making objects takes most of the time."""
    base = int(end.max()) + 1 if len(end) else 1
    distinct, number = torch.unique((token * base + begin) * base + end, return_inverse=True)
    objects = np.empty(len(distinct), dtype=object)
    objects[:] = [(key // base // base, key // base % base, key % base) for key in distinct.tolist()]
    runs: list[tuple[int, int, int]] = objects[number.numpy()].tolist()
    return runs


def _runs(token_id: Tensor, first_frame: int, frame_of: Tensor | None) -> _Runs:
    """Runs of equal tokens of frames (T,), without blanks, each as (token, first frame, frame after the last)."""
    token, length = torch.unique_consecutive(token_id, return_counts=True)
    end = length.cumsum(0)
    spoken = token > 0
    token, begin, last = token[spoken], (end - length)[spoken], (end - 1)[spoken]
    if frame_of is None:
        begin, last = begin + first_frame, last + first_frame
    else:
        begin, last = frame_of[begin], frame_of[last]
    return tuple(zip(token.tolist(), begin.tolist(), (last + 1).tolist(), strict=True))


_TOPOLOGY = "ctc"


def can_align(graph: DecodingGraph) -> bool:
    """Whether the runs of tokens along a path of the graph are its phones."""
    return graph.meta.get("topology", _TOPOLOGY) in (_TOPOLOGY, BIPHONE_TOPOLOGY)


class WordAligner:
    """Gives the words of hypotheses the times of their phones. `<unk>` may have any phones if the lexicon has none.

    Args:
        lexicon: the lexicon that the graph was built from, or a larger one.
        graph: the decoding graph; its topology must be `ctc`, where each phone is a run of equal tokens, or
            `chain-biphone`, whose tied states determine the phones.

    Raises:
        AsrError: the graph has another topology.
    """

    def __init__(self, lexicon: Lexicon, graph: DecodingGraph) -> None:
        if not can_align(graph):
            topology = graph.meta["topology"]
            raise AsrError(f"word times from the lexicon need a graph of the topology {_TOPOLOGY}, not {topology}.")
        is_biphone = graph.meta.get("topology", _TOPOLOGY) == BIPHONE_TOPOLOGY
        self._states = TiedStates.from_json(graph.meta[TIED_STATES]) if is_biphone else None
        names = graph.tokens.tokens if self._states is None else self._states.phones
        token_id = {token: position for position, token in enumerate(names)}
        silence = graph.meta.get("silence")
        self._silence = token_id.get(silence) if silence is not None else None
        self._variants: dict[str, list[tuple[int, ...]]] = {}
        self._lexicon = lexicon
        self._token_id = token_id

    def aligned(self, hypothesis: Hypothesis) -> Hypothesis:
        """The hypothesis with the times of its words' phones; unchanged if the phones do not match the lexicon."""
        runs = hypothesis.phones if self._states is None else self._states.phones_of_runs(hypothesis.phones)
        phones = [run for run in runs if run[0] != self._silence]
        variants: list[list[tuple[int, ...]] | int] = []
        for word_id, word, start_frame in zip(
            hypothesis.word_ids, hypothesis.words, hypothesis.start_frames, strict=True
        ):
            ways = self._variants_of(word)
            is_open = word_id == UNK_ID and not ways
            # The graph outputs <unk> where its first phone is read.
            variants.append(sum(end <= start_frame for _, _, end in phones) if is_open else ways)
        ends = word_ends([token for token, _, _ in phones], variants)
        if ends is None:
            return hypothesis
        begins = [0, *ends[:-1]]
        return replace(
            hypothesis,
            start_frames=tuple(phones[begin][1] for begin in begins[: len(ends)]),
            end_frames=tuple(phones[end - 1][2] for end in ends),
        )

    def _variants_of(self, word: str) -> list[tuple[int, ...]]:
        if word not in self._variants:
            known = self._token_id
            spelled = self._lexicon.pronunciations.get(word, [])
            self._variants[word] = [
                tuple(known[phone] for phone in phones if known[phone] != self._silence)
                for phones in spelled
                if all(phone in known for phone in phones)
            ]
        return self._variants[word]
