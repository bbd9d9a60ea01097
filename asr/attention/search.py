"""Beam search for attention-based encoder-decoders, token by token, with a language model inside.

In each step, every hypothesis ends or is extended by a token, and the best extensions of each utterance stay
(Sutskever, Vinyals and Le, Sequence to sequence learning with neural networks, NIPS 2014). All utterances advance
together: each step runs the decoder once and asks the language model once. An utterance keeps the same number of rows
of the decoder while it lasts, so that what its rows have read of the encoder stays where it is.

Shapes: N utterances, T frames, E encoder dimensions, M rows of hypotheses, C tokens, Q extensions.
"""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asr.errors import AsrError
from asr.fusion.beam import CANDIDATES, Fusion, Growing, on_host
from asr.fusion.interface import LEAST_LOG_WEIGHT, Finished, FloatArray, FusionConfig, IntArray, Pruned, Total
from asr.models.attention import AttentionModel
from asr.models.external.base import named

BoolArray = npt.NDArray[np.bool_]
_STEPS_BETWEEN_MARKS = 16
# Natural log for each token, the end included. Texts below it are dropped if the network finds that nobody speaks.
_INVENTED = -1.0
# Tokens that the shortest text may have, whatever its length in seconds.
_FEWEST_TOKENS = 10


@dataclass(frozen=True)
class AttentionDecodingConfig(FusionConfig):
    """Scales and beams, and as for `asr.fusion.interface.FusionConfig`; internal scores include the end of the text.

    Args:
        length_penalty: finished texts are compared by their scores divided by this power of the number of their tokens,
            the end included (Wu et al., Google's neural machine translation system, 2016, without its constant 5). 0
            compares the scores themselves, with which short texts win.
        no_speech_threshold: a text is dropped as invented for silence if the network finds it more probable than this
            that nobody speaks, and the text itself improbable (below -1 for each token), as in Whisper (Radford et al.,
            Robust speech recognition via large-scale weak supervision, ICML 2023). Only networks with a token for
            silence tell. 1 drops none.
        max_tokens_per_second: the most tokens of a text, for each second of its audio; it ends texts that repeat
            themselves.

    Raises:
        AsrError: a value is out of range.
    """

    length_penalty: float = 1.0
    no_speech_threshold: float = 0.6
    max_tokens_per_second: float = 25.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.length_penalty < math.inf:
            raise AsrError(f"decoding: length_penalty is {self.length_penalty}; it must be 0 or more.")
        if not 0.0 <= self.no_speech_threshold <= 1.0:
            raise AsrError(f"decoding: no_speech_threshold is {self.no_speech_threshold}; it must be from 0 to 1.")
        if not self.max_tokens_per_second > 0.0:
            raise AsrError(f"decoding: max_tokens_per_second is {self.max_tokens_per_second}; it must be above 0.")

    def rank(self, total: Total, num_tokens: int) -> Total:
        return total / (num_tokens + 1) ** float(self.length_penalty)


class _Rows(NamedTuple):
    """Hypotheses, B of each utterance; those with a score of -inf stand for none.

    Attributes:
        utt: (M,) the utterance.
        node: (M,) the last token, a node of `_Tree`.
        am_score: (M,) of the network.
        lm_score: (M,) of the language model, unscaled.
        place, context, bonus: as for `asr.fusion.beam.Growing`.
        guess: as for `asr.fusion.scores.Extension`.
    """

    utt: IntArray
    node: IntArray
    am_score: FloatArray
    lm_score: FloatArray
    place: IntArray
    context: IntArray
    bonus: FloatArray
    guess: FloatArray

    @classmethod
    def empty(cls, utt: IntArray, context: IntArray) -> _Rows:
        """Rows without hypotheses."""
        nothing, zeros = np.zeros(len(utt), dtype=np.int64), np.zeros(len(utt))
        return cls(utt, nothing, zeros - np.inf, zeros, nothing.copy(), context, zeros.copy(), zeros.copy())


class _Ended(NamedTuple):
    """A text that has ended: what it is compared by, its last node in the tree, and its scores."""

    rank: float
    node: int
    am_score: float
    lm_score: float
    total: float


