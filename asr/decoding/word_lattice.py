"""Rescoring of lattices and n-best lists of other recognizers with any `LanguageModel`.

These lattices have only what all recognizers have in common: states, and arcs with at most one word, scores and perhaps
times. Nothing is assumed about frames or tokens. Out-of-vocabulary words keep their spelling.

Shapes: Q queries to the language model.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from asr.decoding.nbest import PrefixTree, score_tree
from asr.errors import AsrError
from asr.lm.interface import LanguageModel
from asr.text.normalize import written_in_any_case
from asr.text.symbols import Vocabulary

NOT_WORDS = frozenset(
    {"", "!NULL", "<eps>", "<s>", "</s>", "!SENT_START", "!SENT_END", "!ENTER", "!EXIT", "!SIL", "#0"}
)
"""What stands in the place of a word in lattices and word lists, but is none."""

SENTENCE_END = "</s>"
"""The word of arcs where a sentence ends; the next one begins from `<s>`."""

_SENTENCE_ENDS = (SENTENCE_END, "!SENT_END")

_LONGEST_FRAME = 0.1  # seconds


class WordArc(NamedTuple):
    """An arc of a `WordLattice`.

    Args:
        src, dst: source and destination state.
        word: the word; empty for none, or `SENTENCE_END`.
        am_score, lm_score: scores of the other recognizer, natural logs, unscaled.
    """

    src: int
    dst: int
    word: str
    am_score: float
    lm_score: float = 0.0

    @property
    def is_word(self) -> bool:
        return bool(self.word) and self.word != SENTENCE_END


def word_or_end(word: str) -> str:
    """The word of an arc with this label: itself, empty for none, or `SENTENCE_END`."""
    return SENTENCE_END if word in _SENTENCE_ENDS else "" if word in NOT_WORDS else word


@dataclass
class WordLattice:
    """The alternatives of one utterance.

    Args:
        name: name of the utterance.
        num_states: number of states.
        start: the start state.
        arcs: in any order.
        final: final state -> its am_score and lm_score.
        time: state -> seconds, for states with known times.
        scales: weights of `am_score` and `lm_score` and word insertion penalty, as given in the file.
    """

    name: str
    num_states: int
    start: int
    arcs: list[WordArc]
    final: dict[int, tuple[float, float]]
    time: dict[int, float] = field(default_factory=dict)
    scales: tuple[float, float, float] = (1.0, 1.0, 0.0)


def state_times(arcs: Sequence[WordArc], frames: Sequence[int], frame_seconds: float) -> dict[int, float]:
    """State -> seconds, from the number of frames that each arc reads; empty if none reads any."""
    if not any(frames):
        return {}
    out: dict[int, list[tuple[int, int]]] = {}
    for arc, num_frames in zip(arcs, frames, strict=True):
        out.setdefault(arc.src, []).append((arc.dst, num_frames))
    frame, pending = {0: 0}, [0]
    while pending:
        state = pending.pop()
        for dst, num_frames in out.get(state, ()):
            if dst not in frame:
                frame[dst] = frame[state] + num_frames
                pending.append(dst)
    return {state: number * frame_seconds for state, number in frame.items()}


@dataclass(frozen=True)
class RescoringScales:
    """The weights of a total score.

    Args:
        am_scale: weight of the other recognizer's acoustic scores, or of the scores of an n-best list.
        old_lm_scale: weight of its language model's scores.
        lm_scale: weight of the new language model's scores.
        word_insertion_penalty: added for each word.

    Raises:
        AsrError: a weight is not a finite number.
    """

    am_scale: float = 1.0
    old_lm_scale: float = 0.5
    lm_scale: float = 0.5
    word_insertion_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value):
                raise AsrError(f"{name} is {value}; give a finite number.")


class RescoredWord(NamedTuple):
    """A word and its times in seconds, None if unknown."""

    text: str
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Rescored:
    """A sentence with its scores in unscaled natural logs, and their weighted `total`.

    There may be several sentences in a row; `sentence_ends` are the numbers of words before the ends within them.
    """

    words: tuple[RescoredWord, ...]
    am_score: float
    old_lm_score: float
    lm_score: float
    total: float
    sentence_ends: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)


def word_ids(words: Sequence[str], vocabulary: Vocabulary) -> list[int]:
    """The ids of words as spelled or in an equivalent form, else in upper case, else in lower case, else of `<unk>`."""
    return [vocabulary.id_of(next(written_in_any_case(word, vocabulary), "<unk>")) for word in words]


class Candidate(NamedTuple):
    """A sentence of an n-best list.

    Args:
        words: the words as spelled in the list.
        am_score, lm_score: scores of the other recognizer, natural logs; 0 if unknown.
        times: begin and end of each word in seconds; empty if unknown.
        sentence_ends: the number of words before each end of a sentence within it, ascending; empty for one sentence.
    """

    words: tuple[str, ...]
    am_score: float = 0.0
    lm_score: float = 0.0
    times: tuple[tuple[float, float], ...] = ()
    sentence_ends: tuple[int, ...] = ()


def rescore_list(candidates: Sequence[Candidate], lm: LanguageModel, scales: RescoringScales) -> list[Rescored]:
    """Rescores an n-best list -> its sentences, best first; those with equal scores keep their order.

    Args:
        candidates: the list.
        lm: the new language model.
        scales: the weights.
    """
    if not candidates:
        return []
    sentences: list[list[int]] = []
    for one in candidates:
        ids = word_ids(one.words, lm.vocabulary)
        bounds = itertools.pairwise([0, *one.sentence_ends, len(ids)])
        sentences += [ids[begin:end] for begin, end in bounds]
    scores = iter(score_tree(PrefixTree(sentences, lm.start(1).device), lm).tolist())
    found = []
    for one in candidates:
        score = sum(itertools.islice(scores, len(one.sentence_ends) + 1))
        found.append(_rescored(one, (one.am_score, one.lm_score, score), scales))
    return sorted(found, key=lambda one: -one.total)


def _rescored(one: Candidate, scores: tuple[float, float, float], scales: RescoringScales) -> Rescored:
    times = one.times or [(None, None)] * len(one.words)
    words = tuple(RescoredWord(word, start, end) for word, (start, end) in zip(one.words, times, strict=True))
    return Rescored(words, *scores, _total(scores, len(words), scales), one.sentence_ends)


def _total(scores: tuple[float, float, float], num_words: int, scales: RescoringScales) -> float:
    weights = (scales.am_scale, scales.old_lm_scale, scales.lm_scale)
    # 0 * -inf, the score of what a language model rules out, would be nan.
    weighted = sum(weight * score for weight, score in zip(weights, scores, strict=True) if weight)
    return weighted + scales.word_insertion_penalty * num_words


class _Token(NamedTuple):
    """The best path to a state with one history: total, scores, last arc and the token before that arc."""

    total: float
    scores: tuple[float, float, float]
    arc: WordArc | None
    before: _Token | None


def rescore_lattice(
    lattice: WordLattice, lm: LanguageModel, scales: RescoringScales, max_contexts: int = 64
) -> Rescored | None:
    """Finds the best path of a lattice with the new language model's scores.

    If no state has more histories than `max_contexts`, the result is exact: the best of all paths.

    Args:
        lattice: the alternatives.
        lm: the new language model.
        scales: the weights.
        max_contexts: maximum number of histories that are followed from a state.

    Returns:
        The best sentence; None if no final state can be reached.

    Raises:
        AsrError: the lattice has a cycle.
    """
    levels = _levels(lattice)
    out = _arcs_by_source(lattice, levels)
    texts = sorted({arc.word for arc in lattice.arcs if arc.is_word})
    id_of = dict(zip(texts, word_ids(texts, lm.vocabulary), strict=True))
    device = lm.start(1).device
    first = int(lm.start(1)[0])
    held: dict[int, dict[int, _Token]] = defaultdict(dict)
    held[lattice.start][first] = _Token(0.0, (0.0, 0.0, 0.0), None, None)
    endings: list[tuple[int, _Token]] = []
    for states in levels:
        silent: list[tuple[_Token, int, WordArc]] = []
        spoken: list[tuple[_Token, int, WordArc]] = []
        ended: list[tuple[_Token, int, WordArc]] = []
        for state in states:
            tokens = sorted(held.pop(state, {}).items(), key=lambda item: -item[1].total)[:max_contexts]
            if state in lattice.final:
                am_score, lm_score = lattice.final[state]
                endings += [(context, _with(token, (am_score, lm_score, 0.0), scales)) for context, token in tokens]
            for context, token in tokens:
                for arc in out[state]:
                    kind = silent if not arc.word else ended if arc.word == SENTENCE_END else spoken
                    kind.append((token, context, arc))
        for token, context, arc in silent:
            _enter(held[arc.dst], context, _with(token, (arc.am_score, arc.lm_score, 0.0), scales, arc))
        if ended:
            context_idx = torch.tensor([context for _, context, _ in ended], dtype=torch.int64, device=device)
            for (token, _, arc), score in zip(ended, lm.final(context_idx).tolist(), strict=True):
                _enter(held[arc.dst], first, _with(token, (arc.am_score, arc.lm_score, score), scales, arc))
        if spoken:
            context_idx = torch.tensor([context for _, context, _ in spoken], dtype=torch.int64, device=device)
            word_id = torch.tensor([id_of[arc.word] for *_, arc in spoken], dtype=torch.int64, device=device)
            log_prob, next_idx = lm.score(context_idx, word_id)
            for (token, _, arc), score, context in zip(spoken, log_prob.tolist(), next_idx.tolist(), strict=True):
                _enter(held[arc.dst], context, _with(token, (arc.am_score, arc.lm_score, score), scales, arc))
    if not endings:
        return None
    ends = lm.final(torch.tensor([context for context, _ in endings], dtype=torch.int64, device=device)).tolist()
    finished = [_with(token, (0.0, 0.0, end), scales) for (_, token), end in zip(endings, ends, strict=True)]
    return _spelled(max(finished, key=lambda token: token.total), lattice)


def _with(
    token: _Token, added: tuple[float, float, float], scales: RescoringScales, arc: WordArc | None = None
) -> _Token:
    am_score, old_lm_score, lm_score = (have + more for have, more in zip(token.scores, added, strict=True))
    gain = _total(added, int(arc is not None and arc.is_word), scales)
    before = token if arc is not None else token.before
    return _Token(token.total + gain, (am_score, old_lm_score, lm_score), arc if arc is not None else token.arc, before)


def _enter(tokens: dict[int, _Token], context: int, token: _Token) -> None:
    if context not in tokens or token.total > tokens[context].total:
        tokens[context] = token


def _arcs_by_source(lattice: WordLattice, levels: Sequence[Sequence[int]]) -> dict[int, list[WordArc]]:
    """The arcs that leave each state, without the ends of sentences after which no word can follow: paths end there."""
    out: dict[int, list[WordArc]] = defaultdict(list)
    for arc in lattice.arcs:
        out[arc.src].append(arc)
    if all(arc.word != SENTENCE_END for arc in lattice.arcs):
        return out
    is_followed = [False] * lattice.num_states
    for state in itertools.chain.from_iterable(reversed(levels)):
        out[state] = [arc if arc.is_word or is_followed[arc.dst] else arc._replace(word="") for arc in out[state]]
        is_followed[state] = any(arc.is_word or is_followed[arc.dst] for arc in out[state])
    return out


def _levels(lattice: WordLattice) -> list[list[int]]:
    """Groups states by the length of the longest path to them, so that all arcs lead to later levels."""
    num_before = [0] * lattice.num_states
    out: dict[int, list[int]] = defaultdict(list)
    for arc in lattice.arcs:
        num_before[arc.dst] += 1
        out[arc.src].append(arc.dst)
    level = [state for state in range(lattice.num_states) if not num_before[state]]
    levels, num_seen = [], 0
    while level:
        levels.append(level)
        num_seen += len(level)
        following = []
        for state in level:
            for dst in out[state]:
                num_before[dst] -= 1
                if not num_before[dst]:
                    following.append(dst)
        level = following
    if num_seen < lattice.num_states:
        raise AsrError(f"{lattice.name}: the lattice has a cycle.")
    return levels


def _has_frames(lattice: WordLattice) -> bool:
    """Whether each arc reads at most one frame, so that a word lasts longer than its arc."""
    time = lattice.time
    spans = [time[arc.dst] - time[arc.src] for arc in lattice.arcs if arc.src in time and arc.dst in time]
    read = [span for span in spans if span > 0]
    is_short = bool(read) and max(read) <= _LONGEST_FRAME
    return is_short and max(read) < 1.5 * min(read) and any(not arc.word for arc in lattice.arcs)


def _spelled(token: _Token, lattice: WordLattice) -> Rescored:
    """The words of a path. A word has the times of its arc, or lasts until the next one if arcs are frames."""
    words: list[RescoredWord] = []
    ends: list[int] = []  # the numbers of words after them
    one: _Token | None = token
    has_frames = _has_frames(lattice)
    end = lattice.time.get(one.arc.dst) if one is not None and one.arc is not None else None
    while one is not None and one.arc is not None:
        if one.arc.is_word:
            start = lattice.time.get(one.arc.src)
            words.append(RescoredWord(one.arc.word, start, end if has_frames else lattice.time.get(one.arc.dst)))
            end = start
        elif one.arc.word:
            ends.append(len(words))
        one = one.before
    sentence_ends = tuple(len(words) - num_after for num_after in reversed(ends))
    return Rescored(tuple(words[::-1]), *token.scores, token.total, sentence_ends)
