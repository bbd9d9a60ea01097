"""Beam search for transducers, frame by frame, with a language model inside.

A hypothesis is a sequence of tokens (a prefix), and its score is the sum over all its paths in the beam. In a frame,
all hypotheses are extended by the blank, which leads to the next frame, and by tokens, which stay in the frame or, with
durations, lead to later ones: time-synchronous decoding (Saon, Tüske and Audhkhasi, Alignment-length synchronous
decoding for RNN transducer, ICASSP 2020). Hypotheses that arrive at a frame with equal tokens are merged there. All
utterances advance together: each step runs the joint network once, the prediction network once for all new prefixes,
and asks the language model once.

Shapes: N utterances, T frames, E encoder dimensions, M hypotheses of all utterances, C tokens, D durations, Q
extensions, R rows of the prediction network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.fusion.beam import CANDIDATES, Fusion, Growing, on_host
from asr.fusion.interface import LEAST_LOG_WEIGHT, Finished, FloatArray, FusionConfig, IntArray, Pruned
from asr.models.external.base import named
from asr.models.transducers import Transducer

_FRAMES_BETWEEN_MARKS = 16
# As many rows of the prediction network may be held for each hypothesis.
_ROWS_KEPT = 4
_PREFIX_TYPES = {
    **dict.fromkeys(("parent", "entry", "utt", "frame", "row", "place", "context"), np.int64),
    **dict.fromkeys(("peak", "lm_score", "bonus", "guess"), np.float64),
}


@dataclass(frozen=True)
class TransducerDecodingConfig(FusionConfig):
    """Scales and beams, and as for `asr.fusion.interface.FusionConfig`; the internal scores are without the blank.

    Args:
        max_symbols_per_frame: the most tokens in one frame. Durations of 0 count as the same frame.

    Raises:
        AsrError: a value is out of range.
    """

    max_symbols_per_frame: int = 5

    WHOLE_NUMBERS = ("beam_size", "max_symbols_per_frame")


class Prefixes:
    """The prefixes of all utterances, as a tree; the first N are the empty ones. Arrays have room for more of them.

    Attributes:
        num: the number of prefixes.
        parent, entry: what a prefix extends, and by which token.
        utt: the utterance.
        frame, peak: the frame of the token in the best path, and the score of that.
        row: the row of the prediction network's output after the prefix, -1 if it is not held.
        place: as for `Extension`.
        context: the language model's.
        lm_score: the language model's score of all finished words, unscaled.
        bonus: all that is added to the acoustic score for good.
        guess: what is added until the unfinished word is finished.
    """

    parent: IntArray
    entry: IntArray
    utt: IntArray
    frame: IntArray
    row: IntArray
    place: IntArray
    context: IntArray
    peak: FloatArray
    lm_score: FloatArray
    bonus: FloatArray
    guess: FloatArray

    def __init__(self, context: IntArray) -> None:
        self.num = num = len(context)
        for name, dtype in _PREFIX_TYPES.items():
            setattr(self, name, np.zeros(max(1024, 2 * num), dtype=dtype))
        self.utt[:num], self.context[:num], self.parent[:num] = np.arange(num), context, -1
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, entry: int) -> int:
        """The prefix with one more token; a new one has nothing but its place in the tree."""
        known = self._children.get((parent, entry))
        if known is not None:
            return known
        if self.num == len(self.parent):
            for name in _PREFIX_TYPES:
                values = getattr(self, name)
                setattr(self, name, np.concatenate([values, np.zeros_like(values)]))
        new = self._children[parent, entry] = self.num
        self.parent[new], self.entry[new], self.utt[new] = parent, entry, self.utt[parent]
        self.row[new], self.peak[new] = -1, -np.inf
        self.num += 1
        return new

    def compact(self, live: IntArray) -> IntArray:
        """Removes all prefixes that none of some live ones extends -> the new number of each."""
        is_kept = self.parent[: self.num] < 0
        newest = np.unique(live)
        while len(newest):
            is_kept[newest] = True
            newest = np.unique(self.parent[newest])
            newest = newest[newest >= 0]
            newest = newest[~is_kept[newest]]
        kept, number = np.flatnonzero(is_kept), np.cumsum(is_kept) - 1
        for name in _PREFIX_TYPES:
            values = getattr(self, name)
            values[: len(kept)] = values[kept]
        self.num = len(kept)
        parent = self.parent[: self.num]
        parent[parent >= 0] = number[parent[parent >= 0]]
        pairs = zip(parent.tolist(), self.entry[: self.num].tolist(), strict=True)
        self._children = {pair: prefix for prefix, pair in enumerate(pairs) if pair[0] >= 0}
        return number

    def path(self, prefix: int) -> IntArray:
        """The prefixes that end with each token of a prefix, itself the last one."""
        found = []
        while self.parent[prefix] >= 0:
            found.append(prefix)
            prefix = int(self.parent[prefix])
        return np.array(found[::-1], dtype=np.int64)

    def frames(self, path: IntArray) -> IntArray:
        """The frame of each token of a path."""
        # A token may be more probable later, after paths that the following ones have left before.
        frame: IntArray = np.minimum.accumulate(self.frame[path][::-1])[::-1]
        return frame


class _Step(NamedTuple):
    """Hypotheses (M,) that took part in a step of the search.

    Attributes:
        frame: its frame.
        prefix, next_entry, total: the prefix of each, a token that it has besides or -1, and its total.
        is_lost: whether it left the beam.
    """

    frame: IntArray
    prefix: IntArray
    next_entry: IntArray
    total: FloatArray
    is_lost: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls, frame: int, prefix: IntArray, next_entry: IntArray | None, total: FloatArray, kept: IntArray | None
    ) -> _Step:
        """Makes a step; None stands for no further tokens, or none that are kept."""
        is_lost = np.ones(len(prefix), dtype=bool)
        is_lost[[] if kept is None else kept] = False
        next_entry = np.full(len(prefix), -1) if next_entry is None else next_entry
        return cls(np.full(len(prefix), frame), prefix, next_entry, total, is_lost)


class TransducerBeam:
    """The search of some utterances, which begin together.

    Args:
        network: the transducer.
        fusion: scores and selects hypotheses.
        config: scales and beams.
        num_utts: N.
        compact_at: number of prefixes from which those that are needed no more are removed.
        keeps_pruned: whether to remember the hypotheses that leave the beam, and all prefixes.

    Attributes:
        num_frames: the number of frames read so far.
    """

    def __init__(
        self,
        network: Transducer,
        fusion: Fusion,
        config: TransducerDecodingConfig,
        num_utts: int,
        compact_at: int = 1 << 16,
        keeps_pruned: bool = False,
    ) -> None:
        self._network, self._fusion, self._config = network, fusion, config
        self._internal_scale = config.internal_lm_scale or 0.0
        self.prefixes = Prefixes(self._fusion.start(num_utts))
        self.prefixes.row[:num_utts] = np.arange(num_utts)
        # The prediction network's rows: outputs, states, internal scores, and the prefix of each.
        output, state = _predicted(network.start(), 1, network.name, "start")
        self._output = output.repeat(num_utts, 1)
        self._state = tuple(each.repeat(num_utts, *[1] * (each.dim() - 1)) for each in state)
        self._internal: Tensor | None = None
        self._prefix_of_row = np.arange(num_utts)
        columns = np.array(network.tokens.columns, dtype=np.int64)
        self._entry_of = np.argsort(columns)
        self._column_of = columns
        self._duration = np.array(network.durations, dtype=np.int64)
        # What leaves for each later frame: prefixes and scores.
        self._leaving: dict[int, list[tuple[IntArray, FloatArray]]] = {0: [(np.arange(num_utts), np.zeros(num_utts))]}
        self._ended: list[tuple[IntArray, FloatArray]] = []
        self._steps: list[_Step] | None = [] if keeps_pruned else None
        self._first_compact_at = self._compact_at = compact_at
        self.num_frames = 0

    def advance(self, encoded: Tensor, num_frames: IntArray) -> None:
        """Reads the next frames, encoded (N, T, E) and their numbers (N,).

        An utterance with fewer frames than others ends with them.
        """
        begin, longest = self.num_frames, int(num_frames.max(initial=0))
        self._silence = encoded.new_zeros(1, encoded.shape[2])
        if self._internal_scale > 0.0 and self._internal is None:
            self._internal = self._internal_scores(self._output)
        for frame in range(begin, begin + longest):
            prefix, score = _merged(self._leaving.pop(frame, []))
            has_ended = num_frames[self.prefixes.utt[prefix]] <= frame - begin
            if has_ended.any():
                self._ended.append((prefix[has_ended], score[has_ended]))
                prefix, score = prefix[~has_ended], score[~has_ended]
            total = score + self.prefixes.bonus[prefix] + self.prefixes.guess[prefix]
            kept = self._fusion.best(self.prefixes.utt[prefix], total, int(self._config.beam_size))
            if self._steps is not None:
                self._steps.append(_Step.of(frame, prefix, None, total, kept))
            if len(kept):
                self._read(frame, encoded[:, frame - begin], prefix[kept], score[kept])
            self._forget(frame)
        self.num_frames = begin + longest

    def finished(self) -> list[list[Finished]]:
        """The hypotheses of each utterance, all of whose frames have been read, best first."""
        prefixes = self.prefixes
        prefix, score = _merged([*self._ended, *self._waiting()])
        lm_score, gain = self._fusion.finish(prefixes.place[prefix], prefixes.context[prefix])
        total = score + prefixes.bonus[prefix] + gain
        lm_score = prefixes.lm_score[prefix] + lm_score
        found: list[list[Finished]] = [[] for _ in range(int((prefixes.parent[: prefixes.num] < 0).sum()))]
        pruned = self._pruned(len(found))
        for place in np.argsort(-total, kind="stable").tolist():
            if total[place] > -np.inf:
                path = prefixes.path(int(prefix[place]))
                scores = float(score[place]), float(lm_score[place]), float(total[place])
                utt = prefixes.utt[prefix[place]]
                of_path = None if pruned is None else functools.partial(pruned[utt], path)
                found[utt].append(self._finished(path, *scores, of_path))
        return found

    def _pruned(self, num_utts: int) -> list[Callable[[IntArray], Pruned]] | None:
        """For each utterance, what finds the hypotheses that left the beam, by a finished one's path."""
        if not self._steps:
            return None
        everything = _Step(*map(np.concatenate, zip(*self._steps, strict=True)))
        tree = self.prefixes.parent[: self.prefixes.num].tolist(), self.prefixes.entry[: self.prefixes.num].tolist()
        utt = self.prefixes.utt[everything.prefix]
        steps = (_Step(*(each[utt == number] for each in everything)) for number in range(num_utts))
        return [functools.partial(_pruned, *tree, number, step) for number, step in enumerate(steps)]

    def best(self) -> Finished | None:
        """The best hypothesis of one utterance so far, whose last word may be unfinished; None if none survived."""
        prefixes = self.prefixes
        prefix, score = _merged(self._waiting())
        total = score + prefixes.bonus[prefix] + prefixes.guess[prefix]
        if total.max(initial=-np.inf) == -np.inf:
            return None
        place = int(total.argmax())
        path = prefixes.path(int(prefix[place]))
        scores = float(score[place]), float(prefixes.lm_score[prefix[place]]), float(total[place])
        return self._finished(path, *scores)

    def settled(self) -> IntArray:
        """The tokens that all hypotheses of one utterance begin with, as entries: they can no longer change."""
        prefixes = self.prefixes
        left = {int(each) for waiting, _ in self._waiting() for each in waiting}
        while len(left) > 1:  # what a prefix extends has a lower number
            last = max(left)
            left.remove(last)
            left.add(int(prefixes.parent[last]))
        return prefixes.entry[prefixes.path(left.pop())] if left else np.zeros(0, dtype=np.int64)

    def _finished(
        self,
        path: IntArray,
        am_score: float,
        lm_score: float,
        total: float,
        pruned: Callable[[], Pruned] | None = None,
    ) -> Finished:
        frame = self.prefixes.frames(path)
        return Finished(self.prefixes.entry[path], frame, frame + 1, am_score, lm_score, total, pruned)

    def _waiting(self) -> list[tuple[IntArray, FloatArray]]:
        """The hypotheses that have left for frames that were not read yet, and their scores."""
        return [each for leaving in self._leaving.values() for each in leaving]

    def _read(self, frame: int, encoded: Tensor, prefix: IntArray, score: FloatArray) -> None:
        """Reads one frame (N, E) with the hypotheses (M,) that have arrived there."""
        network, prefixes = self._network, self.prefixes
        num_tokens, blank = len(network.tokens), network.tokens.blank_id
        num_columns = min(CANDIDATES * int(self._config.beam_size), num_tokens - 1)
        # Of each utterance, the totals of what leaves the frame.
        left = list[tuple[IntArray, FloatArray]]()
        for step in range(int(self._config.max_symbols_per_frame) + 1):
            row, utt = (torch.from_numpy(each[prefix]).to(network.device) for each in (prefixes.row, prefixes.utt))
            logits = self._joined(encoded[utt], self._output[row])
            log_prob = logits[:, :num_tokens].log_softmax(1)
            duration = on_host(logits[:, num_tokens:].log_softmax(1))
            stay = score + on_host(log_prob[:, blank])
            if np.isnan(stay).any() or np.isnan(duration).any():
                raise AsrError(f"{network.name}: the joint network returned NaN in frame {frame}; check its weights.")
            self._leave(frame, prefix, stay, duration)
            left.append((prefixes.utt[prefix], stay + prefixes.bonus[prefix] + prefixes.guess[prefix]))
            if step == self._config.max_symbols_per_frame:
                return
            log_prob[:, blank] = -torch.inf
            value, column = (on_host(each) for each in log_prob.topk(num_columns, 1))
            source, prefix, score = self._extended(frame, prefix, score, value, column.astype(np.int64), left)
            if not len(prefix):
                return
            if len(self._duration):
                duration = duration[source]
                self._leave(frame, prefix, score, duration)
                stays = np.flatnonzero(self._duration == 0)
                if not len(stays):
                    return
                score = score + duration[:, stays[0]]

    def _leave(self, frame: int, prefix: IntArray, score: FloatArray, duration: FloatArray) -> None:
        """Sends hypotheses (M,) to later frames, by the scores of their durations (M, D) if there are any."""
        if not len(self._duration):
            self._leaving.setdefault(frame + 1, []).append((prefix, score))
            return
        for place, num_frames in enumerate(self._duration.tolist()):
            if num_frames > 0:
                self._leaving.setdefault(frame + num_frames, []).append((prefix, score + duration[:, place]))

    def _extended(
        self,
        frame: int,
        prefix: IntArray,
        score: FloatArray,
        value: FloatArray,
        column: IntArray,
        left: Sequence[tuple[IntArray, FloatArray]],
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """Extends hypotheses (M,) by tokens, given the scores (M, Q') and columns (M, Q') of the best ones.

        Returns:
            The surviving extensions: the hypothesis that each comes from, its prefix, and its score.
        """
        prefixes = self.prefixes
        source, rank = np.nonzero(value >= self._config.token_min_log_prob)
        column, added = column[source, rank], score[source] + value[source, rank]
        base, entry = prefix[source], self._entry_of[column]
        gain = None
        if self._internal is not None:
            row = torch.from_numpy(prefixes.row[base]).to(self._internal.device)
            internal = self._internal[row, torch.from_numpy(column).to(self._internal.device)]
            gain = -self._internal_scale * on_host(internal)
        growing = Growing(prefixes.utt[base], prefixes.place[base], prefixes.context[base], prefixes.bonus[base])
        extended = self._fusion.extend(growing, entry, added, gain, left)
        kept = extended.kept
        if self._steps is not None:
            lost = extended.lost
            self._steps.append(_Step.of(frame, base[lost], entry[lost], extended.lost_total, None))
        child = np.array([*map(prefixes.child, base[kept].tolist(), entry[kept].tolist())], dtype=np.int64)
        prefixes.place[child], prefixes.context[child] = extended.place, extended.context
        prefixes.lm_score[child] = prefixes.lm_score[base[kept]] + extended.lm_score
        prefixes.bonus[child], prefixes.guess[child] = extended.bonus, extended.guess
        added = added[kept]
        is_best = added > prefixes.peak[child]
        prefixes.peak[child[is_best]], prefixes.frame[child[is_best]] = added[is_best], frame
        self._predict(child[prefixes.row[child] < 0])
        return source[kept], child, added

    def _predict(self, prefix: IntArray) -> None:
        """Runs the prediction network for prefixes whose parents have rows."""
        if not len(prefix):
            return
        prefixes, device = self.prefixes, self._network.device
        row = torch.from_numpy(prefixes.row[prefixes.parent[prefix]]).to(device)
        token = torch.from_numpy(self._column_of[prefixes.entry[prefix]]).to(device)
        returned = self._network.predict(token, tuple(each[row] for each in self._state))
        output, state = _predicted(returned, len(prefix), self._network.name, "predict")
        prefixes.row[prefix] = len(self._output) + np.arange(len(prefix))
        self._prefix_of_row = np.concatenate([self._prefix_of_row, prefix])
        self._output = torch.cat([self._output, output])
        self._state = tuple(torch.cat(pair) for pair in zip(self._state, state, strict=True))
        if self._internal is not None:
            self._internal = torch.cat([self._internal, self._internal_scores(output)])

    def _joined(self, encoded: Tensor, output: Tensor) -> Tensor:
        """Logits (M, C + D) for frames (M, E) and outputs (M, P).

        Raises:
            AsrError: the joint network cannot read them, or returns another shape.
        """
        network = self._network
        what = f"{network.name}: the joint network cannot read frames of {encoded.shape[1]} dimensions"
        with named(what, "give the output of this network's encoder"):
            logits = network.join(encoded, output).float()
        if logits.shape != (len(output), len(network.tokens) + len(self._duration)):
            raise AsrError(
                f"{network.name}: the joint network returned {tuple(logits.shape)} for {len(output)} hypotheses, "
                f"{len(network.tokens)} tokens and {len(self._duration)} durations; give the tokens of this network."
            )
        return logits

    def _internal_scores(self, output: Tensor) -> Tensor:
        """The scores (R, C) of tokens after some outputs (R, P), without audio and without the blank."""
        tokens = self._network.tokens
        logits = self._joined(self._silence.expand(len(output), -1), output)[:, : len(tokens)]
        logits[:, tokens.blank_id] = -torch.inf
        return logits.log_softmax(1)

    def _forget(self, frame: int) -> None:
        """Forgets the rows and, from time to time, the language model's contexts that no hypothesis needs."""
        prefixes = self.prefixes
        nothing = np.zeros(0, dtype=np.int64)
        waiting = np.concatenate([nothing, *(prefix for prefix, _ in self._waiting())])
        if len(self._output) > _ROWS_KEPT * (len(waiting) + 1):
            kept = np.flatnonzero(np.isin(self._prefix_of_row, waiting))
            prefixes.row[self._prefix_of_row] = -1
            self._prefix_of_row = self._prefix_of_row[kept]
            prefixes.row[self._prefix_of_row] = np.arange(len(kept))
            row = torch.from_numpy(kept).to(self._output.device)
            self._output, self._state = self._output[row], tuple(each[row] for each in self._state)
            self._internal = None if self._internal is None else self._internal[row]
        held = np.concatenate([waiting, *(prefix for prefix, _ in self._ended)])
        if frame % _FRAMES_BETWEEN_MARKS == 0:
            self._fusion.retain(prefixes.context[held])
        if prefixes.num > self._compact_at and self._steps is None:
            number = prefixes.compact(np.concatenate([held, self._prefix_of_row]))
            self._prefix_of_row = number[self._prefix_of_row]
            self._ended = [(number[prefix], score) for prefix, score in self._ended]
            self._leaving = {
                to: [(number[prefix], score) for prefix, score in leaving] for to, leaving in self._leaving.items()
            }
            self._compact_at = max(self._first_compact_at, 2 * prefixes.num)


def _pruned(parent: list[int], entry: list[int], root: int, step: _Step, path: IntArray) -> Pruned:
    """The hypotheses that left the beam while one with a path from the root was in it."""
    mass = np.full(int(step.frame.max(initial=0)) + 1, -np.inf)
    is_own = np.isin(step.prefix, [root, *path]) & (step.next_entry < 0)
    np.logaddexp.at(mass, step.frame[is_own], step.total[is_own])
    # With durations, it may pass over frames.
    mass = mass[np.maximum.accumulate(np.where(mass > -np.inf, np.arange(len(mass)), 0))]
    log_weight = step.total - mass[step.frame]
    kept = step.is_lost & (log_weight >= LEAST_LOG_WEIGHT)
    return Pruned(parent, entry, *(each[kept].tolist() for each in (step.prefix, step.next_entry, log_weight)))


def _merged(parts: Sequence[tuple[IntArray, FloatArray]]) -> tuple[IntArray, FloatArray]:
    """Prefixes, each once, and the logs of the sums of their scores."""
    if not parts:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    prefix, place = np.unique(np.concatenate([each for each, _ in parts]), return_inverse=True)
    score = np.concatenate([each for _, each in parts])
    highest = np.full(len(prefix), -np.inf)
    np.maximum.at(highest, place, score)
    safe = np.where(highest == -np.inf, 0.0, highest)
    with np.errstate(divide="ignore"):
        return prefix, safe + np.log(np.bincount(place, np.exp(score - safe[place]), len(prefix)))


def _predicted(returned: Any, num_rows: int, name: str, method: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What `start` or `predict` of the network of that name returned, checked: outputs, and states of as many rows.

    A state that is a tensor, not a tuple, would be taken apart.
    """
    output: Any
    state: Any
    output, state = returned if isinstance(returned, (tuple, list)) and len(returned) == 2 else (None, None)
    are_states = isinstance(state, (tuple, list)) and all(
        isinstance(each, Tensor) and each.dim() > 0 and len(each) == num_rows for each in state
    )
    if not isinstance(output, Tensor) or output.dim() > 2 or not are_states:
        raise AsrError(
            f"{name}: {method} must return the prediction network's output ({num_rows}, P), and its state, a tuple of "
            f"tensors ({num_rows}, ...); it returned something else."
        )
    return output, tuple(state)