class _Left(NamedTuple):
    """Hypotheses that left the beam in a step: utterance, node, next token and total of each."""

    utt: IntArray
    node: IntArray
    entry: IntArray
    total: FloatArray


class _Tree:
    """The tokens of all hypotheses, and their totals; node 0 is before the first token."""

    def __init__(self) -> None:
        self._parent, self._entry = [np.full(1, -1)], [np.zeros(1, dtype=np.int64)]
        self._total = [np.zeros(1)]
        self._left: list[_Left] = []
        self._num = 1

    def add(self, parent: IntArray, entry: IntArray, total: FloatArray, left: _Left) -> IntArray:
        """Adds a token after each of some nodes -> their nodes; others have left the beam in this step."""
        self._parent.append(parent)
        self._entry.append(entry)
        self._total.append(total)
        self._left.append(left)
        added = self._num + np.arange(len(parent))
        self._num += len(parent)
        return added

    def finished(self, ended: list[list[_Ended]], num: int) -> list[list[Finished]]:
        """The best texts of each utterance, whose tokens have no frames yet."""
        entry, total = np.concatenate(self._entry), np.concatenate(self._total)
        parents, entries = np.concatenate(self._parent).tolist(), entry.tolist()
        left = _Left(*map(np.concatenate, zip(*self._left, strict=True)))
        step = np.repeat(np.arange(len(self._left)), [len(each.utt) for each in self._left])
        found: list[list[Finished]] = [[] for _ in ended]
        for utt, own in enumerate(ended):
            is_own = left.utt == utt
            departures = step[is_own], _Left(*(each[is_own] for each in left))
            for each in heapq.nlargest(num, own):
                path, node = [], each.node
                while node:
                    path.append(node)
                    node = parents[node]
                text = entry[path[::-1]]
                pruned = functools.partial(_pruned, parents, entries, total[path[::-1]], *departures)
                scores = each.am_score, each.lm_score, each.total
                found[utt].append(Finished(text, np.zeros_like(text), np.zeros_like(text), *scores, pruned))
        return found


def _pruned(parent: list[int], entry: list[int], total: FloatArray, step: IntArray, left: _Left) -> Pruned:
    """The hypotheses that left the beam while a text was in it, which had some totals (U,) after its tokens."""
    log_weight = np.full(len(step), -np.inf)
    is_beside = step < len(total)
    log_weight[is_beside] = left.total[is_beside] - total[step[is_beside]]
    kept = log_weight >= LEAST_LOG_WEIGHT
    return Pruned(parent, entry, *(each[kept].tolist() for each in (left.node, left.entry, log_weight)))


class AttentionBeam:
    """The search of some utterances.

    Args:
        network: the attention model.
        fusion: scores and selects hypotheses.
        config: scales and beams.
        num_utts: N.
    """

    def __init__(self, network: AttentionModel, fusion: Fusion, config: AttentionDecodingConfig, num_utts: int) -> None:
        self._network, self._fusion, self._config = network, fusion, config
        self._entry_of = np.argsort(np.array(network.tokens.columns, dtype=np.int64))
        self._end = network.tokens.blank_id
        self._rows = _Rows.empty(np.arange(num_utts), fusion.start(num_utts))
        self._rows.am_score[:] = 0.0
        self._tree = _Tree()
        self._ended: list[list[_Ended]] = [[] for _ in range(num_utts)]

    def search(self, encoded: Tensor, num_frames: IntArray) -> list[list[Finished]]:
        """The hypotheses of each utterance, encoded (N, T, E) and (N,), best first."""
        if not len(encoded):
            return []
        network, device = self._network, self._network.device
        is_empty = num_frames == 0
        if is_empty.any():  # attention to no frame is not defined
            encoded = torch.nn.functional.pad(encoded, (0, 0, 0, max(0, 1 - encoded.shape[1]))).clone()
            encoded[torch.from_numpy(is_empty)] = 0.0
        frames = torch.from_numpy(num_frames).clamp(min=1)
        limit = np.where(is_empty, 0, self._limits(frames.numpy()))
        what = f"{network.name}: the decoder cannot read frames of {encoded.shape[2]} dimensions"
        with named(what, "give the output of this network's encoder"):
            prompt = network.prompt(encoded, frames)
            logits, state = network.start(encoded, frames, prompt)
        no_speech = network.no_speech(state)
        silent_logits, silent_state = None, None
        if self._config.internal_lm_scale:
            # The internal language model is the decoder with an encoder output of zeros.
            silence = encoded.new_zeros(len(encoded), 1, encoded.shape[2])
            silent_logits, silent_state = network.start(silence, torch.ones_like(frames), prompt)
        for num_tokens in range(int(limit.max(initial=0)) + 1):
            log_prob = self._log_prob(logits, num_tokens)
            is_live = self._is_live(num_tokens)
            self._rows.am_score[~is_live[self._rows.utt]] = -np.inf
            is_live &= num_tokens < limit
            source, token = self._extend(num_tokens, is_live, log_prob, self._internal_gain(silent_logits))
            if not self._is_live(num_tokens + 1).any():
                break
            source, token = source.to(device), token.to(device)
            logits, state = network.step(token, source, state)
            if silent_logits is not None:
                silent_logits, silent_state = network.step(token, source, silent_state)
            if num_tokens % _STEPS_BETWEEN_MARKS == 0:
                self._fusion.retain(self._rows.context)
        found = self._tree.finished(self._ended, int(self._config.beam_size))
        if no_speech is None:
            return found
        return [self._without_invented(own, each) for own, each in zip(found, no_speech.tolist(), strict=True)]

    def _without_invented(self, found: list[Finished], no_speech: float) -> list[Finished]:
        """The texts of an utterance, or an empty one if nobody speaks and the best one is improbable."""
        is_likely = bool(found) and found[0].am_score >= _INVENTED * (len(found[0].entries) + 1)
        if no_speech <= self._config.no_speech_threshold or is_likely:
            return found
        nothing, score = np.zeros(0, dtype=np.int64), math.log(no_speech)
        return [Finished(nothing, nothing, nothing, score, 0.0, score)]

    def _limits(self, num_frames: IntArray) -> IntArray:
        """The most tokens of each utterance, (N,)."""
        seconds = num_frames * self._network.frame_shift
        most = np.ceil(np.minimum(seconds * self._config.max_tokens_per_second, float(self._network.max_tokens)))
        return np.minimum(np.maximum(most, _FEWEST_TOKENS), self._network.max_tokens).astype(np.int64)

    def _log_prob(self, logits: Tensor, num_tokens: int) -> Tensor:
        """Log-probabilities of the next token after so many, (M, C)."""
        name, num_columns = self._network.name, len(self._network.tokens)
        if logits.dim() != 2 or logits.shape[1] != num_columns:
            raise AsrError(
                f"{name}: the decoder returned {tuple(logits.shape)} for {num_columns} tokens; give the network's own."
            )
        log_prob = logits.float().log_softmax(1)
        if bool(log_prob[:, self._end].isnan().any()):
            raise AsrError(f"{name}: the decoder returned NaN after {num_tokens} tokens; check its weights.")
        return log_prob

    def _internal_gain(self, logits: Tensor | None) -> Tensor | None:
        """What the internal language model adds to the scores of tokens, (M, C)."""
        if logits is None:
            return None
        log_prob = logits.float().log_softmax(1)
        return -float(self._config.internal_lm_scale or 0.0) * log_prob.masked_fill(log_prob == -torch.inf, 0.0)

    def _is_live(self, num_tokens: int) -> BoolArray:
        """The utterances in which fewer texts have ended than survive a step, or others are better now, (N,)."""
        rows, size = self._rows, int(self._config.beam_size)
        best = np.full(len(self._ended), -np.inf)
        np.maximum.at(best, rows.utt, self._config.rank(rows.am_score + rows.bonus + rows.guess, num_tokens))
        worst = [heapq.nlargest(size, each)[-1].rank if len(each) >= size else -math.inf for each in self._ended]
        return best > np.array(worst)

    def _extend(
        self, num_tokens: int, is_live: BoolArray, log_prob: Tensor, internal: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Extends the rows by a token, and ends those that are among the best with the end of the text.

        Returns:
            For each new row, the row that it comes from (M,) and the token's column (M,).
        """
        rows, size = self._rows, int(self._config.beam_size)
        end_score = on_host(log_prob[:, self._end])
        log_prob[:, self._end] = -torch.inf
        value, column = (on_host(each) for each in log_prob.topk(min(CANDIDATES * size, log_prob.shape[1] - 1), 1))
        may_grow = is_live[rows.utt] & (rows.am_score > -np.inf)
        source, rank = np.nonzero((value >= self._config.token_min_log_prob) & may_grow[:, None])
        chosen = column[source, rank].astype(np.int64)
        am_score = rows.am_score[source] + value[source, rank]
        gain = None
        if internal is not None:
            gain = on_host(internal[torch.from_numpy(source), torch.from_numpy(chosen)])
        growing = Growing(rows.utt[source], rows.place[source], rows.context[source], rows.bonus[source])
        extended = self._fusion.extend(growing, self._entry_of[chosen], am_score, gain)
        lost = source[extended.lost]
        left = _Left(rows.utt[lost], rows.node[lost], self._entry_of[chosen[extended.lost]], extended.lost_total)
        source, chosen, am_score = source[extended.kept], chosen[extended.kept], am_score[extended.kept]
        going_on = rows.utt[source], am_score + extended.bonus + extended.guess
        self._end_texts(num_tokens, end_score, 0.0 if internal is None else on_host(internal[:, self._end]), going_on)
        node = self._tree.add(rows.node[source], self._entry_of[chosen], going_on[1], left)
        lm_score = rows.lm_score[source] + extended.lm_score
        new = _Rows(
            rows.utt[source], node, am_score, lm_score, extended.place, extended.context, extended.bonus, extended.guess
        )
        self._rows, parent, place = self._laid_out(new, is_live, source)
        token = np.full(len(parent), self._end)
        token[place] = chosen
        return torch.from_numpy(parent), torch.from_numpy(token)

    def _end_texts(
        self,
        num_tokens: int,
        end_score: FloatArray,
        internal_gain: FloatArray | float,
        going_on: tuple[IntArray, FloatArray],
    ) -> None:
        """Ends the rows that are still among the best of their utterances then; those that go on count, too."""
        rows = self._rows
        am_score = rows.am_score + end_score
        lm_score, gain = self._fusion.finish(rows.place, rows.context)
        total = am_score + rows.bonus + gain + internal_gain
        lm_score = rows.lm_score + lm_score
        for row in self._fusion.best(rows.utt, total, int(self._config.beam_size), [going_on]).tolist():
            rank = float(self._config.rank(total[row], num_tokens))
            scores = float(am_score[row]), float(lm_score[row]), float(total[row])
            self._ended[rows.utt[row]].append(_Ended(rank, int(rows.node[row]), *scores))

    def _laid_out(self, rows: _Rows, is_live: BoolArray, source: IntArray) -> tuple[_Rows, IntArray, IntArray]:
        """Gives all utterances the same number of rows; those that are not needed repeat the first one.

        Args:
            rows: the hypotheses.
            is_live: which utterances go on, (N,).
            source: the present row that each of them comes from.

        Returns:
            The rows, the present row that each of these comes from, and the place of each hypothesis among them.
        """
        utts = np.unique(self._rows.utt)
        live = utts[is_live[utts]]
        # Keys and values of the encoder's output are copied when utterances leave.
        utts = live if 2 * len(live) <= len(utts) else utts
        place = np.arange(len(rows.utt)) - np.searchsorted(rows.utt, rows.utt)
        width = max(int(np.bincount(self._rows.utt).max()), 1 + int(place.max(initial=0)))
        utt = np.repeat(utts, width)
        place += np.searchsorted(utt, rows.utt)
        parent = np.searchsorted(self._rows.utt, utt)
        parent[place] = source
        laid_out = _Rows.empty(utt, self._rows.context[parent])
        for values, own in zip(laid_out, rows, strict=True):
            values[place] = own
        return laid_out, parent, place
